"""Loads of the last interval: what each rank carried, and the hottest of each layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.wire.control import ExpertLoad, LayerLoads
from evenroute.eplb.loads.balance import rank_loads
from evenroute.eplb.placement.placement import Placement

Floats = NDArray[np.float64]
_NONE = np.zeros((0, 0))
HOTTEST = 32  # experts of a layer that are named


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

    def of_layer(self, layer: int) -> LayerLoads:
        """One layer: its ranks' loads over their mean, and its `HOTTEST` experts with the ranks that hold them."""
        if self.placement is None or layer >= len(self.counts) or not self.counts[layer].any():
            return LayerLoads(layer, [], [])
        counts, loads = self.counts[layer], self.rank_loads[layer]
        row = self.placement.physical_to_logical[layer]
        width = len(row) // self.placement.topology.ep_size
        total = float(counts.sum())
        experts = [
            ExpertLoad(
                expert, float(counts[expert]) / total, (np.flatnonzero(row == expert) // width).tolist()
            )
            for expert in np.argsort(-counts, kind="stable")[:HOTTEST].tolist()
            if counts[expert] > 0
        ]
        return LayerLoads(layer, np.round(loads / loads.mean(), 4).tolist(), experts)
