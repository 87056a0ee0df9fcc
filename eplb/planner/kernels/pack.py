"""Kernels of a full plan: how many replicas an expert gets, and which rank each of them goes to."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.two_modes import two_mode_pack


@kernel
def _sift_down(heap, size, start, key):
    """Restore a heap of experts: largest key on top, lowest id first among equals."""
    at = start
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        right = child + 1
        if right < size:
            a, b = heap[child], heap[right]
            if key[b] > key[a] or (key[b] == key[a] and b < a):
                child = right
        a, b = heap[at], heap[child]
        if key[a] > key[b] or (key[a] == key[b] and a < b):
            return
        heap[at], heap[child] = b, a
        at = child


@kernel
def replicate(loads, num_slots, max_replicas, counts):
    """Fill ``counts [E]``: every expert one slot, each further one to the largest load per replica."""
    num_experts = loads.shape[0]
    key = loads.copy()
    heap = np.arange(num_experts)
    counts[:] = 1
    for start in range(num_experts // 2 - 1, -1, -1):
        _sift_down(heap, num_experts, start, key)
    for _ in range(num_slots - num_experts):
        expert = heap[0]
        counts[expert] += 1
        key[expert] = loads[expert] / counts[expert] if counts[expert] < max_replicas else -1.0
        _sift_down(heap, num_experts, 0, key)


@kernel
def _make_room(expert, slots, used, holds, rank_load, slot_load, num_local):
    """All ranks with room hold ``expert``: move something of a full rank there, and take its place.

    Such a slot exists: the full rank holds P / R experts, the other at most P / R - 1, one of them ``expert``.
    Returns the rank that now has room.
    """
    best_rank, best_slot, best_to, best_load = -1, -1, -1, np.inf
    for rank in range(used.shape[0]):
        if used[rank] < num_local or holds[rank, expert]:
            continue
        for slot in range(rank * num_local, (rank + 1) * num_local):
            for to in range(used.shape[0]):
                if used[to] == num_local or holds[to, slots[slot]]:
                    continue
                gap = abs(rank_load[to] + slot_load[slot] - rank_load[rank])
                if gap < best_load:
                    best_rank, best_slot, best_to, best_load = rank, slot, to, gap
    moved, load = slots[best_slot], slot_load[best_slot]
    free = best_to * num_local + used[best_to]
    slots[free], slot_load[free] = moved, load
    used[best_to] += 1
    holds[best_to, moved] = True
    rank_load[best_to] += load
    last = best_rank * num_local + used[best_rank] - 1
    slots[best_slot], slot_load[best_slot] = slots[last], slot_load[last]
    used[best_rank] -= 1
    holds[best_rank, moved] = False
    rank_load[best_rank] -= load
    return best_rank


@kernel
def pack(loads, counts, num_local, slots, slot_load, holds, rank_load):
    """Place replicas, heaviest first, on the lightest rank that has room and not this expert.

    Args:
        loads, counts: ``[E]``.
        num_local: slots of a rank.
        slots, slot_load: out ``[P]``; holds: out ``[R, E]``; rank_load: out ``[R]``.
    """
    num_ranks = rank_load.shape[0]
    used = np.zeros(num_ranks, dtype=np.int64)
    holds[:] = False
    rank_load[:] = 0.0
    order = np.argsort(-(loads / counts), kind="mergesort")
    for expert in order:
        load = loads[expert] / counts[expert]
        for _ in range(counts[expert]):
            best = -1
            for rank in range(num_ranks):
                if used[rank] < num_local and not holds[rank, expert]:  # noqa: SIM102
                    if best < 0 or rank_load[rank] < rank_load[best]:
                        best = rank
            if best < 0:
                best = _make_room(expert, slots, used, holds, rank_load, slot_load, num_local)
            slot = best * num_local + used[best]
            slots[slot], slot_load[slot] = expert, load
            used[best] += 1
            holds[best, expert] = True
            rank_load[best] += load


@kernel
def swap_refine(num_local, slots, slot_load, kinds, holds, rank_load, max_swaps):
    """Swap slots of the hottest rank with those of colder ones while the hotter of the two gets cooler.

    Each round takes the swap that leaves the pair's maximum lowest; only slots of one kind are swapped. Returns the
    number of swaps.
    """
    num_ranks = rank_load.shape[0]
    mean = rank_load.mean()
    for done in range(max_swaps):
        hot = 0
        for rank in range(1, num_ranks):
            if rank_load[rank] > rank_load[hot]:
                hot = rank
        if rank_load[hot] <= mean * (1.0 + 1e-7):
            return done
        best_gain, best_i, best_j, best_rank = rank_load[hot] * 1e-9, -1, -1, -1
        for rank in range(num_ranks):
            gap = rank_load[hot] - rank_load[rank]
            if gap * 0.5 <= best_gain:
                continue
            for i in range(hot * num_local, (hot + 1) * num_local):
                if slot_load[i] <= best_gain or holds[rank, slots[i]]:
                    continue
                for j in range(rank * num_local, (rank + 1) * num_local):
                    shift = slot_load[i] - slot_load[j]
                    gain = min(shift, gap - shift)
                    if gain > best_gain and kinds[i] == kinds[j] and not holds[hot, slots[j]]:
                        best_gain, best_i, best_j, best_rank = gain, i, j, rank
        if best_i < 0:
            return done
        a, b = slots[best_i], slots[best_j]
        shift = slot_load[best_i] - slot_load[best_j]
        slots[best_i], slots[best_j] = b, a
        slot_load[best_i], slot_load[best_j] = slot_load[best_j], slot_load[best_i]
        holds[hot, a], holds[hot, b] = False, True
        holds[best_rank, a], holds[best_rank, b] = True, False
        rank_load[hot] -= shift
        rank_load[best_rank] += shift
    return max_swaps


@kernel
def _plan_pool(loads, num_ranks, num_local, refine, slots, rank_load):
    """Full plan of one pool of ranks that share experts ``loads [E]`` -> ``slots [R * num_local]``."""
    counts = np.empty(loads.shape[0], dtype=np.int64)
    slot_load = np.empty(num_ranks * num_local)
    holds = np.empty((num_ranks, loads.shape[0]), dtype=np.bool_)
    kinds = np.zeros(slots.shape[0], dtype=np.int8)
    replicate(loads, num_ranks * num_local, num_ranks, counts)
    if not refine:
        pack(loads, counts, num_local, slots, slot_load, holds, rank_load)
        return
    two_mode_pack(loads, counts, num_local, slots, slot_load, kinds, holds, rank_load)
    swap_refine(num_local, slots, slot_load, kinds, holds, rank_load, 8 * slots.shape[0])


@kernel
def full_plan(loads, num_ranks, num_slots, num_groups, num_nodes, refine, out):
    """Full plan of layers ``loads [L, E]`` -> ``out [L, P]``; groups of experts stay on a node.

    The global plan is the one with one group and one node.
    """
    num_layers, num_experts = loads.shape
    group_size = num_experts // num_groups
    groups_per_node = num_groups // num_nodes
    slots_per_node, ranks_per_node = num_slots // num_nodes, num_ranks // num_nodes
    one_each = np.ones(num_groups, dtype=np.int64)
    all_alike = np.zeros(num_groups, dtype=np.int8)
    node_groups = np.empty(num_groups, dtype=np.int32)
    group_slot_load = np.empty(num_groups)
    node_holds = np.empty((num_nodes, num_groups), dtype=np.bool_)
    node_load = np.empty(num_nodes)
    experts = np.empty(groups_per_node * group_size, dtype=np.int32)
    rank_load = np.empty(ranks_per_node)
    for layer in range(num_layers):
        if num_nodes == 1:
            _plan_pool(loads[layer], num_ranks, num_slots // num_ranks, refine, out[layer], rank_load)
            continue
        group_load = loads[layer].reshape(num_groups, group_size).sum(axis=1)
        pack(group_load, one_each, groups_per_node, node_groups, group_slot_load, node_holds, node_load)
        if refine:
            swap_refine(
                groups_per_node,
                node_groups,
                group_slot_load,
                all_alike,
                node_holds,
                node_load,
                8 * num_groups,
            )
        for node in range(num_nodes):
            mine = np.sort(node_groups[node * groups_per_node : (node + 1) * groups_per_node])
            for k in range(groups_per_node):
                for j in range(group_size):
                    experts[k * group_size + j] = mine[k] * group_size + j
            local = out[layer, node * slots_per_node : (node + 1) * slots_per_node]
            num_local = slots_per_node // ranks_per_node
            _plan_pool(loads[layer][experts], ranks_per_node, num_local, refine, local, rank_load)
            for slot in range(slots_per_node):
                local[slot] = experts[local[slot]]
