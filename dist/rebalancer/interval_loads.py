"""Loads of the last interval: what each rank carried, and the hottest of each layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import rank_loads
from evenroute.eplb.placement.placement import Placement

Floats = NDArray[np.float64]
_NONE = np.zeros((0, 0))


@dataclass(frozen=True, eq=False)
class IntervalLoads:
    """``counts`` ``[L, E]`` dealt as ``placement`` says: ``rank_loads`` ``[L, R]``; empty before the first interval."""

    counts: Floats = field(default_factory=lambda: _NONE)
    rank_loads: Floats = field(default_factory=lambda: _NONE)
    placement: Placement | None = None
    rank_load: list[float] = field(default_factory=list)
    hottest_rank: list[int] = field(default_factory=list)
    hottest_expert: list[int] = field(default_factory=list)
    hottest_expert_load: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, counts: Floats, placement: Placement) -> IntervalLoads:
        """Of an interval's counts and what was in use at its end."""
        loads = rank_loads(counts, placement)
        by_rank, totals = loads.sum(axis=0), counts.sum(axis=1)
        mean = float(by_rank.mean())
        known = totals > 0
        return cls(
            counts,
            loads,
            placement,
            np.round(by_rank / mean, 4).tolist() if mean > 0 else [],
            np.where(known, loads.argmax(axis=1), -1).tolist(),
            np.where(known, counts.argmax(axis=1), -1).tolist(),
            np.round(counts.max(axis=1) / np.where(known, totals, 1.0), 4).tolist(),
        )
