"""Kernels of exact uneven shares: push load between replicas until the hottest rank is as cool as can be.

Ranks are nodes; a rank can hand load to every other rank that holds a replica of an expert it serves. The
lowest possible maximum T is found by Newton's method on cuts: push all load above T along augmenting paths;
where some is left, the ranks it can reach form a closed set S, whose mean load bounds T from below and is its
next value. Arrays of one layer: ``nxt [P]`` links the replicas of an expert in a ring, ``flow [P]`` is the load
a slot carries, ``load [R]`` that of a rank.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel

TOLERANCE = 1e-12


@kernel
def link_replicas(slots, num_experts, nxt):
    """Fill ``nxt [P]``: the next slot, in a ring, that holds the same expert."""
    first = np.full(num_experts, -1, dtype=np.int64)
    for slot in range(slots.shape[0]):
        expert = slots[slot]
        if first[expert] < 0:
            first[expert] = slot
            nxt[slot] = slot
        else:
            nxt[slot] = nxt[first[expert]]
            nxt[first[expert]] = slot


@kernel
def even_flow(loads, slots, num_local, flow, load):
    """Fill ``flow [P]`` and ``load [R]`` for loads ``[E]`` divided evenly over replicas."""
    counts = np.zeros(loads.shape[0], dtype=np.int64)
    for expert in slots:
        counts[expert] += 1
    load[:] = 0.0
    for slot in range(slots.shape[0]):
        flow[slot] = loads[slots[slot]] / counts[slots[slot]]
        load[slot // num_local] += flow[slot]


@kernel
def push_excess(level, tolerance, num_local, rank_of, nxt, flow, load, seen, from_slot, queue):
    """Push load above ``level`` to ranks below it along shortest augmenting paths; returns what is left.

    Afterwards ``seen [R]`` marks the ranks that the remaining excess can reach. ``rank_of [P]`` are the ranks of slots;
    ``from_slot [R]`` (the slot a rank was reached from) and ``queue [R]`` are scratch. A path's receiving slot is found
    through the ring.
    """
    num_ranks = load.shape[0]
    while True:
        tail = 0
        for rank in range(num_ranks):
            hot = load[rank] > level + tolerance
            seen[rank] = hot
            if hot:
                from_slot[rank] = -1
                queue[tail] = rank
                tail += 1
        if tail == 0:
            return 0.0
        head, sink = 0, -1
        while head < tail and sink < 0:
            rank = queue[head]
            head += 1
            for slot in range(rank * num_local, (rank + 1) * num_local):
                if flow[slot] <= tolerance:
                    continue
                other = nxt[slot]
                while other != slot:
                    to = rank_of[other]
                    if not seen[to]:
                        seen[to] = True
                        from_slot[to] = slot
                        if load[to] < level - tolerance:
                            sink = to
                            break
                        queue[tail] = to
                        tail += 1
                    other = nxt[other]
                if sink >= 0:
                    break
        if sink < 0:
            excess = 0.0
            for rank in range(num_ranks):
                if load[rank] > level:
                    excess += load[rank] - level
            return excess
        amount = level - load[sink]
        rank = sink
        while from_slot[rank] >= 0:
            amount = min(amount, flow[from_slot[rank]])
            rank = rank_of[from_slot[rank]]
        amount = min(amount, load[rank] - level)
        load[rank] -= amount
        load[sink] += amount
        rank = sink
        while from_slot[rank] >= 0:
            slot = from_slot[rank]
            other = nxt[slot]
            while rank_of[other] != rank:
                other = nxt[other]
            flow[slot] -= amount
            flow[other] += amount
            rank = rank_of[slot]


@kernel
def lowest_level(level, tolerance, num_local, rank_of, nxt, flow, load, seen, from_slot, queue):
    """Raise ``level`` (a lower bound) until all load fits below it; returns that exact optimum."""
    while True:
        excess = push_excess(level, tolerance, num_local, rank_of, nxt, flow, load, seen, from_slot, queue)
        if excess <= 0.0:
            return level
        total, count = 0.0, 0
        for rank in range(load.shape[0]):
            if seen[rank]:
                total += load[rank]
                count += 1
        level = max(total / count, level + tolerance)


@kernel
def round_shares(loads, slots, nxt, flow, shares):
    """Fill ``shares [P] uint16`` from ``flow [P]``: 65535 an expert, by largest remainder, low slots first."""
    done = np.zeros(slots.shape[0], dtype=np.bool_)
    remainder = np.empty(slots.shape[0])
    for slot in range(slots.shape[0]):
        if done[slot]:
            continue
        total, count = 0.0, 0
        other = slot
        while True:
            total += flow[other]
            count += 1
            other = nxt[other]
            if other == slot:
                break
        left = 65535
        while True:
            # An expert without load is divided evenly: a later load must not go to one replica alone.
            exact = 65535.0 * flow[other] / total if loads[slots[slot]] > 0.0 else 65535.0 / count
            shares[other] = int(min(exact, 65535.0))
            remainder[other] = exact - shares[other]
            left -= shares[other]
            done[other] = True
            other = nxt[other]
            if other == slot:
                break
        while left > 0:
            best = other
            while True:
                more = remainder[other] - remainder[best]
                if more > 1e-9 or (more >= -1e-9 and other < best):
                    best = other
                other = nxt[other]
                if other == slot:
                    break
            shares[best] += 1
            remainder[best] -= 1.0
            left -= 1


@kernel
def solve_shares(loads, slots, num_ranks, shares, levels):
    """Exact shares of layers ``loads [L, E]``, ``slots [L, P]`` -> ``shares [L, P]``, ``levels [L]`` (max load)."""
    num_layers, num_slots = slots.shape
    num_local = num_slots // num_ranks
    nxt = np.empty(num_slots, dtype=np.int64)
    flow, load = np.empty(num_slots), np.empty(num_ranks)
    seen = np.empty(num_ranks, dtype=np.bool_)
    from_slot = np.empty(num_ranks, dtype=np.int64)
    queue = np.empty(num_ranks, dtype=np.int64)
    rank_of = np.arange(num_slots) // num_local
    for layer in range(num_layers):
        link_replicas(slots[layer], loads.shape[1], nxt)
        even_flow(loads[layer], slots[layer], num_local, flow, load)
        mean = load.mean()
        levels[layer] = lowest_level(
            mean, mean * TOLERANCE, num_local, rank_of, nxt, flow, load, seen, from_slot, queue
        )
        round_shares(loads[layer], slots[layer], nxt, flow, shares[layer])
