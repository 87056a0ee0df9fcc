"""One pass over a history of loads with bounded memory: totals, a time line, balancedness over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._fields import named
from evenroute.eplb.loads.balance import Balancedness, RankLoadMap, balancedness, quick_balancedness
from evenroute.eplb.loads.skew import Floats
from evenroute.eplb.loads.source import Counts, LoadSource, LoadWindow, PlacementEvent, PlacementMap
from evenroute.eplb.loads.total import CountTotal
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology, automatic_redundant_experts

MAX_BINS = 64
MAX_POINTS = 2048


@dataclass(eq=False)
class Bin:
    """Sum of neighbouring windows; `time` is the first one's."""

    counts: NDArray[np.float32]
    num_windows: int
    first: int  # index of the first window
    first_step: int | None
    last_step: int | None
    time: float | None


@dataclass(eq=False)
class Point:
    """Balancedness of neighbouring windows (mean over them); None = no load."""

    first: int
    num_windows: int
    step: int | None
    time: float | None
    mean: float | None
    total: float | None


@dataclass(eq=False)
class Achieved:
    """What a placement achieved while it was in use.

    Published is not yet in use: the first window after it is mixed, and left out of the mean if others follow.
    """

    event: PlacementEvent
    first_window: int
    num_windows: int = 0
    first_mean: float | None = None
    mean_sum: float = 0.0
    mean_count: int = 0

    def add(self, mean: float | None) -> None:
        """Balancedness of the next window (None = no load)."""
        self.num_windows += 1
        if mean is None:
            return
        if self.first_mean is None:
            self.first_mean = mean
        else:
            self.mean_sum += mean
            self.mean_count += 1

    @property
    def mean(self) -> float | None:
        return self.mean_sum / self.mean_count if self.mean_count else self.first_mean


@dataclass(eq=False)
class Using:
    """The placement whose ranks the loads are put on, and how it came to be chosen."""

    load_map: RankLoadMap
    ep_size: int
    num_slots: int
    origin: str
    placement: Placement | None


@dataclass(eq=False)
class History:
    """What one pass found.

    Attributes:
        total: loads ``[L, E]`` float64 over all windows.
        counted: the same to be shown: int64 and exact where the windows are integers.
        rank_total: ``[L, R]``, each window under the placement that was in use; None without ranks.
        bins: at most `MAX_BINS` sums of neighbouring windows.
        points: at most `MAX_POINTS` values of balancedness over time.
    """

    source: LoadSource
    total: Floats
    counted: Counts
    rank_total: Floats | None
    using: Using | None
    num_windows: int = 0
    num_incomplete: int = 0
    num_unplaced: int = 0  # windows before the first recorded placement: put on `using`
    tokens: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    first_time: float | None = None
    last_time: float | None = None
    bins: list[Bin] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    achieved: list[Achieved] = field(default_factory=list)

    def balancedness(self) -> Balancedness | None:
        """Of the totals; None without ranks or loads."""
        return None if self.rank_total is None else balancedness(self.rank_total)


def default_ep_size(num_logical_experts: int) -> int:
    """The rank count assumed where nothing states one: the largest up to 32 that divides the experts."""
    return max(ranks for ranks in range(1, 33) if num_logical_experts % ranks == 0)


def choose_placement(
    source: LoadSource,
    *,
    ep_size: int | None = None,
    num_nodes: int | None = None,
    num_slots: int | None = None,
    override: PlacementMap | None = None,
) -> Using:
    """Which placement to put a source's loads on: asked for, else the file's own, else in order from the start."""
    experts = source.num_logical_experts
    known = override or source.placement_map
    if known is not None and (ep_size or known.ep_size or override):
        rows = known.physical_to_logical
        if rows.shape[0] != source.num_layers or known.num_logical_experts != experts:
            raise ValueError(
                f"{source.path}: loads are {source.num_layers} layers x {experts} experts, the placement is "
                f"{rows.shape[0]} x {known.num_logical_experts}"
            )
        ranks = ep_size or known.ep_size
        if ranks is None:
            raise ValueError("the placement does not state its ranks: give --ep-size")
        if rows.shape[1] % ranks:
            raise ValueError(f"--ep-size {ranks} does not divide the placement's {rows.shape[1]} slots")
        placement = known.placement if ranks in (None, known.ep_size) else None
        made = RankLoadMap.of(placement) if placement else RankLoadMap(rows, experts, ranks)
        origin = "the given placement" if override is not None else "the file's placement"
        return Using(made, ranks, rows.shape[1], origin, placement)
    ranks = ep_size or source.ep_size or default_ep_size(experts)
    stated = ep_size is not None or source.ep_size is not None
    slots = num_slots or (source.num_slots if ranks == source.ep_size else None)
    slots = slots or experts + automatic_redundant_experts(experts, ranks)
    placement = Placement.initial(source.num_layers, experts, slots, Topology(ranks, num_nodes or 1))
    origin = f"experts in order over {ranks} ranks" + (
        "" if stated else " (assumed: no rank count is stated)"
    )
    if any(event.placement.topology.ep_size == ranks for event in source.placements):
        origin = "the placements in use, as recorded"
        if source.placements_are == "published":
            origin = "the placements as published (when they came into use is not recorded)"
    elif source.placements_are and ep_size in (None, source.ep_size):
        origin += " (the placement in use is not recorded)"
    return Using(RankLoadMap.of(placement), ranks, slots, origin, placement)


class _Timeline:
    """Which recorded placement is in use as windows go by (by time, else by step)."""

    def __init__(self, history: History, fallback: Using) -> None:
        self._events = history.source.placements
        self._next = 0
        self._fallback = fallback
        self.map = fallback.load_map
        self.current: Achieved | None = None
        self._history = history

    def advance(self, window: LoadWindow) -> None:
        while self._next < len(self._events) and self._due(self._events[self._next], window):
            event = self._events[self._next]
            self._next += 1
            if event.placement.topology.ep_size != self._fallback.ep_size:
                continue
            self.map = RankLoadMap.of(event.placement)
            self.current = Achieved(event, self._history.num_windows)
            self._history.achieved.append(self.current)

    @staticmethod
    def _due(event: PlacementEvent, window: LoadWindow) -> bool:
        if event.time is not None and window.time is not None:
            return event.time <= window.time
        if event.step is not None and window.last_step is not None:
            return event.step <= window.last_step
        return True


def _merge_bins(bins: list[Bin]) -> list[Bin]:
    merged = []
    for left, right in zip(bins[::2], bins[1::2], strict=True):
        left.counts += right.counts
        left.num_windows += right.num_windows
        left.last_step = right.last_step
        merged.append(left)
    return merged


def _merge_points(points: list[Point]) -> list[Point]:
    def mean(left: float | None, right: float | None) -> float | None:
        known = [value for value in (left, right) if value is not None]
        return sum(known) / len(known) if known else None

    return [
        Point(
            left.first,
            left.num_windows + right.num_windows,
            left.step,
            left.time,
            mean(left.mean, right.mean),
            mean(left.total, right.total),
        )
        for left, right in zip(points[::2], points[1::2], strict=True)
    ]


def read_history(
    source: LoadSource,
    using: Using,
    *,
    keep: Callable[[int, LoadWindow], bool] | None = None,
    follow_placements: bool = True,
) -> History:
    """Read a source once. Memory: `MAX_BINS` x L x E x 4 bytes, whatever the number of windows.

    Args:
        using: the placement for windows before the first recorded one (or for all, without recorded ones).
        keep: which windows to take, by (index, window); all by default.
        follow_placements: put each window on the placement recorded for its time.

    Raises:
        ValueError: the source turns out damaged, or holds no window.
    """
    sums = CountTotal(source.shape)
    history = History(
        source=source,
        total=sums.floats,
        counted=sums.counts,
        rank_total=np.zeros((source.num_layers, using.ep_size)),
        using=using,
    )
    timeline = _Timeline(history, using)
    width = point_width = 1
    tokens_known = True
    for index, window in enumerate(source.windows()):
        if keep is not None and not keep(index, window):
            continue
        if follow_placements:
            timeline.advance(window)
        sums.add(window.counts)
        loads = timeline.map(window.counts)
        assert history.rank_total is not None
        history.rank_total += loads
        mean, total = quick_balancedness(loads)
        if timeline.current is not None:
            timeline.current.add(mean)
        elif source.placements and follow_placements:
            history.num_unplaced += 1
        _note_window(history, window)
        tokens_known = tokens_known and window.tokens is not None
        history.tokens = (history.tokens or 0) + (window.tokens or 0)
        width = _add_bin(history, index, window, width)
        point_width = _add_point(history, index, window, mean, total, point_width)
        history.num_windows += 1
    if not history.num_windows:
        raise ValueError(f"{source.path}: holds no window of loads")
    history.counted = sums.counts
    if not tokens_known:
        history.tokens = None
    return history


def _note_window(history: History, window: LoadWindow) -> None:
    history.num_incomplete += not window.complete
    if window.first_step is not None:
        known = history.first_step
        history.first_step = window.first_step if known is None else min(known, window.first_step)
    if window.last_step is not None:
        history.last_step = max(history.last_step or 0, window.last_step)
    if window.time is not None:
        history.first_time = window.time if history.first_time is None else history.first_time
        history.last_time = window.time


def _add_bin(history: History, index: int, window: LoadWindow, width: int) -> int:
    bins = history.bins
    if bins and bins[-1].num_windows < width:
        last = bins[-1]
        last.counts += window.counts.astype(np.float32)
        last.num_windows += 1
        last.last_step = window.last_step
        return width
    if len(bins) == MAX_BINS:
        history.bins = bins = _merge_bins(bins)
        width *= 2
    counts = window.counts.astype(np.float32)
    bins.append(Bin(counts, 1, index, window.first_step, window.last_step, window.time))
    return width


def _add_point(
    history: History, index: int, window: LoadWindow, mean: float | None, total: float | None, width: int
) -> int:
    points = history.points
    new = Point(index, 1, window.last_step, window.time, mean, total)
    if points and points[-1].num_windows < width:
        last = points[-1]
        for name in ("mean", "total"):
            value, have = getattr(new, name), getattr(last, name)
            if value is not None:
                weight = last.num_windows
                setattr(last, name, value if have is None else (have * weight + value) / (weight + 1))
        last.num_windows += 1
        return width
    if len(points) == MAX_POINTS:
        history.points = _merge_points(points)
        history.points.append(new)
        return width * 2
    points.append(new)
    return width


def as_json_points(history: History) -> list[dict[str, Any]]:
    """Balancedness over time as plain values."""
    return [
        {"window": point.first, **named(("num_windows", "step", "time", "mean", "total"), point)}
        for point in history.points
    ]
