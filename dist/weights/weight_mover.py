"""Experts move while serving: `WeightMover` stages layers over a process group of its own and commits them between
steps.

Memory order, on CUDA. A chunk runs on the communicator's stream, but begins after everything the main stream had when
`advance` was called, and the main stream goes on after it. So a send reads what the last commit of its layer wrote, a
receive writes a buffer whose last commit has read it, and every chunk has the same place among the main stream's
collectives on all ranks: two communicators never wait for each other on the device. A commit comes after all ranks
agreed that the layer is staged everywhere: no peer reads the old rows then.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch.distributed as torch_dist
from numpy.typing import NDArray

from evenroute.dist.groups import is_adopted, require_group
from evenroute.dist.weights.agree import compare_weights
from evenroute.dist.weights.chunks import ChunkRecord, ChunkRunner, pick_chunks
from evenroute.dist.weights.exchange import MigrationError
from evenroute.dist.weights.expert_weights import LOADER_CALL, ExpertWeights, Loader
from evenroute.dist.weights.migration_config import MigrationConfig
from evenroute.dist.weights.mover import MoveTotals, TableUpdater
from evenroute.dist.weights.open_layer import OpenLayer
from evenroute.dist.weights.staging import StagingBuffers
from evenroute.dist.weights.verify import ChecksumTest, ExpectedChecksums
from evenroute.eplb._checks import (
    require_callable,
    require_instance,
    require_int,
    require_parts,
)
from evenroute.eplb.placement.placement import Placement, PlacementRow

__all__ = ["MigrationConfig", "MigrationError", "WeightMover"]


class WeightMover:
    """A `LayerMover` over real weights.

    Create it on all ranks of ``group`` together (it talks to them), with one mover and one group per model: a draft
    model has its own. The group carries nothing else.
    """

    def __init__(
        self,
        weights: ExpertWeights,
        tables: TableUpdater,
        *,
        group: torch_dist.ProcessGroup,
        resident: Placement | None = None,
        loader: Loader | None = None,
        config: MigrationConfig | None = None,
    ) -> None:
        """Attach to the weights.

        Args:
            weights: the registered tensors of this rank.
            tables: written at each commit, after the weights.
            group: process group of its own over the EP ranks: NCCL for CUDA weights, gloo for CPU weights.
            resident: which expert every slot's weights are at this moment (identity order as loaded from a checkpoint,
                say). Without it a loader is needed.
            loader: gives an expert's weights; `load` then fills the slots with it instead of moving them.
            config: see there.

        Raises:
            ValueError: neither ``resident`` nor ``loader``; arguments of another kind; numbers that do not fit; ranks
                that disagree about them.
        """
        require_instance("weights", weights, ExpertWeights)
        require_parts("tables", tables, "DispatchTables", ("update_layer", "load"))
        if config is not None:
            require_instance("config", config, MigrationConfig)
        if loader is not None:
            require_callable("loader", loader, LOADER_CALL)
        if resident is None and loader is None:
            raise ValueError(
                "resident and loader are both missing: nothing says which expert the weights of a slot are"
            )
        self.config = config or MigrationConfig()
        self.weights = weights
        self.group = group
        self.rank, self.ep_size = require_group("group", group)
        self._tables = tables
        self._loader = loader
        if resident is not None:
            self._check_resident("resident", resident)
        # Slots of every layer as the weights lie now.
        self._rows = [] if resident is None else [row.copy() for row in resident.physical_to_logical]
        self._num_experts = 0
        settings: dict[str, object] = dict(vars(self.config))
        settings["loader"] = "none" if loader is None else "given"
        settings["digest of resident"] = "none" if resident is None else f"{resident.digest():#x}"
        if not is_adopted(group):  # else the members have compared `weights_digest` as they came
            compare_weights(weights, settings, group)
        self._buffers = StagingBuffers(weights, self.config.staging_bytes)
        self.num_buffers = self._buffers.num_buffers
        self._runner = ChunkRunner(group, weights.device, limit_s=self.config.transfer_limit_s)
        self._open: deque[OpenLayer] = deque()
        self._num_committed = 0
        self._error: str | None = None
        self._expected: ExpectedChecksums | None = None
        self._commit_checks: deque[ChecksumTest] = deque()

    # Job start, reload

    def load(self, placement: Placement) -> None:
        """Job start, on all ranks together: slot i holds expert map[i] afterwards, then the tables say so.

        With a loader every local slot is filled by it; else the weights are moved from ``resident`` (blocking).

        Raises:
            ValueError: the placement does not fit the weights, or the loader's tensors do not.
            MigrationError: a transfer failed, or (``verify``) replicas of an expert differ between ranks.
        """
        self._check_resident("placement", placement)
        assert not self._open, "load while layers are open"
        if self._loader is not None:
            for layer in range(self.weights.num_layers):
                self.weights.load(layer, self._local(placement.physical_to_logical[layer]), self._loader)
        else:
            self._move_all(placement)
        self._runner.totals = MoveTotals()  # from here on: while serving
        self._num_experts = placement.num_logical_experts
        self._rows = [row.copy() for row in placement.physical_to_logical]
        self._rebuild_checksums()
        self._tables.load(placement)

    def slot_experts(self, layer: int) -> NDArray[np.int32]:
        """``[local slots] int32``: which expert belongs in each local slot of ``layer`` now. For an engine that writes
        weights itself (RL, hot swap); see `reload` for copies under way. ValueError for a layer out of range."""
        require_int("layer", layer, 0, self.weights.num_layers - 1)
        return self._local(self._rows[layer]).copy()

    def reload(self, loader: Loader) -> None:
        """New weights for all experts (RL, hot swap), on all ranks at the same step: fills every live slot, and every
        staged copy of a layer that is open, so that a commit agreed before cannot bring old weights back.

        Raises:
            ValueError: the loader's tensors are not those registered, or differ in shape or dtype.
            MigrationError: as `load`.
        """
        require_callable("loader", loader, LOADER_CALL)
        self._finish_chunk(block=True)
        for layer in range(self.weights.num_layers):
            self.weights.load(layer, self.slot_experts(layer), loader)
        for one in self._open:
            moved = one.moved_on(self.rank) if one.transfer is not None else []
            target = self._local(one.target.slots)
            for slot in moved:
                self.weights.load_staged(
                    one.layer, int(target[slot]), loader, [r[slot] for r in one.staged_rows]
                )
        self._rebuild_checksums()

    def weights_written(self) -> None:
        """The engine itself has written new weights into the live slots, each expert into those that `slot_experts`
        says, on all ranks at the same step: what is staged of open layers is sent again before this returns, so that a
        commit agreed before cannot bring old weights back. With nothing open, and without ``verify``, free.

        Raises:
            MigrationError: as `load`.
        """
        self._finish_chunk(block=True)
        self._rebuild_checksums()
        begun = [one for one in self._open if one.transfer is not None]
        for one in begun:
            one.restart()
        while not all(one.enqueued for one in begun):
            self.advance()
        self._finish_chunk(block=True)

    # LayerMover

    def open_layer(self, layer: int, live: PlacementRow, target: PlacementRow) -> None:
        """Queue a layer for transfer into a staging buffer."""
        assert np.array_equal(self._rows[layer], live.slots), (
            f"layer {layer}: weights are not where the live row says"
        )
        assert all(one.layer != layer for one in self._open), f"layer {layer} is open already"
        buffer = self._buffers.take()
        rows = self._buffers.rows(buffer, layer)
        self._open.append(OpenLayer(layer, live, target, buffer, rows, self.weights.layers[layer]))

    def advance(self) -> None:
        """Enqueue the next chunks, up to ``chunk_bytes``, the same on all ranks."""
        self._check_commits()
        self._finish_chunk(block=not self._runner.cuda)
        config = self.config
        picked = pick_chunks(self._open, self._topology, config.chunk_bytes, config.max_peers)
        if picked:
            self._runner.enqueue(picked, self._test_staged)

    def staged(self) -> int:
        """See `LayerMover`."""
        count = self._num_committed
        for one in self._open:
            if not self._is_staged(one):
                break
            count += 1
        return count

    def error(self) -> str | None:
        """See `LayerMover`; only the verifying mode finds errors."""
        return self._error

    def commit_layer(self, layer: int, row: PlacementRow) -> None:
        """Weights of the moved slots if the layer is open, then its table row, on the current stream."""
        if not self._open or self._open[0].layer != layer:
            if not np.array_equal(self._rows[layer], row.slots):
                raise MigrationError(f"migration: commit of layer {layer} needs weights that were not moved")
            self._tables.update_layer(layer, row)
            return
        one = self._open.popleft()
        assert self._is_staged(one), f"layer {layer} committed before it was staged"
        assert np.array_equal(one.target.slots, row.slots), f"layer {layer} committed with another row"
        moved = one.commit(self.rank)
        self._rows[layer] = np.array(row.slots, dtype=np.int32)
        self._num_committed += 1
        self._buffers.give_back(one.buffer)
        if self._expected is not None:
            what = f"commit of layer {layer}"
            now = self._local(self._rows[layer])
            self._commit_checks.append(self._expected.test(what, layer, moved, now, one.weights.rows))
        self._tables.update_layer(layer, row)
        if not self._runner.cuda:
            self._check_commits()

    def discard(self) -> None:
        """See `LayerMover`."""
        self._finish_chunk(block=not self._runner.cuda)
        for one in self._open:
            if one.transfer is not None and not self._is_staged(one):
                raise MigrationError(f"migration: discard of layer {one.layer} in the middle of its transfer")
            self._buffers.give_back(one.buffer)
        self._open.clear()
        self._num_committed = 0
        self._error = None

    def in_flight(self) -> str | None:
        """See `LayerMover`."""
        waiting = (one.describe() for one in self._open if not self._is_staged(one))
        return self._runner.in_flight() or next(waiting, None)

    def close(self) -> None:
        """Stop the watchdog thread (CUDA). Nothing may be in flight any more."""
        self._runner.close()

    @property
    def totals(self) -> MoveTotals:
        """See `LayerMover`."""
        return self._runner.totals

    @property
    def bytes_received(self) -> int:
        """Bytes that came from other ranks so far."""
        return self._runner.bytes_received

    def record_chunks(self) -> list[ChunkRecord]:
        """From now on: what each chunk moved and how long it took, appended to the list that is returned."""
        self._runner.records = []
        return self._runner.records

    @property
    def staging_bytes(self) -> int:
        """Memory that the staging buffers take."""
        return self._buffers.num_bytes

    def __repr__(self) -> str:
        return f"<WeightMover rank {self.rank} of {self.ep_size}, {self.weights!r}, {len(self._open)} layers open>"

    # Inside

    def _local(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        first = self.rank * self.weights.num_local_slots
        return slots[first : first + self.weights.num_local_slots]

    def _check_resident(self, name: str, placement: Placement) -> None:
        require_instance(name, placement, Placement)
        found = (placement.num_layers, placement.num_local_slots, placement.topology.ep_size)
        wanted = (self.weights.num_layers, self.weights.num_local_slots, self.ep_size)
        if found != wanted:
            raise ValueError(
                f"placement has (layers, local slots, ep_size) = {found}, the weights and their group have {wanted}"
            )
        self._topology = placement.topology

    def _move_all(self, placement: Placement) -> None:
        for layer in range(self.weights.num_layers):
            live, target = PlacementRow(self._rows[layer], None), placement.row(layer)
            if np.array_equal(live.slots, target.slots):
                continue
            self.open_layer(layer, live, target)
            one = self._open[0]
            while not one.enqueued:
                self.advance()
            self._finish_chunk(block=True)
            one.commit(self.rank)
            self._rows[layer] = np.array(target.slots, dtype=np.int32)
            self._buffers.give_back(self._open.popleft().buffer)

    def _rebuild_checksums(self) -> None:
        if self.config.verify:
            local = np.stack([self._local(row) for row in self._rows])
            self._expected = ExpectedChecksums.collect(self.weights, local, self._num_experts, self.group)

    def _finish_chunk(self, *, block: bool) -> None:
        if self._runner.finish(block=block) and not self._runner.cuda:
            for one in self._open:
                if one.enqueued and not one.staged:
                    self._test_staged(one)
                    one.staged = True

    def _test_staged(self, one: OpenLayer) -> None:
        if self._expected is not None:
            moved, target = one.moved_on(self.rank), self._local(one.target.slots)
            one.test = self._expected.test(
                f"staging of layer {one.layer}", one.layer, moved, target, one.staged_rows
            )

    def _is_staged(self, one: OpenLayer) -> bool:
        if self._runner.cuda and not one.staged:
            one.staged = one.done is not None and one.done.query()  # type: ignore[no-untyped-call]
        if one.staged and one.test is not None:
            self._error = self._error or one.test.error()
            one.test = None
        return one.staged

    def _check_commits(self) -> None:
        while self._commit_checks and self._commit_checks[0].ready():
            bad = self._commit_checks.popleft().error()
            if bad is not None:
                raise MigrationError(f"migration: {bad}")
