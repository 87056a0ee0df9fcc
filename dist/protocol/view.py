"""The rebalancer's view of a run: the status with the highest vote, and the contents of its live rows. No I/O."""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.store import ProtocolStore, StoreError
from evenroute.dist.protocol.types import EPOCH_RANDOM_BITS, MAX_LIVES_AHEAD
from evenroute.dist.wire.messages import NO_KEY, JobShape, Key, RankStatus, Rows
from evenroute.dist.wire.placement import unpack_placement
from evenroute.dist.wire.received import live_digest_array, live_key_array
from evenroute.eplb.placement.placement import Placement, PlacementRow, row_digest
from evenroute.eplb.placement.topology import Topology


@dataclass
class RankView:
    """What one rank last reported; key fields are the highest it reported. ``heard_at``: the driver's clock.

    ``peer``: the connection that showed the rank's ``identity`` last; messages of others in its name are
    ignored. ``trouble``: what was wrong with its last window, "" = nothing.
    """

    peer: Hashable
    heard_at: float
    identity: int
    vote: int = 0
    held: Key = NO_KEY
    fence: int = 0
    conflict: Key = NO_KEY
    refused: Key = NO_KEY
    trouble: str = ""
    trouble_at: float = 0.0
    shadow: bool = False

    def update(self, status: RankStatus, peer: Hashable, now: float) -> None:
        """Take a status; one that was overtaken changes no key."""
        self.peer, self.heard_at = peer, now
        self.vote, self.fence = max(self.vote, status.vote), max(self.fence, status.fence)
        self.held = max(self.held, status.held)
        self.conflict = max(self.conflict, status.conflict)
        self.refused = max(self.refused, status.refused)
        self.shadow = status.shadow


class RunView:
    """Statuses of the current run. The agreed part is equal on all ranks, so the highest vote has the newest."""

    def __init__(self, run: int, job: JobShape, store: ProtocolStore) -> None:
        self.run = run
        self.job = job
        self.ranks: dict[int, RankView] = {}
        self.newest_status: RankStatus | None = None
        self._store = store
        self._rows: dict[int, PlacementRow] = {}
        self._missing: set[int] = set()
        self._key_range: tuple[bytes, Key, Key] = (b"", NO_KEY, NO_KEY)
        self._live: tuple[bytes, Placement] | None = None

    def add(self, status: RankStatus, peer: Hashable, now: float) -> None:
        """Take a status of this run (its job shape is this one)."""
        rank = self.ranks.setdefault(status.rank, RankView(peer, now, status.identity))
        rank.update(status, peer, now)
        if self._supersedes(status):
            changed = self.newest_status is None or self.newest_status.live_digests != status.live_digests
            self.newest_status = status
            if changed:
                self._look_up(live_digest_array(status))

    def is_another(self, status: RankStatus) -> bool:
        """Whether another connection already speaks for the status's rank."""
        known = self.ranks.get(status.rank)
        return known is not None and known.identity != status.identity

    def lives(self, now: float, live_s: float) -> bool:
        """Whether a rank of this run was heard in the last ``live_s`` seconds."""
        return any(now - rank.heard_at < live_s for rank in self.ranks.values())

    def speaks_for(self, peer: Hashable, rank: int) -> bool:
        """Whether ``peer`` is the connection that showed this rank's identity."""
        return rank in self.ranks and self.ranks[rank].peer == peer

    def _supersedes(self, status: RankStatus) -> bool:
        return self.newest_status is None or status.vote > self.newest_status.vote

    def _look_up(self, digests: NDArray[np.int64]) -> None:
        known, self._rows, self._missing = self._rows, {}, set()
        for digest in set(digests.tolist()):
            row = known.get(digest) or self._find(digest)
            if row is None:
                self._missing.add(digest)
            else:
                self._rows[digest] = row

    def _find(self, digest: int) -> PlacementRow | None:
        try:
            found = self._store.row(digest)
        except StoreError:
            return None  # unusable, as if absent: the rank is asked
        return None if found is None or len(found.slots) != self.job.num_slots else found

    def heard_all(self) -> bool:
        """Whether each rank of the run was heard."""
        return len(self.ranks) == self.job.ep_size

    def missing_rows(self) -> bool:
        """Whether the content of a live row is not known."""
        return bool(self._missing)

    def furthest_peer(self) -> Hashable:
        """Whom to ask for the live rows: of the ranks with the highest vote, the one heard last."""
        return max(self.ranks.values(), key=lambda rank: (rank.vote, rank.heard_at)).peer

    def take_rows(self, message: Rows) -> dict[int, PlacementRow]:
        """Take a rank's live rows; returns those that were missing, by digest. Raises ValueError on a bad placement."""
        placement = unpack_placement(message.placement, self.job)
        found: dict[int, PlacementRow] = {}
        for layer in range(placement.num_layers):
            row = placement.row(layer)
            digest = row_digest(*row)
            if digest in self._missing:
                found[digest] = row
        self._rows.update(found)
        self._missing.difference_update(found)
        return found

    def live_placement(self) -> Placement | None:
        """What the ranks route with, as of the newest status; None until all its rows are known."""
        if self.newest_status is None or self._missing:
            return None
        data = self.newest_status.live_digests
        if self._live is None or self._live[0] != data:
            rows = [self._rows[digest] for digest in live_digest_array(self.newest_status).tolist()]
            topology = Topology(self.job.ep_size, self.job.num_nodes)
            self._live = (data, Placement.from_rows(rows, self.job.num_logical_experts, topology))
        return self._live[1]

    def key_range(self, status: RankStatus) -> tuple[Key, Key]:
        """Lowest and highest live key of a status."""
        if self._key_range[0] != status.live_keys:
            keys = [(epoch, version) for epoch, version in live_key_array(status).tolist()]
            self._key_range = (status.live_keys, min(keys), max(keys))
        return self._key_range[1], self._key_range[2]

    def live_range(self) -> tuple[Key, Key]:
        """Lowest and highest live key of the view; (NO_KEY, NO_KEY) without one."""
        return (NO_KEY, NO_KEY) if self.newest_status is None else self.key_range(self.newest_status)

    def given_up(self) -> Key:
        """The highest key that failed, is in conflict, or that some rank refused."""
        failed = NO_KEY if self.newest_status is None else self.newest_status.failed
        return max([failed, *(max(rank.conflict, rank.refused) for rank in self.ranks.values())])

    def settled(self, newest: Key) -> bool:
        """Whether version ``newest`` is live in all layers, or never will be (failed, conflict, refused, shadow)."""
        if self.newest_status is None:
            return False
        if any(rank.shadow for rank in self.ranks.values()):
            return not self.ranks_below(newest)  # no rank of the job will ever take it up
        return self.live_range() == (newest, newest) or self.given_up() >= newest

    def ranks_below(self, newest: Key) -> tuple[int, ...]:
        """Ranks that have not reported that they hold version ``newest``."""
        held = (self.ranks[rank].held if rank in self.ranks else None for rank in range(self.job.ep_size))
        return tuple(rank for rank, key in enumerate(held) if key is None or key < newest)


def implausible(
    status: RankStatus, view: RunView | None, *, known_epoch: int, newest: Key | None
) -> str | None:
    """Why no honest rank can have sent this status; None if one may have.

    ``known_epoch``: the highest of this rebalancer or its store; ``newest``: key of the newest version that can be
    known to a rank this life leads, None before the life began.
    """
    if status.fence >> EPOCH_RANDOM_BITS > (known_epoch >> EPOCH_RANDOM_BITS) + MAX_LIVES_AHEAD:
        return f"fence {status.fence}: more than {MAX_LIVES_AHEAD} lives above epoch {known_epoch}"
    if view is None or status.run != view.run:
        return None
    if status.job != view.job:
        return f"job shape {status.job}, the run has {view.job}"
    if view.is_another(status):
        return "another peer speaks for this rank"
    highest = max(status.held, view.key_range(status)[1])
    if newest is not None and status.fence <= newest[0] and highest > newest:
        # Its fence is not above this epoch, so no rebalancer can have published that.
        return f"has version {highest}, which was never published"
    return None
