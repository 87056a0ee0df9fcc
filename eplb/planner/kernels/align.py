"""Kernels that lay a new plan over the placement in use, so that as few slots as possible change rank."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel


@kernel
def keep_places(old, new, num_local, num_experts):
    """Reorder ``new [P]`` within its ranks, in place: an expert that stays on a rank keeps its slot."""
    place = np.full(num_experts, -1, dtype=np.int64)
    wanted = np.zeros(num_experts, dtype=np.bool_)
    row = np.empty(num_local, dtype=np.int32)
    for first in range(0, new.shape[0], num_local):
        for slot in range(first, first + num_local):
            wanted[new[slot]] = True
        for i in range(num_local):
            expert = old[first + i]
            row[i] = -1
            if wanted[expert]:
                row[i] = expert
                place[expert] = i
        rest = np.sort(new[first : first + num_local])
        i = 0
        for expert in rest:
            wanted[expert] = False
            if place[expert] < 0:
                while row[i] >= 0:
                    i += 1
                row[i] = expert
            place[expert] = -1
        new[first : first + num_local] = row


@kernel
def relabel(old, new, num_local, num_experts, blocks):
    """Rename the blocks of ``new [P]``, in place, to keep much of ``old``: largest overlap first.

    A block is a rank or a node, ``P // blocks`` slots; renaming it changes no load.
    """
    size = new.shape[0] // blocks
    holds = np.zeros((blocks, num_experts), dtype=np.int64)
    for slot in range(old.shape[0]):
        holds[slot // size, old[slot]] += 1
    overlap = np.zeros((blocks, blocks), dtype=np.int64)  # [old block, new block]
    for slot in range(new.shape[0]):
        for block in range(blocks):
            if holds[block, new[slot]] > 0:
                overlap[block, slot // size] += 1
    source = np.full(blocks, -1, dtype=np.int64)
    taken = np.zeros(blocks, dtype=np.bool_)
    for value in range(size, -1, -1):
        for block in range(blocks):
            if source[block] >= 0:
                continue
            for candidate in range(blocks):
                if not taken[candidate] and overlap[block, candidate] >= value:
                    source[block] = candidate
                    taken[candidate] = True
                    break
    copy = new.copy()
    for block in range(blocks):
        new[block * size : (block + 1) * size] = copy[source[block] * size : (source[block] + 1) * size]


@kernel
def align(old, new, num_ranks, num_nodes, num_experts, cross_nodes):
    """Lay ``new [L, P]`` over ``old [L, P]``, in place; without ``cross_nodes`` a node keeps its ranks."""
    num_layers, num_slots = new.shape
    num_local = num_slots // num_ranks
    per_node = num_slots // num_nodes
    for layer in range(num_layers):
        if cross_nodes:
            relabel(old[layer], new[layer], num_local, num_experts, num_ranks)
        else:
            relabel(old[layer], new[layer], num_local, num_experts, num_nodes)
            for first in range(0, num_slots, per_node):
                part = slice(first, first + per_node)
                relabel(old[layer, part], new[layer, part], num_local, num_experts, num_ranks // num_nodes)
        keep_places(old[layer], new[layer], num_local, num_experts)
