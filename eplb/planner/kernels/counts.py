"""Kernel that tries further replica counts where the greedy ones pack badly, as they do on skewed or tight loads.

Greedy counts make the largest load per replica as small as it can be, which says nothing about how the pieces fit on
ranks. So experts are capped at ``ceil(load / level)`` replicas for a row of levels, from the greedy largest piece up to
a mean rank's load; slots left over then go to the coldest experts.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel
from evenroute.eplb.planner.kernels.pack import pack, swap_refine
from evenroute.eplb.planner.kernels.two_modes import two_mode_pack

LEVELS = 16
PREFER_TWO_MODES = 5e-4  # balancedness that the two-mode layout is worth


@kernel
def capped_counts(loads, level, to_coldest, num_slots, max_replicas, counts):
    """Fill ``counts [E]``: largest load per replica first, while above ``level``.

    What is left goes to the coldest experts, or to the largest load per replica among those below the level.
    """
    num_experts = loads.shape[0]
    counts[:] = 1
    left = num_slots - num_experts
    order = np.argsort(loads, kind="mergesort")
    key = loads.copy()
    for expert in range(num_experts):
        if key[expert] <= level * (1.0 + 1e-9) or max_replicas == 1:
            key[expert] = -1.0
    while left > 0:
        expert = int(np.argmax(key))
        if key[expert] < 0.0:
            break
        counts[expert] += 1
        left -= 1
        key[expert] = loads[expert] / counts[expert]
        if counts[expert] == max_replicas or key[expert] <= level * (1.0 + 1e-9):
            key[expert] = -1.0
    if not to_coldest:
        for expert in range(num_experts):
            key[expert] = loads[expert] if counts[expert] == 1 and max_replicas > 1 else -1.0
        while left > 0:
            expert = int(np.argmax(key))
            if key[expert] < 0.0:
                break
            counts[expert] += 1
            left -= 1
            key[expert] = loads[expert] / counts[expert] if counts[expert] < max_replicas else -1.0
    while left > 0:
        for expert in order:
            if left > 0 and counts[expert] < max_replicas:
                counts[expert] += 1
                left -= 1


@kernel
def try_counts(loads, num_ranks, enough, rows):
    """Replace rows of ``rows [L, P]`` of layers ``loads [L, E]`` where other counts do better.

    A layer whose balancedness is ``enough`` is left unchanged.
    """
    num_layers, num_slots = rows.shape
    num_experts, num_local = loads.shape[1], num_slots // num_ranks
    counts = np.empty(num_experts, dtype=np.int64)
    slots, slot_load = np.empty(num_slots, dtype=np.int32), np.empty(num_slots)
    kind = np.zeros(num_slots, dtype=np.int8)
    holds, rank_load = np.empty((num_ranks, num_experts), dtype=np.bool_), np.empty(num_ranks)
    for layer in range(num_layers):
        load = loads[layer]
        counts[:] = 0
        for expert in rows[layer]:
            counts[expert] += 1
        rank_load[:] = 0.0
        greatest = 0.0
        for slot in range(num_slots):
            piece = load[rows[layer, slot]] / counts[rows[layer, slot]]
            rank_load[slot // num_local] += piece
            greatest = max(greatest, piece)
        mean = rank_load.mean()
        best = mean / rank_load.max()
        if best >= enough:
            continue
        low, high = min(greatest, mean), max(1.15 * mean, 1.3 * greatest)
        for t in range(4 * LEVELS):
            level = low * (high / low) ** ((t // 4) / (LEVELS - 1))
            capped_counts(load, level, t % 2 == 0, num_slots, num_ranks, counts)
            kind[:] = 0
            two_modes = t // 2 % 2 == 0
            if two_modes:
                two_mode_pack(load, counts, num_local, slots, slot_load, kind, holds, rank_load)
            else:
                pack(load, counts, num_local, slots, slot_load, holds, rank_load)
            swap_refine(num_local, slots, slot_load, kind, holds, rank_load, 8 * num_slots)
            reached = mean / rank_load.max()
            if reached > best + (1e-9 if two_modes else PREFER_TWO_MODES):
                best = reached
                rows[layer] = slots
            if best >= enough:
                break
