"""How uneven expert loads are: small vectorised figures over ``[L, E]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Skew:
    """Unevenness of experts per layer (NaN-free: 0 where a layer has no load).

    Attributes:
        max_over_mean: load of the hottest expert / mean.
        gini: 0 = all equal, towards 1 = all on one expert.
        top8_share: share of the layer's load on its 8 hottest experts.
        has_load: ``[L]``.
    """

    max_over_mean: Floats
    gini: Floats
    top8_share: Floats
    has_load: NDArray[np.bool_]

    def as_dict(self, layer_name: Any = int) -> dict[str, Any]:
        """For each figure its mean, worst value and worst layer; None without load."""
        result: dict[str, Any] = {}
        for name in ("max_over_mean", "gini", "top8_share"):
            values = getattr(self, name)
            if not self.has_load.any():
                result[name] = None
                continue
            worst = int(np.where(self.has_load, values, -np.inf).argmax())
            result[name] = {
                "mean": float(values[self.has_load].mean()),
                "worst": float(values[worst]),
                "worst_layer": layer_name(worst),
            }
        return result


def skew(loads: Floats) -> Skew:
    """Skew of loads ``[L, E]``. Gini by the sorted form: (2 sum(i x_i) / (n sum(x))) - (n + 1) / n, i from 1."""
    ordered = np.sort(loads, axis=1)
    total = ordered.sum(axis=1)
    known = total > 0
    safe = np.where(known, total, 1.0)
    count = loads.shape[1]
    ranks = np.arange(1, count + 1)
    gini = 2.0 * (ordered * ranks).sum(axis=1) / (count * safe) - (count + 1) / count
    return Skew(
        max_over_mean=np.where(known, ordered[:, -1] * count / safe, 0.0),
        gini=np.where(known, np.clip(gini, 0.0, 1.0), 0.0),
        top8_share=np.where(known, ordered[:, -8:].sum(axis=1) / safe, 0.0),
        has_load=known,
    )
