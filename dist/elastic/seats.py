"""Builds what a process works with in a membership: its slots' weights, tables, mover and rank agent."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from evenroute.dist.elastic.config import ElasticConfig
from evenroute.dist.elastic.groups import MemberGroups
from evenroute.dist.elastic.source import ExpertSource, fill_slot
from evenroute.dist.elastic.state import ElasticSeat
from evenroute.dist.membership.rows import Rows, columns_of
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.protocol.stream import RankStream
from evenroute.dist.rank.agent import RankAgent
from evenroute.dist.rank.start import connect
from evenroute.dist.rank.step import Seat
from evenroute.dist.rank.switch import VoteGate
from evenroute.dist.rank.thread import Lock
from evenroute.dist.weights.agree import weights_digest
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.dist.wire.membership import MembershipRecord
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.tables.tables import DispatchTables


class SeatBuilder:
    """``held [L, local slots]``: the experts whose weights the local slots hold, -1 = nobody's."""

    def __init__(
        self,
        config: ElasticConfig,
        weights: ExpertWeights,
        counters: ExpertCounters,
        source: ExpertSource,
        migration: MigrationConfig | None,
    ) -> None:
        self.config = config
        self.weights = weights
        self.counters = counters
        self.device = weights.device
        self.num_experts = counters.num_logical_experts
        self.fetched = 0  # experts that the source gave
        self.held: NDArray[np.int32] = np.full((weights.num_layers, weights.num_local_slots), -1, np.int32)
        self._source = source
        self._migration = MigrationConfig() if migration is None else migration
        self._mover: WeightMover | None = None
        settings = dict(vars(self._migration)) | {"window_steps": config.agent.window_steps}
        self.digest = weights_digest(weights, settings)

    def fill(self, record: MembershipRecord, number: int, rows: Rows) -> None:
        """The member's slots hold what ``rows [L, P]`` say; what they hold already stays."""
        place = record.numbers.index(number)
        self.fill_columns(columns_of(rows, len(record.members))[:, place])

    def fill_columns(self, columns: Rows) -> None:
        """The local slots hold ``columns [L, local slots]``."""
        for layer, slot in np.argwhere(self.held != columns).tolist():
            self.held[layer, slot] = -1
            fill_slot(self.weights, layer, slot, int(columns[layer, slot]), self._source)
            self.held[layer, slot] = columns[layer, slot]
            self.fetched += 1

    def took(self, core: RankCore) -> None:
        """The slots hold what the core's live rows say: migrations have been committed."""
        local = self.weights.num_local_slots
        rows = np.stack([row.slots for row in core.state.live_rows])
        self.held = rows[:, core.rank * local : (core.rank + 1) * local].astype(np.int32)

    def finish_device(self) -> None:
        """A step is complete once the device has done it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def seat(
        self,
        record: MembershipRecord,
        number: int,
        rows: Rows,
        groups: MemberGroups,
        fence: int,
        first_step: int,
        stream: RankStream | None,
        lock: Lock,
        gate: VoteGate,
        rewire: Callable[[ElasticSeat], None],
    ) -> tuple[RankAgent, ElasticSeat]:
        """The rank agent of a membership, from ``first_step`` on; its layers are wired by ``rewire`` before."""
        shape = record.shape
        placement = Placement(rows, self.num_experts, Topology(shape.ep_size, shape.num_nodes))
        tables = DispatchTables(placement, ep_rank=groups.rank, device=self.device)
        self._mover = WeightMover(
            self.weights, tables, group=groups.move, resident=placement, config=self._migration
        )
        self._mover.load(placement)
        seat = ElasticSeat(
            record.number, number, groups.rank, groups.size, placement, tables, self.counters, groups.ep
        )
        rewire(seat)
        if stream is None:
            self.counters.take()  # what ran before is no load of the job
        else:
            with lock:
                stream.move(record.run, groups.rank, time.monotonic())
        started = StartedJob(record.run, fence, record.key, shape, pack_placement(placement))
        agent = RankAgent(
            self.config.agent,
            started,
            tables=tables,
            counters=self.counters,
            mover=self._mover,
            vote_group=groups.vote,
            link=connect(self.config.agent),
            seat=Seat(record.number, first_step, lock, gate, stream),
        )
        return agent, seat

    def close(self) -> None:
        """End the mover's watchdog."""
        if self._mover is not None:
            self._mover.close()
            self._mover = None
