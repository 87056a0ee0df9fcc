"""Compile all planner kernels before they are needed, so that no plan of a daemon waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import POLICIES, plan_placement
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy

Progress = Callable[[int, int, str], None]


def warm_up(progress: Progress | None = None) -> None:
    """Run every policy once on a tiny case; compiled code comes from the disk cache where it is there.

    Args:
        progress: called as ``progress(done, total, name)`` before each policy and once at the end.
    """
    total = len(POLICIES) + 1
    for done, policy in enumerate((*POLICIES, "rebalancer")):
        if progress is not None:
            progress(done, total, policy)
        if done < len(POLICIES):
            _plan(policy)
        else:
            _decide()
    if progress is not None:
        progress(total, total, "done")


def _plan(policy: str) -> None:
    loads = np.array([[8.0, 4.0, 2.0, 1.0], [1.0, 1.0, 1.0, 9.0]])
    topology = Topology(4, 2)
    for current in (None, Placement.initial(2, 4, 8, topology)):
        plan_placement(
            loads,
            topology=topology,
            num_slots=8,
            num_groups=2,
            current=current,
            policy=policy,
            max_moves=2,
        )
    if policy == "global":
        plan_placement(loads, topology=topology, num_slots=8, source_loads=np.ones((4, *loads.shape)))


def _decide() -> None:
    """Have `RebalancePolicy` decide all that it can: it hands kernels the read-only rows of placements."""
    for nodes, settings in (
        (1, PolicySettings(top_k=2)),
        (1, PolicySettings(uneven_shares=False)),
        (2, PolicySettings(hierarchical=True, num_groups=2)),
    ):
        topology = Topology(4, nodes)
        placement = Placement.initial(2, 8, 12, topology)
        policy = RebalancePolicy(topology, 12, settings)
        rng = np.random.default_rng(0)
        for _ in range(6):
            counts = rng.poisson(100_000 * rng.dirichlet(np.full(8, 0.3), 2)).astype(np.int64)
            decision = policy.decide(counts, placement)
            placement = placement if decision.plan is None else decision.plan.placement
