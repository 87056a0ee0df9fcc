"""The judge of the planner benchmark: counts again with sets and loops, and shares nothing with the planner."""

from __future__ import annotations

from collections.abc import Sequence


def judge(
    rows: Sequence[Sequence[int]],
    shares: Sequence[Sequence[int]] | None,
    loads: Sequence[Sequence[float]],
    num_ranks: int,
    *,
    once: bool = True,
) -> list[float]:
    """Balancedness of every layer with load, for slots ``[L][P]``, shares ``[L][P]`` of 65535 and loads ``[L][E]``.

    Raises:
        AssertionError: an expert without a slot, or (with ``once``) twice on a rank, shares that do not sum to 65535.
    """
    found = []
    for layer, (row, load) in enumerate(zip(rows, loads, strict=True)):
        local = len(row) // num_ranks
        weights = [1] * len(row) if shares is None else list(shares[layer])
        total = dict.fromkeys(range(len(load)), 0)
        replicas = dict.fromkeys(range(len(load)), 0)
        for expert, weight in zip(row, weights, strict=True):
            total[expert] += weight
            replicas[expert] += 1
        assert min(replicas.values()) > 0, f"layer {layer}: an expert has no slot"
        assert shares is None or set(total.values()) == {65535}, f"layer {layer}: shares do not sum to 65535"
        heights = []
        for first in range(0, len(row), local):
            held = row[first : first + local]
            assert not once or len(set(held)) == local, (
                f"layer {layer}: an expert lies twice on rank {first // local}"
            )
            parts = zip(held, weights[first : first + local], strict=True)
            heights.append(sum(load[e] * w / total[e] for e, w in parts))
        if max(heights) > 0:
            found.append(sum(heights) / len(heights) / max(heights))
    return found


def moved(old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], num_ranks: int) -> int:
    """Slots of ``new`` whose expert their rank did not hold in ``old``."""
    count = 0
    for before, after in zip(old, new, strict=True):
        local = len(after) // num_ranks
        for first in range(0, len(after), local):
            part = slice(first, first + local)
            count += len(set(after[part]) - set(before[part]))
    return count


def linear_programme(load: Sequence[float], row: Sequence[int], num_ranks: int) -> float:
    """Lowest possible largest rank load with free shares, by HiGHS (scipy)."""
    import numpy as np
    from scipy.optimize import linprog

    size, local = len(row), len(row) // num_ranks
    below = np.zeros((num_ranks, size + 1))
    below[np.arange(size) // local, np.arange(size)] = 1
    below[:, -1] = -1
    served = np.zeros((len(load), size + 1))
    served[list(row), np.arange(size)] = 1
    objective = np.zeros(size + 1)
    objective[-1] = 1
    answer = linprog(objective, below, np.zeros(num_ranks), served, load, bounds=(0, None), method="highs")
    if answer.status != 0:
        raise ValueError(f"HiGHS: {answer.message}")
    return float(answer.fun)
