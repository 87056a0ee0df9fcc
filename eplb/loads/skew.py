"""How uneven expert loads are, and which rank carries what: small vectorised figures over ``[L, E]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.placement import Placement, replica_counts
from evenroute.eplb.placement.shares import SHARE_TOTAL

Floats = NDArray[np.float64]


class RankLoadMap:
    """Rank loads of many windows under one placement: the division over replicas is prepared once.

    Calls take counts ``[L, E]`` and give float64 ``[L, R]``; same figures as `evenroute.eplb.loads.balance.rank_loads`.
    """

    def __init__(
        self,
        physical_to_logical: NDArray[np.int32],
        num_logical_experts: int,
        ep_size: int,
        shares: Any = None,
    ) -> None:
        rows = np.asarray(physical_to_logical, dtype=np.int64)
        self.num_layers, self.num_slots = rows.shape
        self.ep_size = ep_size
        self._rows = rows
        if shares is None:
            layers = np.arange(self.num_layers)[:, None]
            self._factor = 1.0 / replica_counts(physical_to_logical, num_logical_experts)[layers, rows]
        else:
            self._factor = np.asarray(shares, dtype=np.float64) / SHARE_TOTAL

    @classmethod
    def of(cls, placement: Placement) -> RankLoadMap:
        """The map of a checked placement; layers with exactly even shares divide evenly."""
        made = cls(placement.physical_to_logical, placement.num_logical_experts, placement.topology.ep_size)
        if placement.shares is not None:
            for layer in range(placement.num_layers):
                row = placement.row(layer)
                if row.shares is not None:
                    made._factor[layer] = row.shares.astype(np.float64) / SHARE_TOTAL
        return made

    @classmethod
    def with_factors(cls, placement: Placement, factors: Floats) -> RankLoadMap:
        """A map in which slot p takes the part ``factors [L, P]`` of its expert's load."""
        made = cls(placement.physical_to_logical, placement.num_logical_experts, placement.topology.ep_size)
        made._factor = factors
        return made

    def slots(self, counts: NDArray[Any]) -> Floats:
        """Loads of the slots, ``[L, P]``."""
        return np.asarray(np.take_along_axis(counts, self._rows, axis=1) * self._factor, dtype=np.float64)

    def __call__(self, counts: NDArray[Any]) -> Floats:
        return np.asarray(self.slots(counts).reshape(self.num_layers, self.ep_size, -1).sum(axis=2))


def quick_balancedness(rank_loads: Floats) -> tuple[float | None, float | None]:
    """(mean over layers with load, total) of rank loads ``[L, R]``, without the checks: for long series."""
    maxima = rank_loads.max(axis=1)
    known = maxima > 0
    if not known.any():
        return None, None
    means = rank_loads.mean(axis=1)
    return float((means[known] / maxima[known]).mean()), float(means[known].sum() / maxima[known].sum())


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
