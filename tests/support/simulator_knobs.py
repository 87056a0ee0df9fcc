"""What a schedule of the simulator draws first: sizes, rates, and the placements that its planner chooses from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from evenroute.dist.protocol.agreement import Version
from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.protocol_helpers import with_shares


@dataclass(frozen=True)
class Knobs:
    """One schedule's sizes and rates; times in simulated seconds."""

    ranks: int
    layers: int
    agree_every: int
    num_buffers: int
    window_steps: int
    fault_s: float
    loss: float
    duplicate: float
    delay_s: float
    long_delay: float
    error_rate: float
    transfer_s: float
    num_faults: int
    damage: float
    shared_counts: bool
    through_the_wire: bool
    hostile: bool
    heartbeat_s: float = 4.0
    resend_s: float = 3.0
    start_limit_s: float = 6.0
    step_s: float = 1.0

    @classmethod
    def draw(cls, rng: random.Random, seed: int) -> Knobs:
        """2 to 32 ranks, mostly few; a third of the schedules with an unkind network."""
        ranks = rng.choices([2, 3, 4, 5, 8, 16, 32], [34, 28, 20, 9, 5, 3, 1])[0]
        unkind = rng.random() < 0.35
        return cls(
            ranks=ranks,
            layers=rng.choices([1, 2, 3, 4], [2, 5, 3, 1])[0],
            agree_every=rng.choice([1, 1, 2, 3]),
            num_buffers=rng.choice([1, 1, 2, 3]),
            window_steps=rng.choice([2, 3, 5]),
            fault_s=rng.uniform(15.0, 75.0) * (1.0 if ranks <= 5 else 0.5 if ranks < 16 else 0.25),
            loss=rng.uniform(0.05, 0.4) if unkind else rng.choice([0.0, 0.02]),
            duplicate=rng.uniform(0.05, 0.3) if unkind else rng.choice([0.0, 0.05]),
            delay_s=rng.choice([0.05, 0.3, 1.5]),
            long_delay=rng.choice([0.0, 0.03, 0.1]),
            error_rate=rng.choice([0.0, 0.0, 0.05, 0.3]),
            transfer_s=rng.choice([0.2, 1.0, 4.0]),
            num_faults=rng.randint(0, 9),
            damage=rng.choice([0.0, 0.0, 0.1]),
            shared_counts=rng.random() < 0.15,
            through_the_wire=seed % 16 == 0,
            hostile=seed % 3 == 1,
        )


@lru_cache(maxsize=64)
def placement_pool(ranks: int, layers: int) -> tuple[JobShape, tuple[Version, ...]]:
    """A job shape and placements of it, the first one the initial; versions only for their digests (key unset)."""
    rng = np.random.default_rng(ranks * 100 + layers)
    experts = {2: 3, 3: 4, 4: 4}.get(ranks, ranks - 2)
    slots = ranks * (2 if ranks <= 4 else 1)
    job = JobShape(num_layers=layers, num_logical_experts=experts, num_slots=slots, ep_size=ranks, top_k=2)
    base = Placement.initial(layers, experts, slots, Topology(ranks))
    found = [base, with_shares(base, int(rng.integers(layers)))]
    while len(found) < 10:
        rows = base.physical_to_logical.copy()
        for layer in range(layers):
            if rng.random() < 0.75:
                rows[layer] = rng.permutation(experts)[rows[layer]]
        placement = Placement(rows, experts, base.topology)
        found.append(with_shares(placement, int(rng.integers(layers))) if rng.random() < 0.3 else placement)
    return job, tuple(Version.of((0, 0), placement) for placement in found)
