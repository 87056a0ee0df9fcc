"""One rank's recordings of passes, one at a time: what is ordered, and what is reported. Imports no torch."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections import deque
from collections.abc import Callable

from evenroute.dist.record.files import RecorderSettings
from evenroute.dist.record.session import MakeArena, RecordingSession
from evenroute.dist.wire.recording import OVER, RecordOrder, RecordReport

logger = logging.getLogger("evenroute.dist.agent")

_REPORT_EVERY_S = 1.0
_EXIT_LIMIT_S = 3.0
_KEPT = 4  # finished recordings that are still reported


def _close_at_exit(recorder: weakref.ref[RankRecorder]) -> None:
    found = recorder()
    if found is not None:
        found.close(_EXIT_LIMIT_S)


class RankRecorder:
    """All recordings of one rank's life, one at a time; driven by the agent thread, read by the forward thread.

    `session` is the one that runs (None: none), to be read once a step.
    """

    def __init__(
        self,
        settings: RecorderSettings,
        make_arena: MakeArena,
        changed: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.session: RecordingSession | None = None
        self._make_arena = make_arena
        self._changed = changed
        self._last: RecordingSession | None = None
        self._past: deque[RecordingSession] = deque(maxlen=_KEPT)
        self._reported: tuple[object, ...] = ()
        self._reported_at = 0.0
        self._answer: RecordReport | None = None
        # A forward pass that raises (another rank died) may end the process without `close`.
        atexit.register(_close_at_exit, weakref.ref(self))

    def order(self, order: RecordOrder, fence: int) -> None:
        """Do as ordered; orders of another run or of a rebalancer that is no more are dropped."""
        if order.run != self.settings.run or order.epoch < fence:
            return
        last = self._last
        if last is None or last.order.recording != order.recording:
            past = next((one for one in self._past if one.order.recording == order.recording), None)
            if past is not None:  # it replaced a refused recording, whose outcome is asked for again
                self._answer = past.report()
                return
            if not order.running:  # never heard of, or long forgotten: it is over
                self._answer = RecordReport(
                    run=order.run, rank=self.settings.rank, recording=order.recording, state="ended"
                )
                return
            if last is not None:
                last.abort("another recording was ordered")
                self._past.append(last)
            last = self._last = RecordingSession(order, self.settings, self._make_arena, self._changed)
            self.session = last
        elif not order.running:
            last.end()
            self.session = None
        self._reported = ()

    def due(self, now: float) -> list[RecordReport]:
        """What to report now: on request, on a change, and each second while it runs."""
        answer, self._answer = self._answer, None
        out = [] if answer is None else [answer]
        last = self._last
        if last is None:
            return out
        state = last.state
        if state in OVER:
            self.session = None
        every = () if state in OVER else (int(now / _REPORT_EVERY_S),)
        found = (last.order.recording, state, *every)
        if found != self._reported:
            self._reported = found
            out.append(last.report())
        return out

    def close(self, limit_s: float) -> None:
        """End what runs and wait for its files, up to the limit."""
        self.session = None
        if self._last is not None:
            self._last.end()
            if not self._last.join(limit_s):
                logger.warning(
                    "rank %d: the recording of passes was not finished within %g s",
                    self.settings.rank,
                    limit_s,
                )
