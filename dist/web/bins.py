"""Loads over time: counts summed in at most 96 spans of equal length; what is older is one figure an hour."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import quick_balancedness

MAX_BINS = 96
LONGEST_S = 64.0  # of a bin: 96 of them are 100 minutes
MAX_OLDER = 24 * 14
NOW_S = 30.0  # the heat map shows at least so much

Loads = NDArray[np.float32]


@dataclass(eq=False)
class TimeBin:
    """Loads of ranks ``[L, R]`` of the windows that arrived in [start, start + seconds), as they were dealt and as the
    experts in order would have had them; ``counts`` ``[L, E]`` only of the newest bins."""

    start: float
    seconds: float
    loads: Loads
    without: Loads
    counts: Loads | None
    tokens: int
    first_step: int
    last_step: int
    num_windows: int = 1

    def add(self, other: TimeBin) -> None:
        """Sum, for the time from the first to the last."""
        end = max(self.start + self.seconds, other.start + other.seconds)
        self.start = min(self.start, other.start)
        self.seconds = end - self.start
        self.loads = self.loads + other.loads
        self.without = self.without + other.without
        self.counts = None if self.counts is None or other.counts is None else self.counts + other.counts
        self.tokens += other.tokens
        self.first_step = min(self.first_step, other.first_step)
        self.last_step = max(self.last_step, other.last_step)
        self.num_windows += other.num_windows


@dataclass(frozen=True)
class LoadPoint:
    """One span of the history; balancedness None = no load."""

    time: float
    seconds: float
    tokens: int
    balancedness: float | None
    without: float | None


def point_of(found: TimeBin) -> LoadPoint:
    """The figures of a bin: total balancedness (sum of means over sum of maxes), which step time follows."""
    balanced, without = (
        quick_balancedness(loads.astype(np.float64))[1] for loads in (found.loads, found.without)
    )
    return LoadPoint(found.start, found.seconds, found.tokens, balanced, without)


class TimeBins:
    """Bins by time, all of one width, which doubles as time goes by."""

    def __init__(self) -> None:
        self.width = 1.0
        self.older: list[LoadPoint] = []
        self._bins: dict[int, TimeBin] = {}

    def in_order(self) -> list[TimeBin]:
        """Oldest first; copies, which later windows do not change (`TimeBin.add` makes new arrays)."""
        return [replace(self._bins[number]) for number in sorted(self._bins)]

    def reopen(self, least_s: float) -> float | None:
        """Forget the last bins, of ``least_s`` seconds and at least two; from which time on to add anew."""
        if not self._bins:
            return None
        newest = max(self._bins)
        start = min(newest - 1, math.floor((newest * self.width - least_s) / self.width))
        for number in [number for number in self._bins if number >= start]:
            del self._bins[number]
        return start * self.width

    def add(self, time: float, window: TimeBin) -> None:
        """Add a window that arrived at ``time``, seconds since 1970."""
        number = math.floor(time / self.width)
        window.start, window.seconds = number * self.width, self.width
        self._put(number, window)
        while max(self._bins) - min(self._bins) >= MAX_BINS and self.width < LONGEST_S:
            self._double()
        while max(self._bins) - min(self._bins) >= MAX_BINS:
            self._retire(point_of(self._bins.pop(min(self._bins))))
        self._forget_counts()

    def add_older(self, point: LoadPoint) -> None:
        """Add a span that the store has summed up."""
        self._retire(point)

    def now(self) -> TimeBin | None:
        """The sum of the newest bins, `NOW_S` seconds or a little more."""
        total: TimeBin | None = None
        newest = 0.0
        for found in reversed(self.in_order()):
            if total is None:
                total, newest = found, found.start
            elif newest - found.start > max(NOW_S, self.width):
                break
            else:
                total.add(found)
        return total

    def _put(self, number: int, window: TimeBin) -> None:
        known = self._bins.get(number)
        if known is None:
            self._bins[number] = window
        else:
            start, seconds = known.start, known.seconds
            known.add(window)
            known.start, known.seconds = start, seconds

    def _double(self) -> None:
        bins, self._bins = self._bins, {}
        self.width *= 2
        for number in sorted(bins):
            found = bins[number]
            found.start, found.seconds = (number // 2) * self.width, self.width
            self._put(number // 2, found)

    def _forget_counts(self) -> None:
        newest = max(self._bins)
        for number, found in self._bins.items():
            if (newest - number) * self.width > max(NOW_S, self.width):
                found.counts = None

    def _retire(self, point: LoadPoint) -> None:
        """One figure an hour, weighted by time; the oldest go."""
        last = self.older[-1] if self.older else None
        if last is None or math.floor(last.time / 3600) != math.floor(point.time / 3600):
            self.older.append(point)
            del self.older[:-MAX_OLDER]
            return
        self.older[-1] = LoadPoint(
            last.time,
            point.time + point.seconds - last.time,
            last.tokens + point.tokens,
            _mean(last.balancedness, last.tokens, point.balancedness, point.tokens),
            _mean(last.without, last.tokens, point.without, point.tokens),
        )


def _mean(left: float | None, left_weight: int, right: float | None, right_weight: int) -> float | None:
    if left is None or right is None:
        return right if left is None else left
    return (left * left_weight + right * right_weight) / max(left_weight + right_weight, 1)
