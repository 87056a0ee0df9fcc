"""The rebalancer's part in recordings of passes: orders to the ranks until they report what was asked. No I/O.

Orders say what is wanted and are repeated until a rank reports it, so a lost frame, a rank that is slow, or a restart
of the rebalancer needs no handling of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from evenroute.dist.control import RankRecording
from evenroute.dist.pass_messages import OVER, RUNNING, RecordOrder, RecordReport
from evenroute.dist.recording import PassRecording
from evenroute.dist.view_core import RunView

_AGAIN_S = 1.0


class PassOrders:
    """Brings the ranks of the current run to what the recorder wants; keeps what they reported."""

    def __init__(self) -> None:
        self._run = 0
        self._recording = 0
        self._reports: dict[int, RecordReport] = {}
        self._sent_at: dict[int, float] = {}

    def due(
        self, wanted: PassRecording | None, view: RunView | None, epoch: int, now: float
    ) -> Iterator[tuple[object, RecordOrder]]:
        """(peer, order) of each rank that has not reported what is wanted; the same order to all."""
        if wanted is None or view is None or not epoch or view.run != wanted.run:
            return
        self._follow(wanted)
        order = RecordOrder(
            run=wanted.run,
            epoch=epoch,
            recording=wanted.recording,
            mode=wanted.mode,
            name=wanted.name,
            running=wanted.running,
        )
        for rank, seen in view.ranks.items():
            if view.job.shared_counts and rank:
                continue  # rank 0 records for all
            if self._reached(rank, wanted.running) or now - self._sent_at.get(rank, -_AGAIN_S) < _AGAIN_S:
                continue
            self._sent_at[rank] = now
            yield seen.peer, order

    def _follow(self, wanted: PassRecording) -> None:
        if (wanted.run, wanted.recording) != (self._run, self._recording):
            self._run, self._recording = wanted.run, wanted.recording
            self._reports, self._sent_at = {}, {}

    def _reached(self, rank: int, running: bool) -> bool:
        report = self._reports.get(rank)
        if report is None:
            return False
        return report.state in OVER or (running and report.state == "recording")

    def take(
        self, report: RecordReport, wanted: PassRecording | None, view: RunView | None, epoch: int
    ) -> RecordOrder | None:
        """A rank's report. The order that it needs, where it records what nobody here asked for."""
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

    def of_ranks(self, wanted: PassRecording | None) -> dict[int, RankRecording]:
        """What each rank reported of the recording that is wanted, or was last."""
        if wanted is None or (wanted.run, wanted.recording) != (self._run, self._recording):
            return {}
        return {
            rank: RankRecording(
                state=report.state,
                passes=report.passes,
                tokens=report.tokens,
                num_bytes=report.num_bytes,
                dropped=report.dropped,
                merged=report.merged,
                files=report.files,
                reason=report.reason,
                host=report.host,
                path=report.path,
            )
            for rank, report in self._reports.items()
        }
