"""Kernel of joint planning: moves for several windows of loads at once; arrays as in `kernels.spread`."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.flow import link_replicas
from evenroute.eplb.planner.kernels.joint_moves import apply_operation, best_even_operation, best_operation
from evenroute.eplb.planner.kernels.moves import SWAP, fill_holds, operation_cost
from evenroute.eplb.planner.kernels.spread import carry, even_parts, expected, scale_windows, spread

ANCHORS = 16  # hottest ranks tried before a search gives up
LEAST = 1e-6  # of the objective: smaller gains do not count


@kernel
def joint_path(
    loads,
    weights,
    slots,
    kinds,
    barred,
    num_ranks,
    even,
    level,
    max_cost,
    sweeps,
    operations,
    costs,
    values,
    lengths,
):
    """Search layers ``loads [L, W, E]`` from ``slots [L, P]``, which end as the last placement of the path.

    Args:
        weights: ``[L, W]`` of the windows, summing to 1 a layer.
        kinds: ``[L, P]`` 0 marks primaries (every expert once), 1 replicas; operations that mix them must gain
            twice as much. All equal: no difference is made.
        barred: ``[L, R, E]`` where an expert must not go (it stays on its node); or empty.
        even: shares stay even; else they are moved (``sweeps`` rounds after each operation).
        level: of a mean rank's load; only what is above it counts.
        max_cost: a path ends when it has moved this many slots; negative: moves are free.
        operations ``[L, K, 3]``, costs ``[L, K + 1]`` (moved slots), values ``[L, K + 1]`` (expected
            balancedness): out, the path; lengths ``[L]``: out, its operations.
    """
    num_layers, num_slots = slots.shape
    num_windows, num_experts = loads.shape[1], loads.shape[2]
    num_local = num_slots // num_ranks
    nxt = np.empty(num_slots, dtype=np.int64)
    part, change = np.empty(num_slots), np.empty(num_slots)
    flow, excess = np.empty((num_windows, num_slots)), np.empty((num_windows, num_ranks))
    heat, means = np.empty(num_ranks), np.empty(num_windows)
    at_first = np.empty((num_ranks, num_experts), dtype=np.bool_)
    holds = np.empty((num_ranks, num_experts), dtype=np.bool_)
    over, near = np.empty((num_windows, num_slots)), np.empty((num_windows, num_slots))
    where, hand_on = np.empty(num_slots, dtype=np.int64), np.empty(num_slots)
    touched = np.empty(num_ranks, dtype=np.int64)
    for layer in range(num_layers):
        row = slots[layer]
        work = loads[layer].copy()
        scale_windows(work, weights[layer], num_ranks, means)
        limits = means * level
        link_replicas(row, num_experts, nxt)
        even_parts(row, num_experts, part)
        carry(work, row, num_local, part, limits, flow, excess, heat)
        fill_holds(row, num_local, at_first)
        holds[:] = at_first
        if barred.shape[0] > 0:
            holds |= barred[layer]
        if not even:
            spread(work, row, num_local, nxt, part, flow, excess, heat, 4 * sweeps, 1e-9)
        step = 0
        costs[layer, 0] = 0
        values[layer, 0] = expected(weights[layer], means, level, excess)
        while step < operations.shape[1] and (max_cost < 0 or costs[layer, step] < max_cost):
            total = heat.sum()
            if total <= 1e-9:
                break
            kind, i, j = -1, -1, -1
            for anchor in np.argsort(-heat, kind="mergesort")[:ANCHORS]:
                if even:
                    kind, i, j = best_even_operation(
                        anchor, kinds[layer], max_cost < 0, work, row, num_local, nxt, part, flow, excess, heat,
                        holds, at_first, change, over, near, touched, total * LEAST,
                    )  # fmt: skip
                else:
                    kind, i, j = best_operation(
                        anchor, kinds[layer], max_cost < 0, row, num_local, nxt, flow, excess, heat, holds,
                        at_first, change, over, near, where, hand_on, total * LEAST,
                    )  # fmt: skip
                if kind >= 0:
                    break
            if kind < 0:
                break
            costs[layer, step + 1] = costs[layer, step] + operation_cost(kind, i, j, row, num_local, at_first)
            source, to = i // num_local, j // num_local
            holds[to, row[j]], holds[to, row[i]] = False, True
            if kind == SWAP:
                holds[source, row[i]], holds[source, row[j]] = False, True
            apply_operation(kind, i, j, row, num_local, even, nxt, part, heat)
            carry(work, row, num_local, part, limits, flow, excess, heat)
            if not even:
                spread(work, row, num_local, nxt, part, flow, excess, heat, sweeps, 1e-9)
            operations[layer, step, 0], operations[layer, step, 1], operations[layer, step, 2] = kind, i, j
            step += 1
            values[layer, step] = expected(weights[layer], means, level, excess)
        lengths[layer] = step
