"""Collects what the ranks did for switches, on request. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from evenroute.dist.protocol.view import RunView
from evenroute.dist.wire.tracing import TraceAnswer, TraceOrder, TraceReport

_AGAIN_S = 1.0
_KEPT_S = 60.0
_EVENTS_AN_ANSWER = 100_000  # 4 MB


class SwitchTraces:
    """One collection at a time: a new question begins another once the last one is old."""

    def __init__(self) -> None:
        self._trace = 0
        self._began = float("-inf")
        self._reports: dict[int, TraceReport] = {}
        self._sent_at: dict[int, float] = {}

    def ask(self, trace: int, offset: int, view: RunView | None, now: float) -> TraceAnswer:
        """What has arrived of the collection called ``trace``, from rank ``offset`` on; begins it when it is new."""
        if trace != self._trace:
            self._trace, self._began = trace, now
            self._reports, self._sent_at = {}, {}
        ranks = range(0) if view is None else range(view.job.ep_size)
        missing = [rank for rank in ranks if rank not in self._reports]
        found: list[TraceReport] = []
        room = _EVENTS_AN_ANSWER
        after = offset
        for rank in range(offset, len(ranks)):
            report = self._reports.get(rank)
            if report is not None:
                if found and len(report.events) > room:
                    break
                found.append(report)
                room -= len(report.events)
            after = rank + 1
        return TraceAnswer(found, missing, after if after < len(ranks) else None)

    def due(self, view: RunView | None, now: float) -> Iterator[tuple[object, TraceOrder]]:
        """(peer, order) of each rank that has not reported yet."""
        if view is None or now - self._began > _KEPT_S:
            if self._reports and now - self._began > _KEPT_S:
                self._reports = {}
            return
        for rank, seen in view.ranks.items():
            if rank not in self._reports and now - self._sent_at.get(rank, -_AGAIN_S) >= _AGAIN_S:
                self._sent_at[rank] = now
                yield seen.peer, TraceOrder(view.run, self._trace)

    def take(self, report: TraceReport, view: RunView | None) -> None:
        """A rank's report."""
        known = view is not None and report.run == view.run and report.rank < view.job.ep_size
        if known and report.trace == self._trace:
            self._reports.setdefault(report.rank, report)
