"""Receipt of windows at the rebalancer: checked, stored once in one transaction, acknowledged after its commit."""

from collections import deque
from collections.abc import Sequence

from evenroute.dist.protocol.load_view import LoadAccumulator
from evenroute.dist.protocol.store import ProtocolStore, RankWindow, Receipt, StoreError, job_row
from evenroute.dist.protocol.types import Notice, Outgoing, Peer, RebalancerCounters
from evenroute.dist.protocol.view import RunView
from evenroute.dist.wire.messages import Ack, JobShape, MessageError, Window, check_window, window_counts


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
        windows: Sequence[tuple[Peer, Window]],
        view: RunView,
        *,
        epoch: int,
        stamp: float,
        keep_rank_detail: bool,
    ) -> list[Outgoing]:
        """Take windows of the view's run; the others are ignored, and come again once their run is the current one.

        Raises StaleEpochError where the store has a later epoch.
        """
        batch: list[RankWindow] = []
        senders: list[Peer] = []
        for peer, window in windows:
            if window.run != view.run:
                self._counters.windows_ignored += 1
                continue
            try:
                check_window(window, view.job)
            except MessageError as error:
                self._counters.windows_rejected += 1
                text = f"rank {window.rank}: window {window.seq} rejected: {error}"
                self._notices.append(Notice("window", text))
                continue
            batch.append(_record(window, view.job))
            senders.append(peer)
        if not batch:
            return []
        receipts = self.store(batch, view.job, epoch=epoch, stamp=stamp, keep_rank_detail=keep_rank_detail)
        return [
            Outgoing(peer, Ack(receipt.window.run, epoch, receipt.window.seq))
            for peer, receipt in zip(senders, receipts, strict=False)  # none is stored where the store fails
        ]

    def store(
        self, batch: list[RankWindow], job: JobShape, *, epoch: int, stamp: float, keep_rank_detail: bool
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


def _record(window: Window, job: JobShape) -> RankWindow:
    return RankWindow(
        run=window.run,
        rank=window.rank,
        seq=window.seq,
        first_step=window.first_step,
        last_step=window.last_step,
        tokens=window.tokens,
        counts=window_counts(window, job),
    )
