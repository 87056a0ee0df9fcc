"""Plans for a job that lost ranks or got new ones, moving as little as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_integer, describe, require_bool, require_instance
from evenroute.eplb.loads.balance import placement_balancedness, validate_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology, check_num_slots
from evenroute.eplb.planner.layers import check_num_threads, normalized
from evenroute.eplb.planner.moves import MoveLimits, moved_placement
from evenroute.eplb.planner.plan import Plan, figure


def fetched_slots(old: Placement, new: Placement, sources: Sequence[int | None]) -> NDArray[np.int64]:
    """``[L]``: slots of ``new`` whose expert is not on the old rank that the new rank was."""
    held = old.holds()
    moved = np.zeros(new.num_layers, dtype=np.int64)
    for rank, source in enumerate(sources):
        experts = new.physical_to_logical.reshape(new.num_layers, len(sources), -1)[:, rank]
        if source is None:
            moved += experts.shape[1]
        else:
            moved += (~np.take_along_axis(held[:, source], experts.astype(np.int64), axis=1)).sum(axis=1)
    return moved


def _checked_sources(sources: Sequence[int | None], old: Placement, topology: Topology) -> list[int | None]:
    try:
        found = list(sources)
    except TypeError:
        raise ValueError(f"sources must be a list of ranks, found {describe(sources)}") from None
    sources = [
        None if source is None else as_integer(f"sources: rank {rank}", source)
        for rank, source in enumerate(found)
    ]
    if len(sources) != topology.ep_size:
        raise ValueError(f"sources name {len(sources)} ranks, expected ep_size={topology.ep_size}")
    known = [source for source in sources if source is not None]
    bad = [source for source in known if not 0 <= source < old.topology.ep_size]
    if bad:
        raise ValueError(f"sources: rank {bad[0]} is outside [0, {old.topology.ep_size})")
    twice = [source for source in set(known) if known.count(source) > 1]
    if twice:
        raise ValueError(f"sources: old rank {min(twice)} is named twice")
    return sources


def _check_room(num_experts: int, num_slots: int, ep_size: int) -> None:
    if num_slots < num_experts:
        needed = -(-num_experts // ep_size) * ep_size
        raise ValueError(
            f"num_slots={num_slots} on ep_size={ep_size} ranks cannot hold num_logical_experts={num_experts}: "
            f"at least {needed} slots are needed ({needed // ep_size} a rank)"
        )
    check_num_slots(num_experts, num_slots, ep_size)


def _best_drop(row: list[list[int]], rank: int, counts: NDArray[np.int64], load: NDArray[np.float64]) -> int:
    """Place on ``rank`` of the replica whose expert can best do with one less, or -1."""
    best, price = -1, np.inf
    for place, expert in enumerate(row[rank]):
        if counts[expert] > 1:
            more = load[expert] / (counts[expert] - 1) - load[expert] / counts[expert]
            if more < price:
                best, price = place, more
    return best


def _settle(
    row: list[list[int]], num_local: int, load: NDArray[np.float64], num_experts: int
) -> list[list[int]]:
    """Give every expert a slot and every rank ``num_local`` different experts; what can stay stays."""
    counts = np.bincount([e for rank in row for e in rank], minlength=num_experts)
    # Ranks with more experts than slots: drop replicas first, cheapest first, then the lightest experts.
    for rank, held in enumerate(row):
        while len(held) > num_local:
            place = _best_drop(row, rank, counts, load)
            if place < 0:
                place = min(range(len(held)), key=lambda k: (load[held[k]], held[k]))
            counts[held.pop(place)] -= 1
    pieces = [sum(load[e] / counts[e] for e in held) for held in row]
    lost = sorted(np.flatnonzero(counts == 0).tolist(), key=lambda e: (-load[e], e))
    for expert in lost:
        free = [r for r in range(len(row)) if len(row[r]) < num_local]
        if free:
            rank = min(free, key=lambda r: (pieces[r], r))
        else:
            rank = min(
                (r for r in range(len(row)) if _best_drop(row, r, counts, load) >= 0),
                key=lambda r: (pieces[r], r),
            )
            place = _best_drop(row, rank, counts, load)
            dropped = row[rank].pop(place)
            pieces[rank] -= load[dropped] / counts[dropped]
            counts[dropped] -= 1
        row[rank].append(expert)
        counts[expert] += 1
        pieces[rank] += load[expert]
    while True:
        free = [r for r in range(len(row)) if len(row[r]) < num_local]
        if not free:
            return row
        rank = min(free, key=lambda r: (pieces[r], r))
        held_here = set(row[rank])
        expert = min(
            (e for e in range(num_experts) if e not in held_here), key=lambda e: (-load[e] / counts[e], e)
        )
        counts[expert] += 1
        row[rank].append(expert)
        pieces[rank] += load[expert] / counts[expert]


def _in_place(old: list[int], new: list[int]) -> list[int]:
    """``new`` in an order in which experts that stay keep their slot."""
    kept = {expert: place for place, expert in enumerate(old[: len(new)]) if expert in new}
    rest = iter(expert for expert in new if expert not in kept)
    at = {place: expert for expert, place in kept.items()}
    return [at[place] if place in at else next(rest) for place in range(len(new))]


def plan_elastic(
    loads: ArrayLike,
    current: Placement,
    topology: Topology,
    sources: Sequence[int | None],
    *,
    num_slots: int | None = None,
    target: float | None = None,
    max_moves: int | None = None,
    weighted: bool = True,
    num_threads: int | None = None,
) -> Plan:
    """Plan for another set of ranks.

    Args:
        loads: ``[L, E]``.
        current: the placement of the old ranks.
        topology: the new ranks.
        sources: for each new rank the old rank that it is, or None for an added one; old ranks that are not
            named are gone with their slots.
        num_slots: P over the new ranks; None keeps the slots of a rank.
        target, max_moves: limits of the moves made for balance; those needed to give every expert a slot and
            to fill added ranks come before and are counted besides.

    Raises:
        ValueError: too few slots for all experts (names the number needed), sources that do not fit.
    """
    require_instance("current", current, Placement)
    require_instance("topology", topology, Topology)
    require_bool("weighted", weighted)
    check_num_threads(num_threads)
    limits = MoveLimits(target=target, max_moves=max_moves)
    array = validate_loads(
        loads, num_layers=current.num_layers, num_logical_experts=current.num_logical_experts
    )
    sources = _checked_sources(sources, current, topology)
    num_experts = current.num_logical_experts
    slots = (
        topology.ep_size * current.num_local_slots
        if num_slots is None
        else as_integer("num_slots", num_slots)
    )
    _check_room(num_experts, slots, topology.ep_size)
    scaled = normalized(array)
    # Idle experts and layers still want a slot each, spread like the others.
    scaled = np.where(scaled.any(axis=1, keepdims=True), scaled, 1.0)
    old = current.physical_to_logical.reshape(current.num_layers, current.topology.ep_size, -1)
    rows = np.empty((current.num_layers, slots), dtype=np.int32)
    for layer in range(current.num_layers):
        held = [[] if source is None else old[layer, source].tolist() for source in sources]
        settled = _settle(
            [list(rank) for rank in held], slots // topology.ep_size, scaled[layer], num_experts
        )
        rows[layer] = np.concatenate([_in_place(*pair) for pair in zip(held, settled, strict=True)])
    needed = Placement(rows, num_experts, topology)
    made = moved_placement(array, needed, limits, weighted=weighted, num_threads=num_threads)
    moves = fetched_slots(current, made, sources)
    must = int(fetched_slots(current, needed, sources).sum())
    gone = current.topology.ep_size - sum(source is not None for source in sources)
    added = sum(source is None for source in sources)
    before = placement_balancedness(array, needed)
    predicted = placement_balancedness(array, made)
    reason = (
        f"elastic: {gone} ranks gone, {added} added; {must} slots had to be fetched, {int(moves.sum())} are, "
        f"for balancedness {figure(before.mean)} -> {figure(predicted.mean)}"
    )
    return Plan(made, "elastic", reason, before, predicted, moves)
