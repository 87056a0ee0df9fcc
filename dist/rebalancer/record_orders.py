"""The rebalancer's part in recordings of passes: orders to the ranks until they report what was asked. No I/O.

Orders say what is wanted and are repeated until a rank reports it, so a lost frame, a rank that is slow, or a restart
of the rebalancer needs no handling of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from evenroute.dist.protocol.view import RunView
from evenroute.dist.rebalancer.recording import PassRecording
from evenroute.dist.wire.control import RankRecording
from evenroute.dist.wire.recording import OVER, RUNNING, RecordOrder, RecordReport
from evenroute.eplb._fields import named

_REPORTED = ("passes", "tokens", "num_bytes", "dropped", "merged", "files", "host", "path")

_AGAIN_S = 1.0
_SILENCE_S = 10.0  # a rank that was silent for this long and had not ended its recording is reported as lost
_KEPT = 2  # recordings whose reports are kept: a refused one gives way to the one before


class PassOrders:
    """Brings the ranks of the current run to what the recorder wants; keeps what they reported."""

    def __init__(self) -> None:
        self._current = (0, 0)
        self._kept: dict[tuple[int, int], dict[int, RecordReport]] = {}  # by run and recording
        self._reports: dict[int, RecordReport] = {}  # of the current one
        self._sent_at: dict[int, float] = {}
        self._view: RunView | None = None
        self._now = 0.0

    def due(
        self, wanted: PassRecording | None, view: RunView | None, epoch: int, now: float
    ) -> Iterator[tuple[object, RecordOrder]]:
        """(peer, order) of each rank that has not reported what is wanted; the same order to all."""
        self._view, self._now = view, now
        if wanted is None or view is None or not epoch or view.run != wanted.run:
            return
        self._follow(wanted)
        order = RecordOrder(epoch=epoch, **asdict(wanted))
        for rank, seen in view.ranks.items():
            if view.job.shared_counts and rank:
                continue  # rank 0 records for all
            if self._reached(rank, wanted.running) or now - self._sent_at.get(rank, -_AGAIN_S) < _AGAIN_S:
                continue
            self._sent_at[rank] = now
            yield seen.peer, order

    def _follow(self, wanted: PassRecording) -> None:
        key = (wanted.run, wanted.recording)
        if key != self._current:
            self._current, self._sent_at = key, {}
            self._reports = self._kept[key] = self._kept.pop(key, {})
            for old in [kept for kept in self._kept if kept != key][: -(_KEPT - 1)]:
                del self._kept[old]

    def _reached(self, rank: int, running: bool) -> bool:
        report = self._reports.get(rank)
        if report is None:
            return False
        return report.state in OVER or (running and report.state == "recording")

    def take(
        self, report: RecordReport, wanted: PassRecording | None, view: RunView | None, epoch: int
    ) -> RecordOrder | None:
        """A rank's report. The order that it needs, where it records without an order from here."""
        if view is None or report.run != view.run or report.rank >= view.job.ep_size:
            return None
        if wanted is not None and wanted.run == report.run and wanted.recording == report.recording:
            self._follow(wanted)
            self._reports[report.rank] = report
            if not wanted.running and report.state == "recording":
                self._sent_at.pop(report.rank, None)  # ordered again with the next turn
            return None
        if report.state not in RUNNING or not epoch:
            return None
        return RecordOrder(
            run=report.run,
            epoch=epoch,
            recording=report.recording,
            mode="per_pass",
            name="forgotten",
            running=False,
        )

    def all_refused(self, wanted: PassRecording | None, view: RunView | None) -> bool:
        """Whether every rank that was to record refused to."""
        if wanted is None or view is None or (wanted.run, wanted.recording) != self._current:
            return False
        ranks = range(1 if view.job.shared_counts else view.job.ep_size)
        return all(rank in self._reports and self._reports[rank].state == "refused" for rank in ranks)

    def _lost(self, report: RecordReport) -> str:
        """Why no more reports will come from a rank that had not ended; empty as long as it is heard."""
        if report.state in OVER:
            return ""
        if self._view is None or self._view.run != report.run:
            return "its job has ended without a last word of it"
        seen = self._view.ranks.get(report.rank)
        silence = 0.0 if seen is None else self._now - seen.heard_at
        return f"not heard for {silence:.0f} s" if silence > _SILENCE_S else ""

    def of_ranks(self, wanted: PassRecording | None) -> dict[int, RankRecording]:
        """What each rank reported of the recording that is wanted, or was last."""
        reports = {} if wanted is None else self._kept.get((wanted.run, wanted.recording), {})
        lost = {rank: self._lost(report) for rank, report in reports.items()}
        return {
            rank: RankRecording(
                state="lost" if lost[rank] else report.state,
                reason="; ".join(filter(None, (lost[rank], report.reason))),
                **named(_REPORTED, report),
            )
            for rank, report in reports.items()
        }
