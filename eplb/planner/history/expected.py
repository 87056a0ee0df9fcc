"""What is planned for, and how well a placement is expected to serve it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import Balancedness, slot_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.history.windows import frequencies

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Expected:
    """What is planned for: windows ``[W, L, E]`` of loads and their weights ``[W]``, how likely each comes next."""

    windows: Floats
    weights: Floats

    def balancedness(self, placement: Placement) -> Balancedness:
        """Weighted mean over windows, per layer; a layer without load in any of them is "no data"."""
        rows = placement.physical_to_logical
        parts = slot_loads(np.ones((len(rows), placement.num_logical_experts)), placement)
        layers = np.arange(len(rows))[:, None]
        has = np.asarray(self.windows.any(axis=2))
        hottest = np.ones(has.shape)  # in mean rank loads
        for window, loads in enumerate(self.windows):
            largest = loads.max(axis=1, keepdims=True)
            scaled = loads / np.where(largest > 0, largest, 1.0)
            ranks = (
                (scaled[layers, rows] * parts).reshape(len(rows), placement.topology.ep_size, -1).sum(axis=2)
            )
            mean = np.where(has[window], ranks.mean(axis=1), 1.0)
            hottest[window] = np.where(has[window], ranks.max(axis=1), 1.0) / mean
        weights = np.where(has, self.weights[:, None], 0.0)
        total = weights.sum(axis=0)
        known = total > 0
        weights = weights / np.where(known, total, 1.0)
        per_layer = (weights / hottest).sum(axis=0)
        if not known.any():
            return Balancedness(per_layer, known, None, None, None, None)
        worst = int(np.where(known, per_layer, np.inf).argmin())
        return Balancedness(
            per_layer,
            known,
            float(per_layer[known].mean()),
            float(per_layer[worst]),
            worst,
            float(known.sum() / (weights * hottest).sum(axis=0)[known].sum()),
        )

    def mean_loads(self) -> Floats:
        """Weighted mean of the windows' frequencies, ``[L, E]``."""
        known = self.windows.any(axis=2) * self.weights[:, None]
        return np.asarray((frequencies(self.windows) * known[:, :, None]).sum(axis=0))
