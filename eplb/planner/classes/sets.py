"""The sets of shares for small and medium batches of a placement."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.classes import ShareClasses, default_class_rows, shares_of
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import SHARE_TOTAL, even_shares
from evenroute.eplb.planner.classes.times import ExpertTimes
from evenroute.eplb.planner.kernels.classes import choose_replicas

LEAST_GAIN = 0.005  # of the longest rank's time: below it a layer keeps what it has
Floats = NDArray[np.float64]


def expected_tokens(loads: Floats, top_k: int, tokens: int, ep_size: int) -> Floats:
    """Tokens of every expert ``[L, E]`` in a batch of so many tokens a rank, by its part of the loads ``[L, E]``."""
    total = loads.sum(axis=1, keepdims=True)
    part = loads / np.where(total > 0, total, 1.0)
    return np.minimum(part * top_k, 1.0) * tokens * ep_size


def longest_rank(
    placement: Placement,
    loads: Floats,
    top_k: int,
    tokens: int,
    times: ExpertTimes,
    shares: NDArray[np.uint16],
) -> Floats:
    """Expected microseconds ``[L]`` of the rank that takes longest, for shares ``[L, P]`` and a batch size."""
    slots, ranks = placement.physical_to_logical, placement.topology.ep_size
    experts = expected_tokens(loads, top_k, tokens, ranks)
    by_slot = np.take_along_axis(experts, slots.astype(np.int64), axis=1) * (shares / SHARE_TOTAL)
    return np.asarray(times.expected(by_slot, ranks).max(axis=1))


def with_classes(placement: Placement, loads: Floats, top_k: int, times: ExpertTimes) -> Placement:
    """The placement with sets for small and medium batches where they save time for these loads ``[L, E]``.

    Planned for the largest batch of each class (`default_class_rows`): an expert uses as many replicas as the times ask
    for, those with the least choice first (`choose_replicas`). A layer takes a set only if the longest rank then takes
    less than by the placement's own shares, and by even ones.
    """
    slots, ranks = placement.physical_to_logical, placement.topology.ep_size
    plain = replace(placement, classes=None)
    if placement.num_slots == placement.num_logical_experts:
        return plain
    rows = default_class_rows(placement.num_logical_experts, top_k, ranks)
    chosen = plain.all_shares()  # of the class above, then of this one
    is_set = np.zeros(len(slots), dtype=np.bool_)
    limits = np.zeros((len(slots), len(rows)), np.int32)
    sets = np.zeros((len(slots), len(rows), placement.num_slots), np.uint16)
    for number in reversed(range(len(rows))):
        tokens = expected_tokens(loads, top_k, rows[number], ranks)
        used = np.empty(slots.shape, np.bool_)
        for layer, row in enumerate(slots):
            choose_replicas(row, tokens[layer], ranks, times.expert_us, times.token_us, used[layer])

        def taken(shares: NDArray[np.uint16], number: int = number) -> Floats:
            return longest_rank(plain, loads, top_k, rows[number], times, shares)

        few, even, before = shares_of(slots, used), even_shares(slots), taken(chosen)
        best = np.where((taken(few) <= taken(even))[:, None], few, even)
        gains = taken(best) < (1 - LEAST_GAIN) * before
        chosen = np.where(gains[:, None], best, chosen)
        is_set |= gains
        limits[:, number] = np.where(is_set, rows[number], 0)
        sets[:, number] = np.where(is_set[:, None], chosen, 0)
    return replace(plain, classes=ShareClasses(limits, sets)) if limits.any() else plain


def class_times(
    placement: Placement, loads: Floats, top_k: int, times: ExpertTimes
) -> list[tuple[int, float, float]]:
    """(largest batch, us with its set, us with even shares) of each class: means over layers with load.

    The longest rank's expected time in a layer. Empty where the placement has no sets.
    """
    if placement.classes is None:
        return []
    busy = loads.any(axis=1)
    found = []
    for size in placement.classes.sizes() if busy.any() else []:
        each = (
            longest_rank(placement, loads, top_k, size, times, one)[busy].mean()
            for one in (shares_for(placement, size), even_shares(placement.physical_to_logical))
        )
        found.append((size, *map(float, each)))
    return found  # type: ignore[return-value]


def sets_gain(before: Placement, after: Placement, loads: Floats, top_k: int, times: ExpertTimes) -> float:
    """Part of the longest rank's time that other sets save, mean over layers with load; the largest of any class."""
    busy, gains = loads.any(axis=1), [0.0]
    for size in default_class_rows(before.num_logical_experts, top_k, before.topology.ep_size):
        each = (
            longest_rank(one, loads, top_k, size, times, shares_for(one, size)) for one in (before, after)
        )
        old, new = (float(found[busy].sum()) for found in each)
        gains.append(1 - new / old if old > 0 else 0.0)
    return max(gains)


def shares_for(placement: Placement, tokens: int) -> NDArray[np.uint16]:
    """The shares ``[L, P]`` that batches of so many tokens a rank are dealt by."""
    shares = placement.all_shares()
    if placement.classes is not None:
        for number in reversed(range(placement.classes.rows.shape[1])):
            fits = placement.classes.rows[:, number] >= tokens
            shares = np.where(fits[:, None], placement.classes.shares[:, number], shares)
    return shares


def classes_text(found: list[tuple[int, float, float]], times: ExpertTimes) -> str:
    """One line on the sets of a placement; empty without any."""
    if not found:
        return ""
    each = ", ".join(
        f"up to {size} tokens a rank {taken:.0f} us ({even:.0f} even)" for size, taken, even in found
    )
    return f"shares by batch size, longest rank a layer: {each}; {times.told()}"


def planned_sets(
    placement: Placement, loads: Floats, top_k: int, times: ExpertTimes
) -> tuple[Placement, str]:
    """The placement with its sets for these loads, and one line on what they save ("" without any)."""
    made = with_classes(placement, loads, top_k, times)
    return made, classes_text(class_times(made, loads, top_k, times), times)
