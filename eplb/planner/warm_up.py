"""Compile all planner kernels before they are needed, so that no plan of a daemon waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import POLICIES, plan_placement

Progress = Callable[[int, int, str], None]


def warm_up(progress: Progress | None = None) -> None:
    """Run every policy once on a tiny case; compiled code comes from the disk cache where it is there.

    Args:
        progress: called as ``progress(done, total, name)`` before each policy and once at the end.
    """
    loads = np.array([[8.0, 4.0, 2.0, 1.0], [1.0, 1.0, 1.0, 9.0]])
    topology = Topology(4, 2)
    start = Placement.initial(2, 4, 8, topology)
    for done, policy in enumerate(POLICIES):
        if progress is not None:
            progress(done, len(POLICIES), policy)
        for current in (None, start):
            plan_placement(
                loads,
                topology=topology,
                num_slots=8,
                num_groups=2,
                current=current,
                policy=policy,
                max_moves=2,
            )
    sources = np.ones((4, *loads.shape))
    plan_placement(loads, topology=topology, num_slots=8, source_loads=sources)
    if progress is not None:
        progress(len(POLICIES), len(POLICIES), "done")
