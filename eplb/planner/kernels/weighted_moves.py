"""Kernel of the move search with exact shares: add a link out of the bottleneck, or swap load out of it.

At a level T, whatever load cannot be pushed below T sits in a set S of ranks closed under residual paths. Only
an operation that leads out of S helps. Candidates are scored by the smaller of the excess that can reach their
source and the room reachable from their destination; the best are then solved exactly.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.flow import TOLERANCE, even_flow, link_replicas, lowest_level, push_excess
from evenroute.eplb.planner.kernels.moves import COPY, SWAP, fill_holds, operation_cost, swap_links, unlink


@kernel
def _excess_and_room(
    left, level, tolerance, num_local, rank_of, nxt, flow, load, closed, excess, room,
    trial_flow, trial_load, seen, from_slot, queue,
):  # fmt: skip
    """Per rank, by one flow each: in the closed set, excess it would draw if it had room without end; outside,
    load it could take over in all, by itself and by handing on.
    """
    endless = 2.0 * load.sum()
    for rank in range(load.shape[0]):
        trial_flow[:], trial_load[:] = flow, load
        if closed[rank]:
            trial_load[rank] -= endless
            rest = push_excess(
                level, tolerance, num_local, rank_of, nxt, trial_flow, trial_load, seen, from_slot, queue
            )
            excess[rank], room[rank] = left - rest, 0.0
        else:
            for other in range(load.shape[0]):
                if closed[other]:
                    trial_load[other] = level
            trial_load[rank] += endless
            before = trial_load[rank] - level
            rest = push_excess(
                level, tolerance, num_local, rank_of, nxt, trial_flow, trial_load, seen, from_slot, queue
            )
            excess[rank], room[rank] = 0.0, max(0.0, level - load[rank]) + max(0.0, before - rest)


@kernel
def _prepare(rank_of, nxt, flow, closed, excess, room, others, drawn, first):
    """What the other replicas of a slot's expert mean, ``[P]`` each.

    ``others`` is, inside the closed set, the load they carry there, outside it the load they could take over;
    ``drawn`` the excess that reaches their ranks; ``first`` is False where a lower slot of the set already
    speaks for the expert.
    """
    for slot in range(nxt.shape[0]):
        inside = closed[rank_of[slot]]
        others[slot], drawn[slot], first[slot] = 0.0, 0.0, inside
        other = nxt[slot]
        while other != slot:
            at = rank_of[other]
            if inside and closed[at]:
                others[slot] += flow[other]
                drawn[slot] += excess[at]
                if other < slot:
                    first[slot] = False
            elif not inside and not closed[at]:
                others[slot] += room[at]
            other = nxt[other]


@kernel
def _keep(score, kind, i, j, scores, found, size):
    """Keep the candidate if it is among the best; returns how many are kept."""
    if size < scores.shape[0]:
        at = size
        size += 1
    else:
        at = int(np.argmin(scores))
        if score <= scores[at]:
            return size
    scores[at] = score
    found[at, 0], found[at, 1], found[at, 2] = kind, i, j
    return size


@kernel
def _candidates(
    left, slots, nxt, flow, rank_of, closed, holds, at_first, paid, excess, room, others, drawn, first,
    scores, found,
):  # fmt: skip
    """Operations out of the closed set, by an upper estimate of their gain per moved slot; returns how many."""
    num_slots = slots.shape[0]
    size, limit = 0, 0.0
    inside = np.flatnonzero(closed[rank_of])
    for j in range(num_slots):
        to, b = rank_of[j], slots[j]
        if closed[to]:
            continue
        free = room[to] + flow[j]
        # What comes into the set, or stays over it, if slot j gives up its expert.
        stays = max(0.0, flow[j] - others[j])
        joint = room[to] + others[j]
        for i in inside:
            source, a = rank_of[i], slots[i]
            if holds[to, a]:
                continue
            cost_a = (0 if at_first[to, a] else 1) - paid[j]
            if nxt[j] != j and first[i]:
                gain = min(min(excess[source] + drawn[i], left), flow[i] + others[i])
                gain = min(gain, min(free, joint)) - stays
                cost = max(float(cost_a), 0.5)
                if gain > limit * cost:
                    size = _keep(gain / cost, COPY, i, j, scores, found, size)
                    if size == scores.shape[0]:
                        limit = scores.min()
            gain = min(excess[source], flow[i] - stays) + min(drawn[i], others[i])
            gain = min(min(gain, left), free) - max(0.0, flow[i] - free)
            if gain <= limit * 0.5 or holds[source, b]:
                continue
            cost = max(float(cost_a - paid[i] + (0 if at_first[source, b] else 1)), 0.5)
            if gain > limit * cost:
                size = _keep(gain / cost, SWAP, i, j, scores, found, size)
                if size == scores.shape[0]:
                    limit = scores.min()
    return size


@kernel
def _apply(kind, i, j, slots, nxt, flow, load, num_local):
    """Carry out an operation; a freed replica's load goes to the coolest rank that shares its expert."""
    source, to = i // num_local, j // num_local
    if kind == SWAP:
        swap_links(nxt, i, j)
        slots[i], slots[j] = slots[j], slots[i]
        flow[i], flow[j] = flow[j], flow[i]
        load[source] += flow[i] - flow[j]
        load[to] += flow[j] - flow[i]
        return
    coolest = nxt[j]
    other = nxt[j]
    while other != j:
        if load[other // num_local] < load[coolest // num_local]:
            coolest = other
        other = nxt[other]
    flow[coolest] += flow[j]
    load[coolest // num_local] += flow[j]
    load[to] -= flow[j]
    flow[j] = 0.0
    unlink(nxt, j)
    slots[j] = slots[i]
    nxt[j] = nxt[i]
    nxt[i] = j


@kernel
def _best_of(
    size, scores, found, left, least, level, tolerance, num_local, rank_of,
    slots, nxt, flow, load, at_first, trial_slots, trial_nxt, trial_flow, trial_load, seen, from_slot, queue,
):  # fmt: skip
    """Solve candidates exactly, most promising first, until none left can be better; index or -1."""
    order = np.argsort(-scores[:size], kind="mergesort")
    best, best_score = -1, 0.0
    for k in order:
        if scores[k] <= best_score:
            break
        kind, i, j = found[k, 0], found[k, 1], found[k, 2]
        trial_slots[:], trial_nxt[:] = slots, nxt
        trial_flow[:], trial_load[:] = flow, load
        cost = operation_cost(kind, i, j, slots, num_local, at_first)
        _apply(kind, i, j, trial_slots, trial_nxt, trial_flow, trial_load, num_local)
        rest = push_excess(
            level, tolerance, num_local, rank_of, trial_nxt, trial_flow, trial_load, seen, from_slot, queue
        )
        score = (left - rest) / max(float(cost), 0.5)
        if score > best_score and left - rest > least:
            best, best_score = k, score
    return best


@kernel
def weighted_path(
    loads, slots, num_ranks, max_cost, level_of_mean, tries, operations, costs, levels, lengths
):
    """Search layers ``loads [L, E]`` from ``slots [L, P]``, which end as the last placement of the path.

    Args:
        max_cost: a path ends when it has moved this many slots.
        level_of_mean: T = ``level_of_mean`` x mean rank load; a path ends when all load fits below it.
        tries: candidates kept a step, and how many when none of those helps.
        operations ``[L, K, 3]``, costs ``[L, K + 1]`` (moved slots), levels ``[L, K + 1]`` (lowest possible
            max rank load with exact shares): out, the path; lengths ``[L]``: out, its operations.
    """
    num_layers, num_slots = slots.shape
    num_local, num_experts = num_slots // num_ranks, loads.shape[1]
    nxt, trial_nxt = np.empty(num_slots, dtype=np.int64), np.empty(num_slots, dtype=np.int64)
    flow, load = np.empty(num_slots), np.empty(num_ranks)
    trial_flow, trial_load = np.empty(num_slots), np.empty(num_ranks)
    trial_slots = np.empty(num_slots, dtype=np.int32)
    closed, seen = np.empty(num_ranks, dtype=np.bool_), np.empty(num_ranks, dtype=np.bool_)
    from_slot, queue = np.empty(num_ranks, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    excess, room = np.empty(num_ranks), np.empty(num_ranks)
    others, drawn = np.empty(num_slots), np.empty(num_slots)
    first = np.empty(num_slots, dtype=np.bool_)
    at_first = np.empty((num_ranks, num_experts), dtype=np.bool_)
    holds = np.empty((num_ranks, num_experts), dtype=np.bool_)
    paid = np.empty(num_slots, dtype=np.int64)
    rank_of = np.arange(num_slots) // num_local
    scores, found = np.empty(tries[1]), np.empty((tries[1], 3), dtype=np.int64)
    for layer in range(num_layers):
        row = slots[layer]
        link_replicas(row, num_experts, nxt)
        even_flow(loads[layer], row, num_local, flow, load)
        fill_holds(row, num_local, at_first)
        holds[:] = at_first
        paid[:] = 0
        mean = load.mean()
        level, tolerance, least = mean * level_of_mean, mean * TOLERANCE, mean * 1e-7
        step = 0
        costs[layer, 0] = 0
        while True:
            left = push_excess(
                level, tolerance, num_local, rank_of, nxt, flow, load, closed, from_slot, queue
            )
            trial_flow[:], trial_load[:] = flow, load
            levels[layer, step] = lowest_level(
                level if left > 0.0 else mean,
                tolerance, num_local, rank_of, nxt, trial_flow, trial_load, seen, from_slot, queue,
            )  # fmt: skip
            if left <= least or step == operations.shape[1] or costs[layer, step] >= max_cost:
                break
            _excess_and_room(
                left, level, tolerance, num_local, rank_of, nxt, flow, load, closed, excess, room,
                trial_flow, trial_load, seen, from_slot, queue,
            )  # fmt: skip
            _prepare(rank_of, nxt, flow, closed, excess, room, others, drawn, first)
            best = -1
            for limit in tries:
                size = _candidates(
                    left, row, nxt, flow, rank_of, closed, holds, at_first, paid, excess, room,
                    others, drawn, first, scores[:limit], found,
                )  # fmt: skip
                best = _best_of(
                    size, scores, found, left, least, level, tolerance, num_local, rank_of,
                    row, nxt, flow, load, at_first, trial_slots, trial_nxt, trial_flow, trial_load,
                    seen, from_slot, queue,
                )  # fmt: skip
                if best >= 0 or size < limit:
                    break
            if best < 0:
                break
            kind, i, j = found[best, 0], found[best, 1], found[best, 2]
            source, to = i // num_local, j // num_local
            costs[layer, step + 1] = costs[layer, step] + operation_cost(kind, i, j, row, num_local, at_first)
            holds[to, row[j]], holds[to, row[i]] = False, True
            if kind == SWAP:
                holds[source, row[i]], holds[source, row[j]] = False, True
            _apply(kind, i, j, row, nxt, flow, load, num_local)
            paid[i] = 0 if at_first[source, row[i]] else 1
            paid[j] = 0 if at_first[to, row[j]] else 1
            operations[layer, step, 0] = kind
            operations[layer, step, 1] = i
            operations[layer, step, 2] = j
            step += 1
        lengths[layer] = step
