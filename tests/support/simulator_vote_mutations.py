"""Planted faults in the votes: the first part of `simulator_mutations`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.agreement import Action, AgreedState, Commit, Discard, Open, Reduced, Version
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.protocol.types import Phase
from evenroute.dist.wire.placement import pack_placement
from support.simulator_rank import SimRank
from support.simulator_world import World

Vector = Sequence[int] | NDArray[np.int64]


# ----------------------------------------------------------------------------------------------- votes


class TrustingState(AgreedState):
    """Takes whatever it is given as the version that was voted."""

    def _candidate(self, reduced: Reduced, voted: Version | None) -> Version | None:
        if reduced.candidate is None or voted is None or not reduced.same_digest:
            return None
        return voted if reduced.candidate > self.last_target else None


class NoPin(RankCore):
    """Reads its newest placement when the vote is read, not when it was posted."""

    def decide(self, vote: int, reduced: Vector) -> list[Action]:
        self._voted = self.newest
        return super().decide(vote, reduced)


class PollingRank(SimRank):
    """Goes on if the vote is not reduced yet, and looks again at the next step."""

    posted = -1

    def agree(self, vote: int) -> bool:
        if self.posted >= 0:
            reduced = self.job.reduced.get(self.posted)
            if reduced is None:
                return True
            self.decide(self.posted, reduced)
        self.posted += 1
        self.post(self.posted)
        return True


class TwoVotes(RankCore):
    """Allows a vote to be posted while another is outstanding."""

    def vote(self) -> NDArray[np.int64]:
        if not hasattr(self, "pins"):
            self.pins: list[Version | None] = []
        self._vote_posted = False
        vector = super().vote()
        self.pins.append(self._voted)
        return vector

    def decide(self, vote: int, reduced: Vector) -> list[Action]:
        self._voted = self.pins.pop(0)
        actions = super().decide(vote, reduced)
        self._vote_posted = bool(self.pins)
        return actions


class PostingFirst(SimRank):
    """Posts vote k before it reads vote k-1."""

    posted = -1

    def agree(self, vote: int) -> bool:
        if self.posted < vote:
            self.posted = vote
            self.post(vote)
        if vote == 0:
            return True
        reduced = self.job.reduced.get(vote - 1)
        if reduced is None:
            self.job.waiters.setdefault(vote - 1, []).append(self)
            return False
        self.decide(vote - 1, reduced)
        return True


class FencingAtRead(RankCore):
    """Drops what was voted if a higher epoch was heard since."""

    def decide(self, vote: int, reduced: Vector) -> list[Action]:
        if self._voted is not None and self._voted.key[0] < self.fence:
            self._voted = None
        return super().decide(vote, reduced)


class OwnStaged(RankCore):
    """Commits what is staged here, whatever the others have."""

    def decide(self, vote: int, reduced: Vector) -> list[Action]:
        return super().decide(vote, [*reduced[:6], self._staged, *reduced[7:]])


class LocalOpening(AgreedState):
    """Opens the next layer as soon as one is staged here."""

    local_staged = 0

    def _open(self) -> list[Action]:
        assert self.target is not None
        limit = min(len(self.moved), max(self.committed, self.local_staged) + self.num_buffers)
        layers = self.moved[self.opened : limit]
        self.opened, self._hash = self.opened + len(layers), None
        return [Open(i, self.live_rows[i], self.target.rows[i]) for i in layers]


class TellsLocalStaged(RankCore):
    """Lets the agreed state see the local progress."""

    def decide(self, vote: int, reduced: Vector) -> list[Action]:
        self.state.local_staged = self._staged  # type: ignore[attr-defined]
        return super().decide(vote, reduced)


class NoDraining(AgreedState):
    """A newer version replaces a target at once."""

    def _may_start(self) -> bool:
        return not self.failing


class CommitUnderError(AgreedState):
    """Commits what is staged though a rank reports bad content."""

    def _may_commit(self) -> bool:
        return self.target is not None


class MovesFromLastTarget(AgreedState):
    """Takes for granted that the last target is live."""

    last_version: Version | None = None

    def _start(self, version: Version) -> list[Action]:
        self.base = self.last_version
        actions = super()._start(version)
        self.last_version = version
        return actions

    def _moves(self, layer: int, version: Version) -> bool:
        if self.base is None:
            return super()._moves(layer, version)
        return not np.array_equal(self.base.rows[layer].slots, version.rows[layer].slots)

    def _open(self) -> list[Action]:
        if self.base is None:
            return super()._open()
        rows = self.base.rows
        return [Open(a.layer, rows[a.layer], a.target_row) for a in super()._open()]  # type: ignore[union-attr]


class RollingBack(AgreedState):
    """Undoes the committed layers of a version that fails."""

    def _start(self, version: Version) -> list[Action]:
        self.before = list(zip(self.live_rows, self.live_digests, self.live_keys, strict=True))
        return super()._start(version)

    def _fail(self) -> list[Action]:
        layers = self.moved[: self.committed]
        actions = super()._fail()
        for layer in layers:
            row, self.live_digests[layer], key = self.before[layer]
            self.live_rows[layer], self.live_keys[layer] = row, key
            actions.append(Commit(layer, row, key))
        return actions


class FailedAgain(AgreedState):
    """Forgets that a version was tried."""

    def _fail(self) -> list[Action]:
        actions = super()._fail()
        self.last_target = max(self.live_keys)
        return actions


class StagedAnew(RankCore):
    """Begins the staged count anew though it is the same version again."""

    def decide(self, vote: int, reduced: Vector) -> list[Action]:
        actions = super().decide(vote, reduced)
        if any(isinstance(action, Discard) for action in actions):
            self._staged, self._error = 0, False
        return actions


class OneKey(AgreedState):
    """One version number for all layers."""

    def _commit(self, layer: int) -> Commit:
        commit = super()._commit(layer)
        self.live_keys = [commit.key for _ in self.live_keys]
        return commit


def snapshot_per_rank(world: World, started: StartedJob, rank: int) -> StartedJob:
    """Each rank takes the newest placement that it can get, by itself."""
    master = world.master
    if rank == 0 or master is None or master.core.phase is not Phase.SERVING or master.core.newest is None:
        return started
    newest = master.core.newest
    return StartedJob(
        started.run, master.core.epoch, newest.key, started.job, pack_placement(newest.placement)
    )
