"""Which way of using past windows would have planned best on this job's own past."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import placement_balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.full import full_placement
from evenroute.eplb.planner.history.robust import plan_windows
from evenroute.eplb.planner.history.windows import COMBINATIONS
from evenroute.eplb.planner.moves import MoveLimits, moved_placement


@dataclass(frozen=True)
class BacktestResult:
    """Outcome of a backtest.

    Attributes:
        best: the way with the highest mean, the simpler one among equals (within 0.0005).
        scores: mean balancedness on the next window, by way.
        moves: moved slots over all windows, by way.
        num_windows: windows that were scored.
    """

    best: str
    scores: dict[str, float]
    moves: dict[str, int]
    num_windows: int

    @property
    def sentence(self) -> str:
        others = ", ".join(f"{how} {score:.4f}" for how, score in self.scores.items() if how != self.best)
        return (
            f"{self.best} would have given {self.scores[self.best]:.4f} over the last {self.num_windows} "
            f"windows ({others})"
        )


def backtest(
    windows: NDArray[np.float64],
    *,
    placement: Placement,
    move_fraction: float = 0.02,
    depth: int = 8,
    most_windows: int = 16,
    num_threads: int | None = None,
) -> BacktestResult:
    """Replay ``windows [W >= 2, L, E]``: before each window, plan from those before it; score on that window.

    Every way starts from a full plan for the first window on ``placement``'s shape, then updates shares and
    moves at most ``move_fraction`` of the slots a window, as the rebalancer does.

    Args:
        depth: windows that a way may look back at.
        most_windows: only that many of the newest windows are scored.
    """
    limits = MoveLimits(max_moves=int(move_fraction * placement.physical_to_logical.size))
    first = max(1, len(windows) - most_windows)
    scores: dict[str, float] = {}
    moves: dict[str, int] = {}
    for how in COMBINATIONS:
        now = full_placement(windows[first - 1], placement, num_threads=num_threads)
        results: list[float] = []
        moved = 0
        for at in range(first, len(windows)):
            past = windows[max(0, at - depth) : at]

            def make(loads: NDArray[np.float64], start: Placement = now) -> Placement:
                return moved_placement(loads, start, limits, weighted=True, num_threads=num_threads)

            planned, _ = plan_windows(past, how, make)
            moved += int(now.moved_slots(planned).sum())
            now = planned
            mean = placement_balancedness(windows[at], now).mean
            if mean is not None:
                results.append(mean)
        scores[how] = float(np.mean(results)) if results else 1.0
        moves[how] = moved
    best = max(scores.values())
    winner = next(how for how in COMBINATIONS if scores[how] >= best - 0.0005)
    return BacktestResult(winner, scores, moves, len(windows) - first)
