"""Kernel of the move search with even shares: cool the hottest rank, at the best gain per moved slot."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.flow import even_flow, link_replicas
from evenroute.eplb.planner.kernels.moves import COPY, SWAP, fill_holds, operation_cost, swap_links, unlink


@kernel
def _badness(load, level, power):
    over = load - level
    if over <= 0.0:
        return 0.0
    return over * over if power == 2 else over


@kernel
def _best_swap(hot, slots, flow, load, num_local, level, power, holds, at_first, paid, keep, best):
    """Best swap of a slot of rank ``hot``; ``best = (score, kind, i, j)`` so far.

    ``paid [P]`` is 1 where the slot's expert was not on its rank at first (its leaving pays back);
    ``keep [P]`` is scratch: -2 where rank ``hot`` holds the slot's expert, else what its coming costs.
    """
    bad_hot = _badness(load[hot], level, power)
    least_keep = np.zeros(load.shape[0], dtype=np.int64)
    for to in range(load.shape[0]):
        for j in range(to * num_local, (to + 1) * num_local):
            expert = slots[j]
            keep[j] = -2 if holds[hot, expert] else (0 if at_first[hot, expert] else 1) - paid[j]
            if paid[j] == 1:
                least_keep[to] = -1
    score, kind, best_i, best_j = best
    for i in range(hot * num_local, (hot + 1) * num_local):
        a, size = slots[i], flow[i]
        for to in range(load.shape[0]):
            if holds[to, a] or load[to] >= load[hot]:
                continue
            cost_a = (0 if at_first[to, a] else 1) - paid[i]
            bad_to = _badness(load[to], level, power)
            # No swap does better than meeting in the middle.
            middle = _badness(0.5 * (load[hot] + load[to]), level, power)
            if bad_hot + bad_to - 2.0 * middle <= score * max(float(cost_a + least_keep[to]), 0.5):
                continue
            for j in range(to * num_local, (to + 1) * num_local):
                shift = size - flow[j]
                if shift <= 0.0 or keep[j] == -2:
                    continue
                cost = max(float(cost_a + keep[j]), 0.5)
                gain = bad_hot - _badness(load[hot] - shift, level, power)
                if gain <= score * cost:
                    continue
                gain -= _badness(load[to] + shift, level, power) - bad_to
                if gain > score * cost:
                    score, kind, best_i, best_j = gain / cost, SWAP, i, j
    return score, kind, best_i, best_j


@kernel
def _best_copy(
    hot, slots, nxt, flow, load, num_local, rank_of, level, power, counts, holds, at_first, paid, best
):
    """Best further replica of an expert of rank ``hot`` in place of a replica that is not its expert's last.

    The gain of the one expert and the loss of the other are added up as if no rank held both.
    """
    score, kind, best_i, best_j = best
    first = hot * num_local
    relief = np.empty(num_local)  # of all ranks that hold the expert already
    for k in range(num_local):
        less = flow[first + k] / (counts[slots[first + k]] + 1)
        relief[k] = 0.0
        other = first + k
        while True:
            at = load[rank_of[other]]
            relief[k] += _badness(at, level, power) - _badness(at - less, level, power)
            other = nxt[other]
            if other == first + k:
                break
    for j in range(slots.shape[0]):
        if nxt[j] == j:
            continue
        to, b = rank_of[j], slots[j]
        more = flow[j] / (counts[b] - 1)
        loss = 0.0
        other = nxt[j]
        while other != j:
            at = load[rank_of[other]]
            loss += _badness(at + more, level, power) - _badness(at, level, power)
            other = nxt[other]
        bad_to = _badness(load[to], level, power)
        for k in range(num_local):
            i = first + k
            a = slots[i]
            if holds[to, a]:
                continue
            cost = max(float((0 if at_first[to, a] else 1) - paid[j]), 0.5)
            comes = flow[i] * counts[a] / (counts[a] + 1) - flow[j]
            gain = relief[k] - loss + bad_to - _badness(load[to] + comes, level, power)
            if gain > score * cost:
                score, kind, best_i, best_j = gain / cost, COPY, i, j
    return score, kind, best_i, best_j


@kernel
def _apply(kind, i, j, slots, nxt, flow, load, num_local, counts, holds):
    """Carry out an operation on slots, rings, flows and rank loads."""
    a, b = slots[i], slots[j]
    source, to = i // num_local, j // num_local
    holds[to, b], holds[to, a] = False, True
    if kind == SWAP:
        holds[source, a], holds[source, b] = False, True
        swap_links(nxt, i, j)
        slots[i], slots[j] = b, a
        flow[i], flow[j] = flow[j], flow[i]
        load[source] += flow[i] - flow[j]
        load[to] += flow[j] - flow[i]
        return
    load[to] -= flow[j]
    other = nxt[j]
    unlink(nxt, j)
    counts[b] -= 1
    each = flow[j] * (counts[b] + 1) / counts[b]
    start = other
    while True:
        load[other // num_local] += each - flow[other]
        flow[other] = each
        other = nxt[other]
        if other == start:
            break
    counts[a] += 1
    each = flow[i] * (counts[a] - 1) / counts[a]
    slots[j] = a
    flow[j] = 0.0
    nxt[j] = nxt[i]
    nxt[i] = j
    other = i
    while True:
        load[other // num_local] += each - flow[other]
        flow[other] = each
        other = nxt[other]
        if other == i:
            break


@kernel
def even_path(
    loads, slots, num_ranks, homes, max_cost, level_of_mean, power, operations, costs, levels, lengths
):
    """Search layers ``loads [L, E]`` from ``slots [L, P]``, which end as the last placement of the path.

    Args:
        homes: ``[L, R, E]`` where an expert costs nothing; with L = 0, where it lies in ``slots``.
        max_cost: a path ends when it has moved this many slots.
        level_of_mean, power: badness of a rank is ``max(0, load - level_of_mean * mean) ** power``.
        operations ``[L, K, 3]``, costs ``[L, K + 1]`` (moved slots), levels ``[L, K + 1]`` (max rank load):
            out, the path; lengths ``[L]``: out, its operations.
    """
    num_layers, num_slots = slots.shape
    num_local, num_experts = num_slots // num_ranks, loads.shape[1]
    nxt = np.empty(num_slots, dtype=np.int64)
    flow, load = np.empty(num_slots), np.empty(num_ranks)
    at_first = np.empty((num_ranks, num_experts), dtype=np.bool_)
    holds = np.empty((num_ranks, num_experts), dtype=np.bool_)
    counts = np.empty(num_experts, dtype=np.int64)
    rank_of = np.arange(num_slots) // num_local
    paid, keep = np.empty(num_slots, dtype=np.int64), np.empty(num_slots, dtype=np.int64)
    for layer in range(num_layers):
        row = slots[layer]
        link_replicas(row, num_experts, nxt)
        even_flow(loads[layer], row, num_local, flow, load)
        fill_holds(row, num_local, holds)
        at_first[:] = homes[layer] if homes.shape[0] > 0 else holds
        paid[:] = 0
        counts[:] = 0
        for expert in row:
            counts[expert] += 1
        mean = load.mean()
        level = mean * level_of_mean
        tiny = 1e-9 * mean**power
        costs[layer, 0], levels[layer, 0] = 0, load.max()
        step = 0
        while step < operations.shape[1] and costs[layer, step] < max_cost:
            hot = int(np.argmax(load))
            if load[hot] <= level * (1.0 + 1e-6):
                break
            best = (tiny, -1, -1, -1)
            best = _best_copy(
                hot,
                row,
                nxt,
                flow,
                load,
                num_local,
                rank_of,
                level,
                power,
                counts,
                holds,
                at_first,
                paid,
                best,
            )
            best = _best_swap(
                hot, row, flow, load, num_local, level, power, holds, at_first, paid, keep, best
            )
            _, kind, i, j = best
            if kind < 0:
                break
            cost = operation_cost(kind, i, j, row, num_local, at_first)
            _apply(kind, i, j, row, nxt, flow, load, num_local, counts, holds)
            paid[j] = 0 if at_first[j // num_local, row[j]] else 1
            paid[i] = 0 if at_first[i // num_local, row[i]] else 1
            operations[layer, step, 0] = kind
            operations[layer, step, 1] = i
            operations[layer, step, 2] = j
            costs[layer, step + 1] = costs[layer, step] + cost
            levels[layer, step + 1] = load.max()
            step += 1
        lengths[layer] = step
