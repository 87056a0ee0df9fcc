"""Plans for several windows at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import placement_balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.history.windows import combine_windows, frequencies

Planner = Callable[[NDArray[np.float64]], Placement]
ROBUST_ROUNDS = 5
ROBUST_STEP = 1.0


def plan_windows(
    windows: NDArray[np.float64], how: str, make: Planner
) -> tuple[Placement, NDArray[np.float64]]:
    """Plan for ``[W, L, E]``; returns the placement and the loads ``[L, E]`` it was planned for.

    ``robust`` looks for the placement whose worst window is best: it plans for a weighted mean of the windows'
    frequencies, raises the weights of the windows that came out badly (multiplicative weights) and plans
    again, a few rounds; the best worst window wins, the earlier round among equals.
    """
    combined = combine_windows(windows, how)
    if how != "robust" or len(windows) == 1:
        return make(combined), combined
    each = frequencies(windows)
    weights = np.ones(len(windows)) / len(windows)
    best: tuple[float, Placement, NDArray[np.float64]] | None = None
    for _ in range(ROBUST_ROUNDS):
        combined = np.asarray((each * weights[:, None, None]).sum(axis=0))
        placement = make(combined)
        means = [placement_balancedness(loads, placement).mean for loads in windows]
        scores = np.array([1.0 if mean is None else mean for mean in means])
        if best is None or scores.min() > best[0] + 1e-12:
            best = (float(scores.min()), placement, combined)
        spread = scores.max() - scores.min()
        if spread <= 1e-9:
            break
        weights = weights * np.exp(ROBUST_STEP * (scores.max() - scores) / spread)
        weights /= weights.sum()
    assert best is not None
    return best[1], best[2]
