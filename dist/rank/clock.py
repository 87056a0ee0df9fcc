"""How long steps take, and what moving weights costs them: measured on the forward thread, reported now and then."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

from evenroute.dist.weights.mover import MoveTotals
from evenroute.dist.wire.messages import RankCosts

_SAMPLES = 64  # step times kept for a median
_LEAST = 4  # steps without a move before an estimate is reported
_LONGEST_S = 3600.0
_NOTHING = MoveTotals()


class StepTimer:
    """From one call of `step` to the next is a step; weights moved in it where the mover has done something since.

    A median knows no pauses: a rank that waits for requests now and then has the step time of the others.
    """

    def __init__(
        self, report: Callable[[RankCosts], None], run: int, rank: int, mover: Any, *, every_s: float
    ) -> None:
        self._hand_over = report
        self._run = run
        self._rank = rank
        self._mover = mover  # of an engine's own it may have no `totals`
        self._every_s = every_s
        self._began: float | None = None
        self._reported_at = 0.0
        self._busy = False
        self._done = 0
        self._plain: deque[float] = deque(maxlen=_SAMPLES)
        self._moving: deque[float] = deque(maxlen=_SAMPLES)
        self._num_plain = self._num_moving = 0
        self._lost_s = 0.0

    def begin(self) -> None:
        """A step begins: the one before ends. Reports at most once in the reporting interval."""
        now = time.monotonic()
        began, self._began = self._began, now
        if began is None:
            self._reported_at = now
            return
        if self._busy:
            self._moving.append(now - began)
            self._num_moving += 1
        else:
            self._plain.append(now - began)
            self._num_plain += 1
        if now - self._reported_at >= self._every_s and self._num_plain >= _LEAST:
            self._hand_over(self._report(now))

    def enqueued(self, switched: object) -> None:
        """What the step has begun with is enqueued; `switched`: whether layers were committed."""
        totals: MoveTotals = getattr(self._mover, "totals", _NOTHING)
        self._busy = totals.chunks != self._done or bool(switched and totals.chunks)
        self._done = totals.chunks

    def _report(self, now: float) -> RankCosts:
        plain = median(self._plain)
        if self._num_moving:
            self._lost_s += max(0.0, self._num_moving * (median(self._moving) - plain))
        totals: MoveTotals = getattr(self._mover, "totals", _NOTHING)
        report = RankCosts(
            run=self._run,
            rank=self._rank,
            steps=self._num_plain,
            step_s=min(plain, _LONGEST_S),
            lost_s=min(self._lost_s, 1e9),
            transfer_s=min(totals.seconds, 1e9),
            slots=totals.slots,
            slot_bytes=totals.slot_bytes,
        )
        self._reported_at = now
        self._plain.clear()
        self._moving.clear()
        self._num_plain = self._num_moving = 0
        return report
