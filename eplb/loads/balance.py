"""Expert loads, what they put on slots and ranks, and balancedness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_integer, as_numbers, require_instance
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import SHARE_TOTAL, count_replicas, even_shares

Floats = NDArray[np.float64]


def validate_loads(
    loads: ArrayLike, *, num_layers: int | None = None, num_logical_experts: int | None = None
) -> NDArray[np.float64]:
    """Loads ``[L, E]`` as contiguous float64.

    Raises:
        ValueError: not two-dimensional numbers of the wanted shape, or a NaN, infinite or negative load
            (named with its layer and expert).
    """
    array = as_numbers("loads", loads, "[layers, experts]")
    if array.ndim != 2:
        raise ValueError(f"loads must be [layers, experts], found shape {list(array.shape)}")
    if num_layers is not None and array.shape[0] != as_integer("num_layers", num_layers):
        raise ValueError(f"loads have {array.shape[0]} layers, expected {num_layers}")
    if num_logical_experts is not None:
        num_logical_experts = as_integer("num_logical_experts", num_logical_experts)
        if array.shape[1] != num_logical_experts:
            raise ValueError(f"loads have {array.shape[1]} experts, expected {num_logical_experts}")
    if array.shape[1] < 1:
        raise ValueError("loads have 0 experts, expected at least 1")
    bad = np.argwhere(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        layer, expert = (int(i) for i in bad[0])
        raise ValueError(
            f"loads: layer {layer} expert {expert} is {array[layer, expert]}, expected a finite number >= 0"
        )
    return array


class RankLoadMap:
    """Rank loads of many windows under one placement: the division over replicas is prepared once.

    Calls take counts ``[L, E]`` and give float64 ``[L, R]``.
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
            self._factor = 1.0 / count_replicas(rows, num_logical_experts)[layers, rows]
        else:
            self._factor = np.asarray(shares, dtype=np.float64) / SHARE_TOTAL

    @classmethod
    def of(cls, placement: Placement) -> RankLoadMap:
        """The map of a checked placement; layers with exactly even shares divide evenly."""
        made = cls(placement.physical_to_logical, placement.num_logical_experts, placement.topology.ep_size)
        if placement.shares is not None:  # even means exactly even, not even to one 65535th
            even = (placement.shares == even_shares(placement.physical_to_logical)).all(axis=1, keepdims=True)
            made._factor = np.where(even, made._factor, placement.shares / SHARE_TOTAL)
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
        return np.asarray(
            self.slots(counts)
            .reshape(self.num_layers, self.ep_size, self.num_slots // self.ep_size)
            .sum(axis=2)
        )


def quick_balancedness(rank_loads: Floats) -> tuple[float | None, float | None]:
    """(mean over layers with load, total) of rank loads ``[L, R]``, without the checks: for long series."""
    maxima = rank_loads.max(axis=1)
    known = maxima > 0
    if not known.any():
        return None, None
    means = rank_loads.mean(axis=1)
    return float((means[known] / maxima[known]).mean()), float(means[known].sum() / maxima[known].sum())


def slot_loads(loads: ArrayLike, placement: Placement) -> NDArray[np.float64]:
    """Load of every slot, ``[L, E] -> [L, P]``: an expert's load divided by its shares, or evenly."""
    array = _of_placement(loads, placement)
    return RankLoadMap.of(placement).slots(array)


def rank_loads(loads: ArrayLike, placement: Placement) -> NDArray[np.float64]:
    """Load of every rank, ``[L, E] -> [L, R]``."""
    array = _of_placement(loads, placement)
    return RankLoadMap.of(placement)(array)


def _of_placement(loads: ArrayLike, placement: Placement) -> NDArray[np.float64]:
    require_instance("placement", placement, Placement)
    return validate_loads(
        loads, num_layers=placement.num_layers, num_logical_experts=placement.num_logical_experts
    )


@dataclass(frozen=True, eq=False)
class Balancedness:
    """Mean over ranks / max over ranks of the load, per layer and over layers; 1.0 is perfect.

    Attributes:
        per_layer: ``[L]``, 0 where a layer has no load.
        has_load: ``[L]``, False marks "no data": left out of all figures below.
        mean: mean over layers with load; None if there is none.
        worst, worst_layer: the least balanced layer with load.
        total: sum of means / sum of maxes over layers.
    """

    per_layer: NDArray[np.float64]
    has_load: NDArray[np.bool_]
    mean: float | None
    worst: float | None
    worst_layer: int | None
    total: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; a layer without load is None."""
        pairs = zip(self.per_layer.tolist(), self.has_load.tolist(), strict=True)
        return {
            "mean": self.mean,
            "worst": self.worst,
            "worst_layer": self.worst_layer,
            "total": self.total,
            "per_layer": [value if known else None for value, known in pairs],
        }


def balancedness(rank_loads: ArrayLike) -> Balancedness:
    """Balancedness of rank loads ``[L, R]``: the mean and max run over ranks, never over layers.

    Raises:
        ValueError: not ``[L, R]`` with R >= 1, or a load that is not finite and >= 0.
    """
    loads = as_numbers("rank loads", rank_loads, "[layers, ranks >= 1]")
    if loads.ndim != 2 or loads.shape[1] < 1:
        raise ValueError(f"rank loads must be [layers, ranks >= 1], found shape {list(loads.shape)}")
    if not bool((np.isfinite(loads) & (loads >= 0)).all()):
        layer, rank = (int(i) for i in np.argwhere(~(np.isfinite(loads) & (loads >= 0)))[0])
        raise ValueError(
            f"rank loads: layer {layer} rank {rank} is {loads[layer, rank]}, expected a finite number >= 0"
        )
    maxima = loads.max(axis=1)
    has_load = maxima > 0
    # Dividing by the maximum first keeps huge loads finite and makes the figure independent of their scale.
    scaled = loads / np.where(has_load, maxima, 1.0)[:, None]
    per_layer = np.where(has_load, scaled.mean(axis=1), 0.0)
    if not has_load.any():
        return Balancedness(per_layer, has_load, None, None, None, None)
    known = np.where(has_load, per_layer, np.inf)
    worst_layer = int(known.argmin())
    weights = maxima / maxima.max()
    return Balancedness(
        per_layer=per_layer,
        has_load=has_load,
        mean=float(per_layer[has_load].mean()),
        worst=float(per_layer[worst_layer]),
        worst_layer=worst_layer,
        total=float((per_layer * weights).sum() / weights.sum()),
    )


def placement_balancedness(loads: ArrayLike, placement: Placement) -> Balancedness:
    """Balancedness of ``placement`` under loads ``[L, E]``; independent of their scale, however large."""
    require_instance("placement", placement, Placement)
    array = validate_loads(loads)
    largest = float(array.max()) if array.size else 0.0
    return balancedness(rank_loads(array / largest if largest > 0 else array, placement))
