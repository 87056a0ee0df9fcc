"""Planted faults: each takes one rule of the switch protocol away. The simulator has to catch every one.

Where ranks come to differ, the hash in the votes would end the job at once; it is switched off there, so that the
checks of the histories have to see it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.receipt import WindowReceipt
from evenroute.dist.protocol.store import RankWindowRow, Receipt, StoreError
from evenroute.dist.protocol.stream import RankStream
from evenroute.dist.protocol.types import Outgoing
from evenroute.dist.protocol.view import RunView
from evenroute.dist.wire.messages import Ack, Down, JobShape, RankStatus, RankWindow
from support.simulator_store import SimStore
from support.simulator_vote_mutations import (
    CommitUnderError,
    FailedAgain,
    FencingAtRead,
    LocalOpening,
    MovesFromLastTarget,
    NoDraining,
    NoPin,
    OneKey,
    OwnStaged,
    PollingRank,
    PostingFirst,
    RollingBack,
    StagedAnew,
    TellsLocalStaged,
    TrustingState,
    TwoVotes,
    snapshot_per_rank,
)
from support.simulator_world import Parts

# ---------------------------------------------------------------------------------------------- stream


class NoResend(RankStream):
    """Sends a window once."""

    def tick(self, now: float) -> list[RankWindow]:
        return []


class MergingSent(RankStream):
    """Adds later counts to the window that is under way."""

    def add(
        self, first_step: int, last_step: int, tokens: int, counts: NDArray[np.int64], now: float
    ) -> list[RankWindow]:
        sent = self.in_flight
        if sent is None:
            return super().add(first_step, last_step, tokens, counts, now)
        total = np.frombuffer(sent.counts, "<i8") + counts.ravel()
        self.in_flight = RankWindow(
            sent.run, sent.rank, sent.seq, sent.first_step, last_step, sent.tokens + tokens, total.tobytes()
        )
        return [self.in_flight]


class AnyAck(RankCore):
    """Takes acknowledgements of fenced rebalancers."""

    def _pass_fence(self, message: Down) -> bool:
        return super()._pass_fence(message) or isinstance(message, Ack)


class NoFence(RankCore):
    """Takes everything, whoever leads."""

    def _pass_fence(self, message: Down) -> bool:
        super()._pass_fence(message)
        return True


class FenceFollows(RankCore):
    """The last epoch heard leads."""

    def _pass_fence(self, message: Down) -> bool:
        if message.epoch:
            self.fence = message.epoch
        return True


class NoHeartbeat(RankCore):
    """Tells changes once and never again."""

    def next_time(self) -> float:
        self._status_at = 1e9
        return super().next_time()

    def tick(self, now: float) -> list[Any]:
        self._status_at = 1e9
        return super().tick(now)


# ------------------------------------------------------------------------------------------ rebalancer


class NoRandomBits(RebalancerCore):
    """Epochs are counters."""

    def __init__(self, *args: Any, random_bits: Callable[[int], int], **other: Any) -> None:
        super().__init__(*args, random_bits=lambda bits: 0 if bits == 20 else random_bits(bits), **other)


class Unfenced(RebalancerCore):
    """Goes on though a rank is led by a higher epoch."""

    def _fenced(self, status: RankStatus, now: float) -> bool:
        return False


class NoRows(RebalancerCore):
    """Never asks for rows that its store lacks."""

    def _ask_rows(self, now: float) -> list[Outgoing]:
        return []


class UnorderedView(RunView):
    """The status that came last is the view."""

    def _supersedes(self, status: RankStatus) -> bool:
        return True


class Unordered(RebalancerCore):
    """Has such a view."""

    def _adopt(self, run: int, job: JobShape) -> None:
        super()._adopt(run, job)
        if self.view is not None:
            self.view.__class__ = UnorderedView


class OpenView(RunView):
    """Anybody speaks for a rank."""

    def speaks_for(self, peer: Hashable, rank: int) -> bool:
        return rank in self.ranks

    def is_another(self, status: RankStatus) -> bool:
        return False


class TakesWindowsOfAll(RebalancerCore):
    """Takes a rank's windows of whoever sends them."""

    def _adopt(self, status: RankStatus) -> None:
        super()._adopt(status)
        assert self.view is not None
        self.view.__class__ = type("View", (RunView,), {"speaks_for": OpenView.speaks_for})


class TakesStatusesOfAll(RebalancerCore):
    """Takes a rank's status of whoever sends it."""

    def _adopt(self, status: RankStatus) -> None:
        super()._adopt(status)
        assert self.view is not None
        self.view.__class__ = type("View", (RunView,), {"is_another": OpenView.is_another})


class NoToken(RebalancerCore):
    """Follows whichever run it hears."""

    def _receive_status(self, peer: Any, status: RankStatus, now: float) -> list[Outgoing]:
        self._token = status.token
        return super()._receive_status(peer, status, now)


class AckFirst(WindowReceipt):
    """Acknowledges, and commits when it acts the next time."""

    def store(self, batch: list[RankWindowRow], job: JobShape, **other: Any) -> list[Receipt]:
        waiting = getattr(self, "waiting", None)
        self.waiting = (batch, job)
        if waiting is not None:
            super().store(*waiting, **other)
        return [Receipt(window, True, 0) for window in batch]


class NoDuplicateAck(WindowReceipt):
    """Acknowledges a window only as it is stored."""

    def store(self, batch: list[RankWindowRow], job: JobShape, **other: Any) -> list[Receipt]:
        receipts = super().store(batch, job, **other)
        return receipts if all(receipt.stored for receipt in receipts) else []


class NoAnswer(RebalancerCore):
    """Sends a version once."""

    def _answer_status(self, peer: Any, status: RankStatus, now: float) -> list[Outgoing]:
        resent = self.counters.placements_resent
        out = super()._answer_status(peer, status, now)
        return out if self.counters.placements_resent == resent else out[:-1]


# ----------------------------------------------------------------------------------------------- store


class SeqWithoutRun(SimStore):
    """Sequence numbers are kept by rank only."""

    def last_seq(self, run: int, rank: int) -> int:
        return max((seq for (_, its_rank), seq in self._last_seq.items() if its_rank == rank), default=0)


class StoresAgain(SimStore):
    """Inserts whatever comes."""

    def last_seq(self, run: int, rank: int) -> int:
        return 0


class NoStoreCheck(SimStore):
    """Transactions do not look whose store it is."""

    def check(self, epoch: int | None) -> None:
        if self.failing:
            raise StoreError("store: disk full")


MUTATIONS: dict[str, Parts] = {
    "no-pin": Parts(rank_core=NoPin, agreed_state=TrustingState, hash_compared=False),
    "poll-instead-of-wait": Parts(sim_rank=PollingRank, hash_compared=False),
    "post-before-read": Parts(rank_core=TwoVotes, sim_rank=PostingFirst, hash_compared=False),
    "fencing-when-the-vote-is-read": Parts(rank_core=FencingAtRead, hash_compared=False),
    "own-staged-count": Parts(rank_core=OwnStaged, hash_compared=False),
    "opening-on-local-progress": Parts(
        rank_core=TellsLocalStaged, agreed_state=LocalOpening, hash_compared=False
    ),
    "superseding-without-draining": Parts(agreed_state=NoDraining),
    "commit-under-an-error": Parts(agreed_state=CommitUnderError),
    "moves-from-the-last-target": Parts(agreed_state=MovesFromLastTarget),
    "snapshot-per-rank-at-start": Parts(started_for=snapshot_per_rank, hash_compared=False),
    "rollback": Parts(agreed_state=RollingBack),
    "failed-key-taken-again": Parts(rank_core=StagedAnew, agreed_state=FailedAgain),
    "no-random-bits-in-the-epoch": Parts(rebalancer=NoRandomBits),
    "no-resend": Parts(stream=NoResend),
    "fenced-life-goes-on": Parts(rebalancer=Unfenced),
    "no-rows": Parts(rebalancer=NoRows),
    "one-version-for-all-layers": Parts(agreed_state=OneKey),
    "unordered-status": Parts(rebalancer=Unordered),
    "no-run-token": Parts(rebalancer=NoToken),
    "merging-a-window-already-sent": Parts(stream=MergingSent),
    "acknowledging-before-the-commit": Parts(windows=AckFirst),
    "acknowledgement-of-any-epoch": Parts(rank_core=AnyAck),
    "sequence-keys-without-the-run": Parts(store=SeqWithoutRun),
    "no-store-check-in-the-transaction": Parts(store=NoStoreCheck),
    # Beyond the list of the issue.
    "no-look-at-the-last-sequence-number": Parts(store=StoresAgain),
    "fence-follows-whoever-speaks": Parts(rank_core=FenceFollows),
    "no-fence-at-receipt": Parts(rank_core=NoFence),
    "no-heartbeat": Parts(rank_core=NoHeartbeat),
    "no-acknowledgement-of-duplicates": Parts(windows=NoDuplicateAck),
    "no-answer-with-the-newest": Parts(rebalancer=NoAnswer),
    "windows-of-whoever-sends-them": Parts(rebalancer=TakesWindowsOfAll),
    "status-of-whoever-sends-it": Parts(rebalancer=TakesStatusesOfAll),
}
