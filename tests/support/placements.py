"""Random rows and placements for the tests of migration: every expert somewhere, none twice on a rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement import Placement, PlacementRow
from evenroute.eplb.topology import Topology


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


def random_placement(
    rng: np.random.Generator, num_layers: int, num_experts: int, num_slots: int, topology: Topology
) -> Placement:
    """A placement of random rows with even shares."""
    rows = [
        PlacementRow(random_row(rng, num_experts, num_slots, topology.ep_size), None)
        for _ in range(num_layers)
    ]
    return Placement.from_rows(rows, num_experts, topology)
