"""Receipt of windows at the rebalancer: checked, stored once in one transaction, acknowledged after its commit.

`LoadView`: the counts that the next plan is made from, with what is known of their completeness. No I/O, no clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.store import ProtocolStore, RankWindowRow, Receipt, StoreError, job_row
from evenroute.dist.protocol.types import Notice, Outgoing, Peer, RebalancerCounters
from evenroute.dist.protocol.view import RunView
from evenroute.dist.wire.messages import Ack, JobShape, MessageError, RankWindow, Refusal
from evenroute.dist.wire.received import check_window, counts_above, window_counts
from evenroute.eplb.store.schema import LARGEST_TOTAL

_REFUSALS = (ValueError, OverflowError)  # of the store, for what it can't hold


@dataclass(frozen=True)
class RankCoverage:
    """What one rank contributed since the last clearing: from when, and how completely."""

    rank: int
    first_step: int
    last_step: int
    num_windows: int
    num_missing: int
    tokens: int
    last_seq: int


@dataclass(frozen=True, eq=False)
class LoadView:
    """``counts`` int64 [L, E] summed over ranks, ``tokens``; one `RankCoverage` for each rank that sent something.

    ``complete``: all ranks that send windows are in it and none has a hole. ``coverage``: steps that all ranks cover
    over steps that any covers, 0..1 (0 unless complete); near 1 except at the edges, where ranks' windows end at
    different steps.
    """

    counts: NDArray[np.int64]
    tokens: int
    ranks: tuple[RankCoverage, ...]
    complete: bool
    coverage: float
    missing_ranks: tuple[int, ...]


@dataclass(slots=True)
class _Coverage:
    """A `RankCoverage` that grows."""

    first_step: int
    last_step: int
    num_windows: int = 0
    num_missing: int = 0
    tokens: int = 0
    last_seq: int = 0


class LoadAccumulator:
    """Sums stored windows of one run; memory: one count array, and a few numbers a rank."""

    def __init__(self, job: JobShape) -> None:
        self._sources = 1 if job.shared_counts else job.ep_size
        self._shape = (job.num_layers, job.num_logical_experts)
        self.clear()

    def clear(self) -> None:
        """Begin anew (a plan was made from what there was)."""
        self._counts = np.zeros(self._shape, dtype=np.int64)
        self._tokens = 0
        self._ranks: dict[int, _Coverage] = {}

    def add(self, receipt: Receipt) -> None:
        """Add a window that was stored just now."""
        window = receipt.window
        self.add_counts(window.counts)
        self._tokens += window.tokens
        known = self._ranks.get(window.rank)
        if known is None:
            # What is missing before the first window in view is outside of it, not a gap in it.
            known = self._ranks[window.rank] = _Coverage(window.first_step, window.last_step)
        else:
            known.last_step = max(known.last_step, window.last_step)
            known.num_missing += receipt.missing_before
        known.num_windows += 1
        known.tokens += window.tokens
        known.last_seq = window.seq

    def add_counts(self, counts: NDArray[np.int64]) -> None:
        """Add counts int64 [L, E], each below 2^47."""
        np.minimum(self._counts + counts, LARGEST_TOTAL, out=self._counts)

    def view(self) -> LoadView:
        """A copy of what there is."""
        ranks = tuple(RankCoverage(rank, **asdict(self._ranks[rank])) for rank in sorted(self._ranks))
        missing = tuple(rank for rank in range(self._sources) if rank not in self._ranks)
        complete = not missing and all(rank.num_missing == 0 for rank in ranks)
        coverage = 0.0
        if complete:
            common = min(r.last_step for r in ranks) - max(r.first_step for r in ranks) + 1
            whole = max(r.last_step for r in ranks) - min(r.first_step for r in ranks) + 1
            coverage = max(common, 0) / whole
        return LoadView(self._counts.copy(), self._tokens, ranks, complete, coverage, missing)


class _About(TypedDict):
    epoch: int
    stamp: float
    keep_rank_detail: bool


class WindowReceipt:
    """``loads``: what was stored of the current run since the last clearing; None before there is a run."""

    def __init__(self, store: ProtocolStore, counters: RebalancerCounters, notices: deque[Notice]) -> None:
        self.loads: LoadAccumulator | None = None
        self._store = store
        self._counters = counters
        self._notices = notices
        self._job_is_kept = False  # the store knows the current run's shape

    def begin_run(self, job: JobShape) -> None:
        """Another run is the current one."""
        self.loads = LoadAccumulator(job)
        self._job_is_kept = False

    def receive(
        self,
        windows: Sequence[tuple[Peer, RankWindow]],
        view: RunView,
        *,
        epoch: int,
        stamp: float,
        keep_rank_detail: bool,
    ) -> list[Outgoing]:
        """Take windows of the view's run; the others are ignored, and come again once their run is the current one.

        Raises StaleEpochError where the store has a later epoch.
        """
        batch: list[RankWindowRow] = []
        senders: list[Peer] = []
        answers: list[Outgoing] = []
        for peer, window in windows:
            if window.run != view.run or not view.speaks_for(peer, window.rank):
                self._counters.windows_ignored += 1
                continue
            try:
                check_window(window, view.job)
            except MessageError as error:
                answers.append(self._refuse(peer, window, view, epoch, str(error)))
                continue
            excess = counts_above(window, view.job)
            if excess:
                self._counters.windows_over_announced += 1
                text = (
                    f"{excess} counts more in a layer than {window.tokens} tokens x top-{view.job.top_k} make"
                )
                self._flag(view, window, f"stored with {text}")
            else:
                view.ranks[window.rank].trouble = ""
            batch.append(window_row(window, view.job))
            senders.append(peer)
        if not batch:
            return answers
        about: _About = {"epoch": epoch, "stamp": stamp, "keep_rank_detail": keep_rank_detail}
        try:
            receipts = self.store(batch, view.job, **about)
        except _REFUSALS:
            # One of them is bad: each is stored by itself, so that the others are not lost with it.
            for peer, row in zip(senders, batch, strict=True):
                answers += self._store_alone(peer, row, view, about)
            return answers
        acks = (
            Outgoing(peer, Ack(receipt.window.run, epoch, receipt.window.seq))
            for peer, receipt in zip(senders, receipts, strict=False)  # none is stored where the store fails
        )
        return [*answers, *acks]

    def _store_alone(self, peer: Peer, row: RankWindowRow, view: RunView, about: "_About") -> list[Outgoing]:
        try:
            stored = self.store([row], view.job, **about)
        except _REFUSALS as error:
            return [self._refuse(peer, row, view, about["epoch"], f"the store can't take it: {error}")]
        return [Outgoing(peer, Ack(row.run, about["epoch"], row.seq))] if stored else []

    def _refuse(
        self, peer: Peer, window: RankWindow | RankWindowRow, view: RunView, epoch: int, reason: str
    ) -> Outgoing:
        """The rank drops the window at this answer and goes on with the next."""
        self._counters.windows_rejected += 1
        self._flag(view, window, f"refused: {reason}")
        return Outgoing(peer, Refusal(window.run, epoch, "window", window.seq, reason[:500]))

    def _flag(self, view: RunView, window: RankWindow | RankWindowRow, text: str) -> None:
        rank = view.ranks[window.rank]
        rank.trouble, rank.trouble_at = f"window {window.seq} {text}", rank.heard_at
        self._notices.append(Notice("window", f"rank {window.rank}: window {window.seq} {text}"))

    def store(
        self, batch: list[RankWindowRow], job: JobShape, *, epoch: int, stamp: float, keep_rank_detail: bool
    ) -> list[Receipt]:
        """What became of each window, committed; empty if the store can't be written (counted)."""
        try:
            if not self._job_is_kept:
                self._store.set_job(batch[0].run, job_row(job), epoch=epoch, now=stamp)
                self._job_is_kept = True
            receipts = self._store.add_windows(
                batch, epoch=epoch, now=stamp, keep_rank_detail=keep_rank_detail
            )
        except StoreError as error:
            self._counters.store_errors += 1
            self._notices.append(Notice("store", f"{len(batch)} windows not stored, to come again: {error}"))
            return []
        for receipt in receipts:
            self._note(receipt)
        return receipts

    def _note(self, receipt: Receipt) -> None:
        assert self.loads is not None
        if not receipt.stored:
            self._counters.windows_duplicate += 1
            return
        self._counters.windows_stored += 1
        if receipt.missing_before:
            self._counters.windows_missing += receipt.missing_before
            text = (
                f"rank {receipt.window.rank}: {receipt.missing_before} windows before number "
                f"{receipt.window.seq} are not in this store (it was lost or replaced)"
            )
            self._notices.append(Notice("gap", text))
        self.loads.add(receipt)


def window_row(window: RankWindow, job: JobShape) -> RankWindowRow:
    """A checked window as the store keeps it."""
    return RankWindowRow(**{**msgspec.structs.asdict(window), "counts": window_counts(window, job)})
