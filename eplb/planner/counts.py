"""Full plans with even shares, made better where the greedy replica counts pack badly."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.planner.budget import Paths
from evenroute.eplb.planner.kernels.counts import try_counts
from evenroute.eplb.planner.kernels.joint import joint_path
from evenroute.eplb.planner.kernels.moves import replay
from evenroute.eplb.planner.layers import over_layers

GOOD_ENOUGH = 0.998  # balancedness of a layer that is searched no further
STOP = 0.9998  # of a layer that is searched


def even_balancedness(
    loads: NDArray[np.float64], rows: NDArray[np.int32], num_ranks: int
) -> NDArray[np.float64]:
    """Mean / max rank load ``[L]`` of rows ``[L, P]`` with even shares; every layer of ``loads [L, E]`` has load."""
    layers = np.arange(len(rows))[:, None]
    counts = np.zeros(loads.shape)
    np.add.at(counts, (layers, rows), 1.0)
    ranks = (loads / np.maximum(counts, 1.0))[layers, rows].reshape(len(rows), num_ranks, -1).sum(axis=2)
    return np.asarray(ranks.mean(axis=1) / ranks.max(axis=1))


def improve_even(
    loads: NDArray[np.float64], rows: NDArray[np.int32], num_ranks: int, num_threads: int | None
) -> None:
    """Replace ``rows [L, P]``, full plans of ``loads [L, E]``, where other counts or moves of replicas do better.

    Only layers below GOOD_ENOUGH are searched: first a row of further counts, then, from both, moves that change
    slots and counts together.
    """
    if not len(rows):
        return
    poor = np.flatnonzero(even_balancedness(loads, rows, num_ranks) < GOOD_ENOUGH)
    if not len(poor):
        return
    work = np.ascontiguousarray(loads[poor])
    greedy = np.ascontiguousarray(rows[poor])
    other = greedy.copy()

    def count(first: int, last: int) -> None:
        try_counts(work[first:last], num_ranks, STOP, other[first:last])

    over_layers(count, len(poor), num_threads, block=1)
    best, value = other, even_balancedness(work, other, num_ranks)
    for start in (other, greedy):
        left = np.flatnonzero(value < GOOD_ENOUGH)
        if not len(left):
            break
        found = _search(np.ascontiguousarray(work[left]), start[left], num_ranks, num_threads)
        reached = even_balancedness(work[left], found, num_ranks)
        better = reached > value[left] + 1e-9
        best[left[better]], value[left[better]] = found[better], reached[better]
    rows[poor] = best


def _search(
    loads: NDArray[np.float64], rows: NDArray[np.int32], num_ranks: int, num_threads: int | None
) -> NDArray[np.int32]:
    """Where free moves lead from ``rows [L, P]``: the best point of each layer's path."""
    num_layers, num_slots = rows.shape
    paths = Paths.empty(1, num_layers, num_slots // 2 + 16)
    kinds = np.ones(rows.shape, dtype=np.int8)
    nowhere = np.zeros((0, num_ranks, loads.shape[1]), dtype=np.bool_)
    windows, weights = np.ascontiguousarray(loads[:, None, :]), np.ones((num_layers, 1))

    def search(first: int, last: int) -> None:
        part = slice(first, last)
        joint_path(
            windows[part], weights[part], rows[part].copy(), kinds[part], nowhere, num_ranks, True, 1.0, -1, 0,
            paths.operations[0, part], paths.costs[0, part], paths.levels[0, part], paths.lengths[0, part],
        )  # fmt: skip

    over_layers(search, num_layers, num_threads, block=1)
    reached = np.arange(paths.levels.shape[2])[None, :] <= paths.lengths[0][:, None]
    best = np.where(reached, paths.levels[0], -1.0).argmax(axis=1)
    found = rows.copy()
    replay(np.ascontiguousarray(paths.operations[0]), best, found)
    return found
