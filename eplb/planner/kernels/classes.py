"""Which replicas a small batch uses: few experts touched on the rank that takes longest, compiled."""

from __future__ import annotations

import numpy as np

from evenroute.eplb._compiled import kernel

_MOST_PATHS = 64  # chains of moves tried, in ranks


@kernel
def replica_time(tokens, expert_us, token_us):  # type: ignore[no-untyped-def]
    """Expected time of a replica: its weights if a token comes (Poisson), or its tokens if they take longer."""
    return max(expert_us * (1.0 - np.exp(-tokens)), token_us * tokens)


@kernel
def _replicas(slots, num_experts):  # type: ignore[no-untyped-def]
    """CSR of an expert's slots: (offset [E + 1], slot [P])."""
    offset = np.zeros(num_experts + 1, np.int64)
    for p in range(len(slots)):
        offset[slots[p] + 1] += 1
    for e in range(num_experts):
        offset[e + 1] += offset[e]
    place, entry = offset.copy(), np.empty(len(slots), np.int64)
    for p in range(len(slots)):
        entry[place[slots[p]]] = p
        place[slots[p]] += 1
    return offset, entry


@kernel
def _path(start, most, slots, times, used, load, offset, entry, local):  # type: ignore[no-untyped-def]
    """Take an expert off rank `start` along the shortest chain of moves that leaves every rank on it below `most`.

    A move goes from a used replica to an unused one of the same expert. Breadth first over ranks; True if found.
    """
    ranks = len(load)
    came_from = np.full(ranks, -1, np.int64)  # slot given up on the rank before
    came_to = np.full(ranks, -1, np.int64)  # slot taken up here
    queue = np.empty(ranks, np.int64)
    queue[0], head, tail = start, 0, 1
    while head < tail:
        rank = queue[head]
        head += 1
        brought = 0.0 if rank == start else times[slots[came_to[rank]]]
        for p in range(rank * local, (rank + 1) * local):
            if not used[p] or (rank != start and load[rank] + brought - times[slots[p]] >= most):
                continue
            e = slots[p]
            for i in range(offset[e], offset[e + 1]):
                q = entry[i]
                other = q // local
                if used[q] or other == start or came_to[other] >= 0:
                    continue
                came_from[other], came_to[other] = p, q
                if load[other] + times[e] < most:
                    while other != start:
                        give, take = came_from[other], came_to[other]
                        used[give], used[take] = False, True
                        load[other] += times[slots[take]]
                        other = give // local
                        load[other] -= times[slots[give]]
                    return True
                queue[tail] = other
                tail += 1
    return False


@kernel
def choose_replicas(slots, tokens, ranks, expert_us, token_us, used):  # type: ignore[no-untyped-def]
    """Fill `used` [P] for a layer's slots [P] and expected tokens [E]; the longest rank's expected time.

    An expert uses `max(1, ceil(b n / a))` of its replicas, evenly. Those with the least choice come first, then the
    longest, each to the ranks with the least time so far; then experts leave the longest rank while that helps.
    """
    num_experts, local = len(tokens), len(slots) // ranks
    offset, entry = _replicas(slots, num_experts)
    wanted = np.empty(num_experts, np.int64)
    times = np.empty(num_experts)  # of one used replica
    freedom = np.empty(num_experts)
    for e in range(num_experts):
        most = offset[e + 1] - offset[e]
        wanted[e] = min(most, max(1, int(np.ceil(token_us * tokens[e] / expert_us))))
        times[e] = replica_time(tokens[e] / wanted[e], expert_us, token_us)
        freedom[e] = most - wanted[e]
    load = np.zeros(ranks)
    used[:] = False
    longest_first = np.argsort(-times, kind="mergesort")
    for e in longest_first[np.argsort(freedom[longest_first], kind="mergesort")]:
        for _ in range(wanted[e]):
            best = -1
            for i in range(offset[e], offset[e + 1]):
                p = entry[i]
                if not used[p] and (best < 0 or load[p // local] < load[best // local]):
                    best = p
            used[best] = True
            load[best // local] += times[e]
    for _ in range(_MOST_PATHS * ranks):
        start = int(np.argmax(load))
        if not _path(start, load[start] * (1 - 1e-9), slots, times, used, load, offset, entry, local):
            break
    return load.max()
