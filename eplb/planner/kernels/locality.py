"""Kernel that exchanges ranks and slots between nodes so that fewer tokens cross."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.moves import fill_holds


@kernel
def _stay(slot_node, expert, share, by_node):
    """Load of an expert's slot that comes from its own node."""
    return by_node[slot_node, expert] * share


@kernel
def _exchange(row, shares, sizes, i, j):
    row[i], row[j] = row[j], row[i]
    shares[i], shares[j] = shares[j], shares[i]
    sizes[i], sizes[j] = sizes[j], sizes[i]


@kernel
def _best_rank_swap(row, shares, by_node, num_ranks, num_nodes, num_local):
    """Pair of ranks on different nodes whose exchange keeps most; its gain."""
    per_node = num_ranks // num_nodes
    stays = np.zeros((num_ranks, num_nodes))
    for slot in range(row.shape[0]):
        for node in range(num_nodes):
            stays[slot // num_local, node] += _stay(node, row[slot], shares[slot], by_node)
    best, a, b = 0.0, -1, -1
    for first in range(num_ranks):
        for second in range((first // per_node + 1) * per_node, num_ranks):
            here, there = first // per_node, second // per_node
            gain = stays[first, there] + stays[second, here] - stays[first, here] - stays[second, there]
            if gain > best:
                best, a, b = gain, first, second
    return best, a, b


@kernel
def _best_slot_swap(row, shares, sizes, by_node, load, limit, holds, num_local, slots_per_node):
    """Pair of slots on different nodes whose exchange keeps most and makes no rank hotter than ``limit``."""
    best, a, b = 0.0, -1, -1
    for i in range(row.shape[0]):
        node, rank = i // slots_per_node, i // num_local
        for j in range((node + 1) * slots_per_node, row.shape[0]):
            to_node, to = j // slots_per_node, j // num_local
            gain = shares[i] * (by_node[to_node, row[i]] - by_node[node, row[i]])
            gain += shares[j] * (by_node[node, row[j]] - by_node[to_node, row[j]])
            if gain <= best or holds[to, row[i]] or holds[rank, row[j]]:
                continue
            shift = sizes[i] - sizes[j]
            if load[rank] - shift <= limit and load[to] + shift <= limit:
                best, a, b = gain, i, j
    return best, a, b


@kernel
def swap_towards_sources(rows, shares, sizes, by_node, num_ranks, num_nodes, slack):
    """Change ``rows``, ``shares``, ``sizes`` ``[L, P]`` in place; by_node: ``[L, N, E]`` loads by source node."""
    num_layers, num_slots = rows.shape
    num_local, slots_per_node = num_slots // num_ranks, num_slots // num_nodes
    holds = np.empty((num_ranks, by_node.shape[2]), dtype=np.bool_)
    load = np.empty(num_ranks)
    for layer in range(num_layers):
        row, share, size = rows[layer], shares[layer].astype(np.float64), sizes[layer]
        tiny = by_node[layer].sum() * 65535.0 * 1e-9
        for _ in range(num_ranks * num_ranks):
            gain, a, b = _best_rank_swap(row, share, by_node[layer], num_ranks, num_nodes, num_local)
            if gain <= tiny:
                break
            for k in range(num_local):
                _exchange(row, share, size, a * num_local + k, b * num_local + k)
        fill_holds(row, num_local, holds)
        load[:] = 0.0
        for slot in range(num_slots):
            load[slot // num_local] += size[slot]
        limit = load.max() * (1.0 + slack)
        for _ in range(num_slots):
            gain, a, b = _best_slot_swap(
                row, share, size, by_node[layer], load, limit, holds, num_local, slots_per_node
            )
            if gain <= tiny:
                break
            rank, to = a // num_local, b // num_local
            holds[rank, row[a]], holds[rank, row[b]] = False, True
            holds[to, row[b]], holds[to, row[a]] = False, True
            load[rank] += size[b] - size[a]
            load[to] += size[a] - size[b]
            _exchange(row, share, size, a, b)
        shares[layer] = share.astype(np.uint16)
