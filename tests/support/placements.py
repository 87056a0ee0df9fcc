"""Random rows and placements for the tests of migration: every expert somewhere, none twice on a rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.classes import ShareClasses, shares_of
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology


def random_row(rng: np.random.Generator, num_experts: int, num_slots: int, ep_size: int) -> NDArray[np.int32]:
    """``[P] int32``: replica counts drawn at random (at most one a rank), dealt to random ranks with room."""
    num_local = num_slots // ep_size
    counts = np.ones(num_experts, dtype=np.int64)
    for _ in range(num_slots - num_experts):
        counts[rng.choice(np.flatnonzero(counts < ep_size))] += 1
    room = np.full(ep_size, num_local)
    held: list[list[int]] = [[] for _ in range(ep_size)]
    # Most replicas first, always to the ranks with most room: this never runs into a dead end (Gale-Ryser).
    for expert in sorted(rng.permutation(num_experts).tolist(), key=lambda e: -counts[e]):
        order = sorted(range(ep_size), key=lambda r: (-room[r], rng.random()))
        for rank in order[: counts[expert]]:
            held[rank].append(expert)
            room[rank] -= 1
    return np.concatenate([rng.permutation(own) for own in held]).astype(np.int32)


def random_shares(rng: np.random.Generator, slots: NDArray[np.int32]) -> NDArray[np.uint16]:
    """``[P] uint16``: random shares of every expert's replicas, 65535 together; some of them 0."""
    shares = np.zeros(len(slots), dtype=np.uint16)
    for expert in np.unique(slots):
        own = np.flatnonzero(slots == expert)
        cuts = np.sort(rng.integers(0, 65536, len(own) - 1))
        shares[own] = np.diff(np.concatenate(([0], cuts, [65535])))
    return shares


def random_classes(rng: np.random.Generator, slots: NDArray[np.int32]) -> ShareClasses | None:
    """Sets of one layer ``slots [P]`` for batches of one, two or no sizes: each expert evenly over some replicas."""
    number = int(rng.integers(0, 3))
    rows = np.cumsum(rng.integers(1, 100, number)).astype(np.int32)
    sets = []
    for _ in range(number):
        used = rng.random(len(slots)) < 0.3
        for expert in np.unique(slots):
            used[rng.choice(np.flatnonzero(slots == expert))] = True
        sets.append(shares_of(slots[None], used[None])[0])
    return ShareClasses(rows, np.stack(sets)) if sets else None


def random_placement(
    rng: np.random.Generator,
    num_layers: int,
    num_experts: int,
    num_slots: int,
    topology: Topology,
    *,
    uneven: bool = False,
    classes: bool = False,
) -> Placement:
    """A placement of random rows, with even or random shares, and with sets for small batches."""
    slots = [random_row(rng, num_experts, num_slots, topology.ep_size) for _ in range(num_layers)]
    rows = [
        PlacementRow(
            one,
            random_shares(rng, one) if uneven else None,
            random_classes(rng, one) if classes else None,
        )
        for one in slots
    ]
    return Placement.from_rows(rows, num_experts, topology)
