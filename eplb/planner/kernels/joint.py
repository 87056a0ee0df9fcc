"""Kernels of joint planning: one placement, replica counts and shares for several windows of loads at once.

The objective of a layer is ``sum over (window, rank) of weight * max(load - 1, 0) ** 3``, loads scaled so that a
mean rank is 1. It is convex in the shares, smooth, and close to the sum of the hottest ranks. Weights are folded
into the loads: with ``x * weight ** (1 / 3)`` a window's excess over ``weight ** (1 / 3)`` cubes to its part.

Arrays of one layer: ``loads [W, E]`` (scaled, weighted), ``slots [P]``, ``nxt [P]`` (ring of an expert's replicas),
``part [P]`` (share in [0, 1]), ``flow [W, P]`` (load a slot carries), ``excess [W, R]``, ``heat [R]`` (a rank's part
of the objective).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb.planner.kernels.flow import link_replicas
from evenroute.eplb.planner.kernels.moves import COPY, SWAP, fill_holds, operation_cost, swap_links, unlink
from evenroute.eplb._compiled import kernel

ANCHORS = 3  # hottest ranks tried before a search gives up
LEAST = 1e-7  # of the objective: smaller gains are none
STEPS = 6  # of the search along one pair of replicas


@kernel
def cube(x):
    """``max(x, 0) ** 3``."""
    y = max(x, 0.0)
    return y * y * y


@kernel
def carry(loads, slots, num_local, part, means, flow, excess, heat):
    """Fill flow, excess and heat from loads, slots and shares; ``means [W]`` are a mean rank's load."""
    for w in range(loads.shape[0]):
        for rank in range(heat.shape[0]):
            excess[w, rank] = -means[w]
        for slot in range(slots.shape[0]):
            flow[w, slot] = loads[w, slots[slot]] * part[slot]
            excess[w, slot // num_local] += flow[w, slot]
    for rank in range(heat.shape[0]):
        reheat(rank, excess, heat)


@kernel
def reheat(rank, excess, heat):
    """A rank's part of the objective."""
    total = 0.0
    for w in range(excess.shape[0]):
        total += cube(excess[w, rank])
    heat[rank] = total


@kernel
def even_parts(slots, num_experts, part):
    """Fill ``part [P]`` with even shares."""
    counts = np.zeros(num_experts)
    for expert in slots:
        counts[expert] += 1.0
    for slot in range(slots.shape[0]):
        part[slot] = 1.0 / counts[slots[slot]]


@kernel
def _slope(loads, expert, a, b, moved, excess):
    """Derivative of the objective (over 3) when ``moved`` of the expert's share has gone from rank a to rank b."""
    total = 0.0
    for w in range(loads.shape[0]):
        x = loads[w, expert]
        u = max(excess[w, a] - moved * x, 0.0)
        v = max(excess[w, b] + moved * x, 0.0)
        total += x * (u * u - v * v)
    return total


@kernel
def spread(loads, slots, num_local, nxt, part, flow, excess, heat, sweeps, least):
    """Move shares between replicas of an expert, pair by pair, while the objective falls (coordinate descent).

    A pair is the replica whose rank is the steepest and the one whose rank is the flattest; a search along it
    (safeguarded secant) finds where the slope is 0. Ends early when no pair's slope exceeds ``least``.
    """
    num_windows = loads.shape[0]
    for _ in range(sweeps):
        busy = False
        for slot in range(slots.shape[0]):
            if nxt[slot] <= slot:
                # An expert is looked at once, from the slot before its ring closes; single replicas never.
                continue
            expert = slots[slot]
            first = slot
            other = nxt[slot]
            while other != slot:
                if other < first:
                    first = other
                other = nxt[other]
            if first != slot:
                continue
            high, low, top, bottom = -1, -1, -1.0, np.inf
            other = slot
            while True:
                rank = other // num_local
                slope = 0.0
                for w in range(num_windows):
                    u = max(excess[w, rank], 0.0)
                    slope += loads[w, expert] * u * u
                if part[other] > 0.0 and slope > top:
                    high, top = other, slope
                if slope < bottom:
                    low, bottom = other, slope
                other = nxt[other]
                if other == slot:
                    break
            if high < 0 or high == low or top - bottom <= least:
                continue
            a, b = high // num_local, low // num_local
            near, far = 0.0, part[high]
            at_near, at_far = top - bottom, _slope(loads, expert, a, b, far, excess)
            moved = far
            if at_far < 0.0:
                for _step in range(STEPS):
                    moved = near + (far - near) * at_near / (at_near - at_far)
                    moved = min(max(moved, near + 0.1 * (far - near)), far - 0.1 * (far - near))
                    at = _slope(loads, expert, a, b, moved, excess)
                    if abs(at) <= 0.01 * (top - bottom):
                        break
                    if at > 0.0:
                        near, at_near = moved, at
                    else:
                        far, at_far = moved, at
            busy = True
            part[low] += moved
            part[high] = 0.0 if moved == part[high] else part[high] - moved
            for w in range(num_windows):
                x = loads[w, expert] * moved
                flow[w, high] -= x
                flow[w, low] += x
                excess[w, a] -= x
                excess[w, b] += x
            reheat(a, excess, heat)
            reheat(b, excess, heat)
        if not busy:
            return


@kernel
def _coolest(slot, nxt, num_local, heat):
    """The other replica of this slot's expert whose rank is the coolest."""
    best = nxt[slot]
    other = nxt[best]
    while other != slot:
        if heat[other // num_local] < heat[best // num_local]:
            best = other
        other = nxt[other]
    return best


@kernel
def _copy_change(i, j, num_local, nxt, flow, excess, heat):
    """Change of the objective if slot j takes half of what slot i carries and hands its own load on."""
    k = _coolest(j, nxt, num_local, heat)
    source, to, heir = i // num_local, j // num_local, k // num_local
    change = -heat[source] - heat[to]
    if heir != source:
        change -= heat[heir]
    for w in range(excess.shape[0]):
        half, own = 0.5 * flow[w, i], flow[w, j]
        change += cube(excess[w, to] + half - own)
        if heir == source:
            change += cube(excess[w, source] - half + own)
        else:
            change += cube(excess[w, source] - half) + cube(excess[w, heir] + own)
    return change


@kernel
def _even_copy_change(i, j, loads, slots, num_local, nxt, part, excess, heat, trial, touched):
    """Change of the objective if slot j becomes one more replica of slot i's expert, shares staying even."""
    a, b = slots[i], slots[j]
    more, fewer = 1.0 / (1.0 / part[i] + 1.0), 1.0 / (1.0 / part[j] - 1.0)
    num_windows = loads.shape[0]
    size = 0
    for start, expert, new in ((i, a, more), (j, b, fewer)):
        other = start
        while True:
            rank = other // num_local
            at = -1
            for t in range(size):
                if touched[t] == rank:
                    at = t
            if at < 0:
                at = size
                size += 1
                touched[at] = rank
                trial[:, at] = excess[:, rank]
            for w in range(num_windows):
                if expert == b and other == j:
                    trial[w, at] += loads[w, a] * more - loads[w, b] * part[j]
                else:
                    trial[w, at] += loads[w, expert] * (new - part[other])
            other = nxt[other]
            if other == start:
                break
    change = 0.0
    for t in range(size):
        change -= heat[touched[t]]
        for w in range(num_windows):
            change += cube(trial[w, t])
    return change


@kernel
def _swap_changes(i, source, num_local, flow, excess, change):
    """Fill ``change [P]``: the objective of both ranks after slot i's load is exchanged with each slot's."""
    num_slots = change.shape[0]
    change[:] = 0.0
    for w in range(flow.shape[0]):
        mine = flow[w, i]
        here = excess[w, source] - mine
        for j in range(num_slots):
            theirs = flow[w, j]
            u = max(here + theirs, 0.0)
            v = max(excess[w, j // num_local] + mine - theirs, 0.0)
            change[j] += u * u * u + v * v * v


@kernel
def _best_operation(
    anchor, kinds, free, loads, slots, num_local, even, nxt, part, flow, excess, heat, holds, at_first,
    change, trial, touched, least,
):  # fmt: skip
    """The operation at slots of rank ``anchor`` that lowers the objective most per moved slot: (kind, i, j)."""
    num_slots = slots.shape[0]
    best, best_kind, best_i, best_j = 0.0, -1, -1, -1
    for i in range(anchor * num_local, (anchor + 1) * num_local):
        a = slots[i]
        _swap_changes(i, anchor, num_local, flow, excess, change)
        for j in range(num_slots):
            to = j // num_local
            if to == anchor or holds[to, a]:
                continue
            gain = heat[anchor] + heat[to] - change[j]
            if gain > least and gain > 0.5 * best and not holds[anchor, slots[j]]:
                cost = 1.0 if free else max(0.5, float(operation_cost(SWAP, i, j, slots, num_local, at_first)))
                if kinds[i] != kinds[j]:
                    cost *= 2.0
                if gain > best * cost:
                    best, best_kind, best_i, best_j = gain / cost, SWAP, i, j
            if even and nxt[i] != i and kinds[i] == kinds[i] and not holds[anchor, slots[j]]:
                gain = -_even_copy_change(
                    j, i, loads, slots, num_local, nxt, part, excess, heat, trial, touched
                )
                if gain > least and gain > 0.5 * best:
                    cost = 1.0 if free else max(0.5, float(operation_cost(COPY, j, i, slots, num_local, at_first)))
                    if gain > best * cost:
                        best, best_kind, best_i, best_j = gain / cost, COPY, j, i
            if nxt[j] == j:
                continue
            if even:
                gain = -_even_copy_change(
                    i, j, loads, slots, num_local, nxt, part, excess, heat, trial, touched
                )
            else:
                gain = -_copy_change(i, j, num_local, nxt, flow, excess, heat)
            if gain > least and gain > 0.5 * best:
                cost = 1.0 if free else max(0.5, float(operation_cost(COPY, i, j, slots, num_local, at_first)))
                if kinds[j] == 0:
                    cost *= 2.0
                if gain > best * cost:
                    best, best_kind, best_i, best_j = gain / cost, COPY, i, j
    return best_kind, best_i, best_j


@kernel
def _apply(kind, i, j, slots, num_local, even, nxt, part, heat):
    """Carry out an operation on slots, rings and shares."""
    if kind == SWAP:
        swap_links(nxt, i, j)
        slots[i], slots[j] = slots[j], slots[i]
        part[i], part[j] = part[j], part[i]
        return
    if not even:
        part[_coolest(j, nxt, num_local, heat)] += part[j]
        part[i] *= 0.5
        part[j] = part[i]
    else:
        fewer, more = 1.0 / (1.0 / part[j] - 1.0), 1.0 / (1.0 / part[i] + 1.0)
        other = nxt[j]
        while other != j:
            part[other] = fewer
            other = nxt[other]
        other = i
        while True:
            part[other] = more
            other = nxt[other]
            if other == i:
                break
        part[j] = more
    unlink(nxt, j)
    slots[j] = slots[i]
    nxt[j] = nxt[i]
    nxt[i] = j


@kernel
def _expected(weights, means, excess):
    """Mean over windows, by weight, of mean / hottest rank load."""
    total, weight = 0.0, 0.0
    for w in range(excess.shape[0]):
        if means[w] > 0.0:
            top = 0.0
            for rank in range(excess.shape[1]):
                top = max(top, excess[w, rank])
            total += weights[w] * means[w] / (means[w] + top)
            weight += weights[w]
    return total / weight if weight > 0.0 else 1.0


@kernel
def scale_windows(loads, weights, num_ranks, means):
    """Scale ``loads [W, E]`` in place to a mean rank load of ``weight ** (1/3)``, which fills ``means [W]``."""
    for w in range(loads.shape[0]):
        total = loads[w].sum()
        means[w] = weights[w] ** (1.0 / 3.0) if total > 0.0 else 0.0
        if total > 0.0:
            loads[w] *= means[w] * num_ranks / total


@kernel
def joint_path(
    loads, weights, slots, kinds, num_ranks, even, max_cost, sweeps, operations, costs, values, lengths
):
    """Search layers ``loads [L, W, E]`` from ``slots [L, P]``, which end as the last placement of the path.

    Args:
        weights: ``[L, W]`` of the windows, summing to 1 a layer.
        kinds: ``[L, P]`` 0 marks primaries (every expert once), 1 replicas; operations that mix them must gain
            twice as much. All equal: no difference is made.
        even: shares stay even; else they are moved (``sweeps`` rounds after each operation).
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
    trial, touched = np.empty((num_windows, num_ranks)), np.empty(num_ranks, dtype=np.int64)
    for layer in range(num_layers):
        row = slots[layer]
        work = loads[layer].copy()
        scale_windows(work, weights[layer], num_ranks, means)
        link_replicas(row, num_experts, nxt)
        even_parts(row, num_experts, part)
        carry(work, row, num_local, part, means, flow, excess, heat)
        fill_holds(row, num_local, at_first)
        holds[:] = at_first
        if not even:
            spread(work, row, num_local, nxt, part, flow, excess, heat, 4 * sweeps, 1e-9)
        step = 0
        costs[layer, 0] = 0
        values[layer, 0] = _expected(weights[layer], means, excess)
        while step < operations.shape[1] and (max_cost < 0 or costs[layer, step] < max_cost):
            total = heat.sum()
            if total <= 1e-9:
                break
            kind, i, j = -1, -1, -1
            for anchor in np.argsort(-heat, kind="mergesort")[:ANCHORS]:
                kind, i, j = _best_operation(
                    anchor, kinds[layer], max_cost < 0, work, row, num_local, even, nxt, part, flow, excess,
                    heat, holds, at_first, change, trial, touched, total * 1e-4,
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
            _apply(kind, i, j, row, num_local, even, nxt, part, heat)
            carry(work, row, num_local, part, means, flow, excess, heat)
            if not even:
                spread(work, row, num_local, nxt, part, flow, excess, heat, sweeps, 1e-9)
            operations[layer, step, 0], operations[layer, step, 1], operations[layer, step, 2] = kind, i, j
            step += 1
            values[layer, step] = _expected(weights[layer], means, excess)
        lengths[layer] = step


@kernel
def joint_shares(loads, weights, slots, num_ranks, even, sweeps, part, values):
    """Shares ``part [L, P]`` of ``slots [L, P]`` for windows ``loads [L, W, E]``; values ``[L]``: expected balancedness."""
    num_layers, num_slots = slots.shape
    num_windows, num_experts = loads.shape[1], loads.shape[2]
    num_local = num_slots // num_ranks
    nxt = np.empty(num_slots, dtype=np.int64)
    flow, excess = np.empty((num_windows, num_slots)), np.empty((num_windows, num_ranks))
    heat, means = np.empty(num_ranks), np.empty(num_windows)
    for layer in range(num_layers):
        work = loads[layer].copy()
        scale_windows(work, weights[layer], num_ranks, means)
        link_replicas(slots[layer], num_experts, nxt)
        even_parts(slots[layer], num_experts, part[layer])
        carry(work, slots[layer], num_local, part[layer], means, flow, excess, heat)
        if not even:
            spread(work, slots[layer], num_local, nxt, part[layer], flow, excess, heat, sweeps, 1e-10)
        values[layer] = _expected(weights[layer], means, excess)
