"""Kernels of the objective of joint planning, and of shares that lower it.

The objective of a layer is ``sum over (window, rank) of weight * max(load - 1, 0) ** 3``, loads scaled so that a
mean rank is 1. It is convex in the shares, smooth, and close to the sum of the hottest ranks. Weights are folded
into the loads: with ``x * weight ** (1 / 3)`` a window's excess over ``weight ** (1 / 3)`` cubes to its part.

Arrays of one layer: ``loads [W, E]`` (scaled, weighted), ``slots [P]``, ``nxt [P]`` (ring of an expert's replicas),
``part [P]`` (share in [0, 1]), ``flow [W, P]`` (load a slot carries), ``excess [W, R]``, ``heat [R]`` (a rank's part
of the objective).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.flow import link_replicas, round_shares

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
def expected(weights, means, level, excess):
    """Mean over windows, by weight, of mean / hottest rank load; ``excess`` is over ``level`` x mean."""
    total, weight = 0.0, 0.0
    for w in range(excess.shape[0]):
        if means[w] > 0.0:
            top = means[w] * (1.0 - level)
            for rank in range(excess.shape[1]):
                top = max(top, excess[w, rank])
            total += weights[w] * means[w] / (means[w] * level + top)
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
def joint_shares(loads, weights, slots, num_ranks, even, level, sweeps, part, values):
    """Shares ``part [L, P]`` of ``slots [L, P]`` for ``loads [L, W, E]``; values ``[L]``: expected balancedness."""
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
        carry(work, slots[layer], num_local, part[layer], means * level, flow, excess, heat)
        if not even:
            spread(work, slots[layer], num_local, nxt, part[layer], flow, excess, heat, sweeps, 1e-9)
        values[layer] = expected(weights[layer], means, level, excess)


@kernel
def round_parts(slots, num_experts, part, shares):
    """Shares ``[L, P]`` of 65535 an expert from ``part [L, P]``, by largest remainder."""
    nxt = np.empty(slots.shape[1], dtype=np.int64)
    ones = np.ones(num_experts)
    for layer in range(slots.shape[0]):
        link_replicas(slots[layer], num_experts, nxt)
        round_shares(ones, slots[layer], nxt, part[layer], shares[layer])
