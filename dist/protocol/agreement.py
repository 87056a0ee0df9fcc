"""The agreement: which layer switches to which row after which vote. A pure state machine, equal on all ranks.

Every rank posts one vector per vote; they are reduced with MIN over int64. What follows is a function of the reduced
vectors and of the agreed state alone, so all ranks do the same at the same step (design, "Decide").
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.wire.messages import NO_KEY, Key
from evenroute.eplb.placement.placement import (
    DIGEST_MASK,
    Placement,
    PlacementRow,
    placement_digest,
    row_digest,
)

VECTOR_LENGTH: Final = 11
"""int64: epoch, -epoch, version, -version, digest, -digest, staged, -error, state hash, -state hash, go."""


class AgreementError(RuntimeError):
    """The ranks' agreed states differ (a defect, or ranks started with different settings): the job has to end."""


@dataclass(frozen=True, eq=False)
class Version:
    """A placement under its key, with its rows and digests, so that a switch has nothing to compute."""

    key: Key
    placement: Placement
    rows: tuple[PlacementRow, ...]
    row_digests: tuple[int, ...]
    digest: int

    @classmethod
    def of(cls, key: Key, placement: Placement) -> "Version":
        """Compute rows and digests of ``placement`` (milliseconds at 92 x 1,024 slots: not on the forward thread)."""
        rows = tuple(placement.rows())
        digests = tuple(row_digest(*row) for row in rows)
        return cls(key, placement, rows, digests, placement_digest(digests))


@dataclass(frozen=True, eq=False)
class Open:
    """Enqueue the transfer of ``layer``: all ranks do so at this step, in this order."""

    layer: int
    live_row: PlacementRow
    target_row: PlacementRow


@dataclass(frozen=True, eq=False)
class Commit:
    """Before this step's routing: weights of the moved slots if the layer was opened, then tables."""

    layer: int
    row: PlacementRow
    key: Key


@dataclass(frozen=True)
class Discard:
    """Forget what is opened and not committed; the staged count and the error begin anew.

    Comes as a target fails and, always, first of all as a target starts.
    """


@dataclass(frozen=True)
class Switch:
    """Every rank may go on in membership ``number``, and nothing is under way: all do, at this step. Comes last."""

    number: int


Action: TypeAlias = Open | Commit | Discard | Switch


@dataclass(frozen=True)
class Reduced:
    """A reduced vector, read. ``candidate``: key all ranks named, or None; ``same_digest``: and its digest too.
    ``min_go``: the highest membership that all ranks are ready for."""

    candidate: Key | None
    same_digest: bool
    min_staged: int
    any_error: bool
    min_go: int = 0


def vote_vector(
    voted: Version | None, staged: int, error: bool, state_hash: int, go: int = 0
) -> NDArray[np.int64]:
    """One rank's vote, int64 [VECTOR_LENGTH]; all values are below 2^62, so each has a negative."""
    (epoch, version), digest = (NO_KEY, 0) if voted is None else (voted.key, voted.digest)
    values = (
        epoch,
        -epoch,
        version,
        -version,
        digest,
        -digest,
        staged,
        -int(error),
        state_hash,
        -state_hash,
        go,
    )
    return np.array(values, dtype=np.int64)


def read_reduced(vector: Sequence[int] | NDArray[np.int64]) -> Reduced:
    """Read a MIN-reduced vector. Raises AgreementError where the agreed states differ."""
    values = vector.tolist() if isinstance(vector, np.ndarray) else list(vector)
    assert len(values) == VECTOR_LENGTH, f"vector of {len(values)} values"
    if values[8] != -values[9]:
        raise AgreementError(
            f"agreement: the ranks' agreed states differ (hashes {values[8]:#x} and {-values[9]:#x}): "
            "a rank missed a vote, or was started with another placement, agree_every or number of buffers"
        )
    same_key = values[0] == -values[1] and values[2] == -values[3]
    return Reduced(
        candidate=(values[0], values[2]) if same_key else None,
        same_digest=values[4] == -values[5],
        min_staged=values[6],
        any_error=values[7] < 0,
        min_go=values[10],
    )


class AgreedState:
    """Target, live rows and how far the switch is. No I/O, no clock; forward thread only.

    ``start`` is live in all layers, and its key the last target. ``num_buffers`` layers may be open beyond the
    committed ones; ``settings`` (agree_every, for one) only go into the hash, so that a misfit ends the job at once.
    ``membership``: number of the one that these ranks are; 0 where ranks neither come nor go.
    """

    def __init__(
        self, start: Version, *, num_buffers: int, settings: tuple[int, ...] = (), membership: int = 0
    ) -> None:
        layers = range(start.placement.num_layers)
        self.num_buffers = num_buffers
        self.membership = membership
        self.live_rows: list[PlacementRow] = list(start.rows)
        self.live_digests: list[int] = list(start.row_digests)
        self.live_keys: list[Key] = [start.key for _ in layers]
        self.target: Version | None = None
        self.last_target: Key = start.key
        self.moved: list[int] = []
        self.opened = 0
        self.committed = 0
        self.failing = False
        self.failed: Key = NO_KEY
        self.conflict: Key = NO_KEY
        self.votes_decided = 0
        self._settings = (num_buffers, *settings, membership)
        self._hash: int | None = None

    def decide(self, vector: Sequence[int] | NDArray[np.int64], voted: Version | None) -> list[Action]:
        """Apply one reduced vote: ``voted`` is what this rank pinned as it posted it. Returns actions, in order.

        Raises AgreementError where the agreed states differ.
        """
        reduced = read_reduced(vector)
        self.votes_decided += 1
        actions: list[Action] = []
        if self.target is not None and reduced.any_error and not self.failing:  # rule 1
            self.failing, self._hash = True, None
        if self._may_commit():  # rule 2
            actions += self._commit_staged(reduced)
        if self.failing and reduced.min_staged == self.opened:  # rule 3
            actions += self._fail()
        candidate = self._candidate(reduced, voted)
        if reduced.min_go > self.membership:  # before rule 4: nothing begins any more
            return actions + self._leave(reduced.min_go)
        if candidate is not None and self._may_start():  # rule 4
            actions += self._start(candidate)
            candidate = None
        if self.target is not None and not self.failing and candidate is None:  # rule 5
            actions += self._open()
        return actions

    def _may_commit(self) -> bool:
        return self.target is not None and not self.failing

    def _may_start(self) -> bool:
        return self.target is None or (not self.failing and self.opened == self.committed)

    def _commit_staged(self, reduced: Reduced) -> list[Action]:
        assert self.target is not None
        actions: list[Action] = []
        for layer in self.moved[self.committed : reduced.min_staged]:
            actions.append(self._commit(layer))
            self.committed += 1
        self._clear_if_done()
        return actions

    def _commit(self, layer: int) -> Commit:
        assert self.target is not None
        row = self.target.rows[layer]
        self.live_rows[layer] = row
        self.live_digests[layer] = self.target.row_digests[layer]
        self.live_keys[layer] = self.target.key
        self._hash = None
        return Commit(layer, row, self.target.key)

    def _clear_if_done(self) -> None:
        if self.committed == len(self.moved):
            self._drop_target()

    def _drop_target(self) -> None:
        self.target, self.failing, self._hash = None, False, None
        self.moved, self.opened, self.committed = [], 0, 0

    def _fail(self) -> list[Action]:
        assert self.target is not None
        self.failed = self.target.key
        self._drop_target()
        return [Discard()]

    def _leave(self, number: int) -> list[Action]:
        """Opened layers commit or fail first; a target that could only open more counts as failed."""
        actions: list[Action] = []
        if self.target is not None and not self.failing and self.opened == self.committed:
            actions += self._fail()
        return [*actions, Switch(number)] if self.target is None else actions

    def _candidate(self, reduced: Reduced, voted: Version | None) -> Version | None:
        if reduced.candidate is None or voted is None:
            return None
        assert voted.key == reduced.candidate, "the vote's pin was lost"
        if not reduced.same_digest:
            if voted.key > self.conflict:
                self.conflict, self._hash = voted.key, None
            return None
        if voted.key <= self.last_target:
            return None
        return voted

    def _start(self, version: Version) -> list[Action]:
        self._drop_target()
        self.target, self.last_target = version, version.key
        self.moved = [layer for layer in range(len(self.live_rows)) if self._moves(layer, version)]
        moved = set(self.moved)
        others = [layer for layer in range(len(self.live_rows)) if layer not in moved]
        actions: list[Action] = [Discard(), *(self._commit(layer) for layer in others)]
        self._clear_if_done()
        return actions

    def _moves(self, layer: int, version: Version) -> bool:
        if version.row_digests[layer] == self.live_digests[layer]:
            return False
        return not np.array_equal(self.live_rows[layer].slots, version.rows[layer].slots)

    def _open(self) -> list[Action]:
        assert self.target is not None
        actions: list[Action] = []
        limit = min(len(self.moved), self.committed + self.num_buffers)
        for layer in self.moved[self.opened : limit]:
            actions.append(Open(layer, self.live_rows[layer], self.target.rows[layer]))
            self.opened, self._hash = self.opened + 1, None
        return actions

    def state_hash(self) -> int:
        """62-bit hash of all that has to be equal on all ranks."""
        if self._hash is None:
            target = (*NO_KEY, 0) if self.target is None else (*self.target.key, self.target.digest)
            head = (*self._settings, *target, *self.last_target, *self.failed, *self.conflict)
            progress = (self.opened, self.committed, int(self.failing), len(self.moved), *self.moved)
            live = [value for key in self.live_keys for value in key]
            values = (*head, *progress, *live, *self.live_digests)
            packed = struct.pack(f"<{len(values)}q", *values)
            digest = hashlib.blake2b(packed, digest_size=8).digest()
            self._hash = int.from_bytes(digest, "little") & DIGEST_MASK
        return self._hash
