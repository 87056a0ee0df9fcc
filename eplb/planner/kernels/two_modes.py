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
