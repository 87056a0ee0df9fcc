"""Kernel that reduces the ways a layer could go to the concave hull of value over moved slots."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel


@kernel
def concave_hulls(costs, values, lengths, hull_cost, hull_value, hull_path, hull_step, sizes):
    """Upper concave hull, from standing still, of all points of all paths of each layer.

    Args:
        costs, values: ``[V, L, K + 1]`` of V paths a layer; lengths ``[V, L]``: their operations.
        hull_cost, hull_value, hull_path, hull_step: out ``[L, H]``; sizes: out ``[L]`` points. Cost and value
            rise along a hull; point 0 is standing still (cost 0).
    """
    num_paths, num_layers, width = costs.shape
    for layer in range(num_layers):
        total = 0
        for path in range(num_paths):
            total += lengths[path, layer] + 1
        cost = np.empty(total, dtype=np.int64)
        value = np.empty(total)
        where = np.empty(total, dtype=np.int64)
        n = 0
        for path in range(num_paths):
            for step in range(lengths[path, layer] + 1):
                cost[n], value[n] = costs[path, layer, step], values[path, layer, step]
                where[n] = path * width + step
                n += 1
        by_value = np.argsort(-value, kind="mergesort")
        order = by_value[np.argsort(cost[by_value], kind="mergesort")]
        size = 0
        for k in order:
            if size > 0 and value[k] <= hull_value[layer, size - 1] + 1e-12:
                continue
            if size > 0 and cost[k] == hull_cost[layer, size - 1]:
                continue
            while size >= 2:
                rise = hull_value[layer, size - 1] - hull_value[layer, size - 2]
                run = hull_cost[layer, size - 1] - hull_cost[layer, size - 2]
                next_rise = value[k] - hull_value[layer, size - 1]
                if rise * (cost[k] - hull_cost[layer, size - 1]) > next_rise * run:
                    break
                size -= 1
            hull_cost[layer, size], hull_value[layer, size] = cost[k], value[k]
            hull_path[layer, size], hull_step[layer, size] = where[k] // width, where[k] % width
            size += 1
            if size == hull_cost.shape[1]:
                break
        sizes[layer] = size
