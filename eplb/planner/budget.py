"""Divide a budget of moves over layers: take the steepest segments of every layer's concave hull."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.planner.kernels.hull import concave_hulls


@dataclass(frozen=True, eq=False)
class Paths:
    """V ways each layer could go: point ``k`` of a way is what its first ``k`` operations give.

    Attributes:
        operations: ``[V, L, K, 3]`` (kind, slot, slot).
        costs: ``[V, L, K + 1]`` moved slots after k operations.
        levels: ``[V, L, K + 1]`` largest rank load after k operations.
        lengths: ``[V, L]`` operations.
    """

    operations: NDArray[np.int32]
    costs: NDArray[np.int64]
    levels: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @classmethod
    def empty(cls, num_paths: int, num_layers: int, max_operations: int) -> Paths:
        size = (num_paths, num_layers, max_operations)
        points = (num_paths, num_layers, max_operations + 1)
        return cls(
            np.zeros((*size, 3), dtype=np.int32),
            np.zeros(points, dtype=np.int64),
            np.ones(points),
            np.zeros((num_paths, num_layers), dtype=np.int64),
        )


@dataclass(frozen=True, eq=False)
class Hulls:
    """Concave hull of value over moved slots, per layer; arrays ``[L, H]``, ``size [L]`` points each."""

    cost: NDArray[np.int64]
    value: NDArray[np.float64]
    path: NDArray[np.int64]
    step: NDArray[np.int64]
    size: NDArray[np.int64]

    @classmethod
    def of(cls, paths: Paths, values: NDArray[np.float64]) -> Hulls:
        """Hulls of ``values [V, L, K + 1]``, larger is better."""
        num_paths, num_layers, width = paths.costs.shape
        shape = (num_layers, num_paths * width)
        hulls = cls(
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape),
            np.zeros(shape, dtype=np.int64),
            np.zeros(shape, dtype=np.int64),
            np.zeros(num_layers, dtype=np.int64),
        )
        concave_hulls(
            paths.costs, values, paths.lengths, hulls.cost, hulls.value, hulls.path, hulls.step, hulls.size
        )
        return hulls


@dataclass(frozen=True)
class Limits:
    """Where to stop.

    Attributes:
        max_moves: moved slots over all layers.
        target: sum of values over layers that is enough.
        price: least value that one moved slot must gain.
    """

    max_moves: int | None = None
    target: float | None = None
    price: float = 0.0


Fits = Callable[[int, int], bool]


def choose_points(hulls: Hulls, limits: Limits, fits: Fits | None = None) -> NDArray[np.int64]:
    """Point of its hull for every layer, ``[L]``: steepest segments first, ties to the lower layer.

    A layer whose next segment does not fit into the budget stands still from there on; cheaper segments of
    others still go.

    Args:
        fits: ``fits(layer, point)`` is asked before a layer goes there; False refuses (a limit per rank).
    """
    points = np.zeros(len(hulls.size), dtype=np.int64)
    spent = 0
    value = float(hulls.value[:, 0].sum())
    heap: list[tuple[float, int]] = []

    def offer(layer: int) -> None:
        at = int(points[layer])
        if at + 1 < hulls.size[layer]:
            rise = float(hulls.value[layer, at + 1] - hulls.value[layer, at])
            run = int(hulls.cost[layer, at + 1] - hulls.cost[layer, at])
            heapq.heappush(heap, (-rise / run, layer))

    for layer in range(len(points)):
        offer(layer)
    while heap and (limits.target is None or value < limits.target):
        slope, layer = heapq.heappop(heap)
        if -slope <= limits.price:
            break
        at = int(points[layer])
        run = int(hulls.cost[layer, at + 1] - hulls.cost[layer, at])
        if limits.max_moves is not None and spent + run > limits.max_moves:
            continue
        if fits is not None and not fits(layer, at + 1):
            continue
        points[layer] += 1
        spent += run
        value += float(hulls.value[layer, at + 1] - hulls.value[layer, at])
        offer(layer)
    return points


def spend_leftover(
    paths: Paths,
    values: NDArray[np.float64],
    path: NDArray[np.int64],
    step: NDArray[np.int64],
    max_moves: int,
) -> None:
    """Spend what is left of the budget on points off the hulls, largest rise first; changes ``path, step [L]``.

    Hull segments come whole, so a few slots of the budget can be left that some layer could use.
    """
    layers = np.arange(len(path))
    points = np.arange(paths.costs.shape[2])
    reached = points[None, None, :] <= paths.lengths[:, :, None]
    while True:
        cost, value = paths.costs[path, layers, step], values[path, layers, step]
        left = max_moves - int(cost.sum())
        allowed = reached & (paths.costs <= (cost + left)[None, :, None])
        rise = np.where(allowed, values - value[None, :, None], 0.0)
        best = rise.max(axis=(0, 2), initial=0.0)
        layer = int(best.argmax()) if len(best) else 0
        if not len(best) or best[layer] <= 1e-12:
            return
        # The cheapest of the best points: argmax takes the first, so order by cost within equal rises.
        candidates = np.argwhere(rise[:, layer] >= best[layer] - 1e-15)
        costs = paths.costs[candidates[:, 0], layer, candidates[:, 1]]
        path[layer], step[layer] = candidates[int(costs.argmin())]
