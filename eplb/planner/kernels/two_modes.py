"""Kernel of the two-mode layout: every rank E / R primaries (each expert once), its other slots replicas.

The primaries alone are then a placement without redundancy, and replicas are spread evenly over ranks, so that shares
have somewhere to go on every rank.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import numpy as np

from evenroute.eplb._compiled import kernel


@kernel
def two_mode_pack(loads, counts, num_local, slots, slot_load, kinds, holds, rank_load):
    """Place primaries, then replicas, heaviest first, on the lightest rank with room for the kind.

    A rank whose replicas have nowhere else to go takes the expert with the largest load per replica that it does
    not hold, so ``counts [E]`` may change. Where R does not divide E, ranks differ by one primary.

    Args:
        loads, counts: ``[E]``; num_local: slots of a rank.
        slots, slot_load, kinds: out ``[P]``; kinds is 0 for primaries, 1 for replicas.
        holds: out ``[R, E]``; rank_load: out ``[R]``.
    """
    num_experts, num_ranks = loads.shape[0], rank_load.shape[0]
    most = -(-num_experts // num_ranks)
    full = num_experts - num_ranks * (num_experts // num_ranks)  # ranks with one more primary; 0: all equal
    used = np.zeros(num_ranks, dtype=np.int64)
    holds[:] = False
    rank_load[:] = 0.0
    order = np.argsort(-(loads / counts), kind="mergesort")
    for expert in order:
        best = -1
        for rank in range(num_ranks):
            room = used[rank] < most - 1 or (
                used[rank] < most and (full > 0 or most * num_ranks == num_experts)
            )
            if room and (best < 0 or rank_load[rank] < rank_load[best]):
                best = rank
        slot = best * num_local + used[best]
        slots[slot], kinds[slot] = expert, 0
        used[best] += 1
        if used[best] == most:
            full -= 1
        holds[best, expert] = True
        rank_load[best] += loads[expert] / counts[expert]
    placed = np.ones(num_experts, dtype=np.int64)
    for expert in order:
        for _ in range(counts[expert] - 1):
            best = -1
            for rank in range(num_ranks):
                if used[rank] < num_local and not holds[rank, expert]:  # noqa: SIM102
                    if best < 0 or rank_load[rank] < rank_load[best]:
                        best = rank
            if best < 0:
                break
            slot = best * num_local + used[best]
            slots[slot], kinds[slot] = expert, 1
            used[best] += 1
            placed[expert] += 1
            holds[best, expert] = True
            rank_load[best] += loads[expert] / counts[expert]
    for rank in range(num_ranks):
        while used[rank] < num_local:
            best = -1
            for expert in range(num_experts):
                if not holds[rank, expert]:  # noqa: SIM102
                    if best < 0 or loads[expert] * placed[best] > loads[best] * placed[expert]:
                        best = expert
            slot = rank * num_local + used[rank]
            slots[slot], kinds[slot] = best, 1
            used[rank] += 1
            placed[best] += 1
            holds[rank, best] = True
    counts[:] = placed
    rank_load[:] = 0.0
    for slot in range(slots.shape[0]):
        slot_load[slot] = loads[slots[slot]] / counts[slots[slot]]
        rank_load[slot // num_local] += slot_load[slot]


@kernel
def find_kinds(slots, num_ranks, num_experts, kinds):
    """Fill ``kinds [L, P]``: 0 for primaries, 1 for replicas, in layers ``slots [L, P]`` laid out in two modes.

    Every expert has one primary, every rank E / R of them. An expert with several replicas takes the rank that has
    room, along augmenting paths. In a layer without such a layout all slots are replicas.
    """
    num_layers, num_slots = slots.shape
    num_local = num_slots // num_ranks
    most = -(-num_experts // num_ranks)
    counts, home = np.empty(num_experts, dtype=np.int64), np.empty(num_experts, dtype=np.int64)
    used, came = np.empty(num_ranks, dtype=np.int64), np.empty(num_ranks, dtype=np.int64)
    queue = np.empty(num_ranks, dtype=np.int64)
    for layer in range(num_layers):
        row = slots[layer]
        kinds[layer] = 1
        counts[:], home[:], used[:] = 0, -1, 0
        for slot in range(num_slots):
            counts[row[slot]] += 1
        for slot in range(num_slots):
            if counts[row[slot]] == 1:
                home[row[slot]] = slot
                used[slot // num_local] += 1
        if used.max() > most:
            continue
        whole = True
        for expert in range(num_experts):
            if counts[expert] > 1 and not _augment(
                expert, row, num_local, most, counts, home, used, came, queue
            ):
                whole = False
                break
        if whole:
            for expert in range(num_experts):
                kinds[layer, home[expert]] = 0


@kernel
def _augment(expert, row, num_local, most, counts, home, used, came, queue):
    """Give ``expert`` a primary, moving the primaries of other replicated experts where needed; False if none can."""
    came[:] = -2
    tail = 0
    for slot in range(row.shape[0]):
        if row[slot] == expert:
            rank = slot // num_local
            came[rank], queue[tail] = -1, rank
            tail += 1
    head = 0
    while head < tail:
        rank = queue[head]
        head += 1
        if used[rank] < most:
            used[rank] += 1
            while True:
                moved = came[rank]  # the expert that hands this rank's slot on
                mover = expert if moved < 0 else moved
                before = -1 if moved < 0 else home[mover] // num_local
                for slot in range(rank * num_local, (rank + 1) * num_local):
                    if row[slot] == mover:
                        home[mover] = slot
                if moved < 0:
                    return True
                rank = before
        for slot in range(rank * num_local, (rank + 1) * num_local):
            other = row[slot]
            if home[other] != slot or counts[other] == 1:
                continue
            for place in range(row.shape[0]):
                to = place // num_local
                if row[place] == other and came[to] == -2:
                    came[to], queue[tail] = other, to
                    tail += 1
    return False
