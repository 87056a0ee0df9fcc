"""Plans: loads in, a placement with its predicted balancedness, its moves and its reason out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb.loads import Balancedness, balancedness, rank_loads, validate_loads
from evenroute.eplb.placement import Placement
from evenroute.eplb.planner_full import full_placement, node_bound
from evenroute.eplb.topology import Topology, check_plan_numbers

POLICIES = ("global", "hierarchical")


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement and why it was chosen.

    Attributes:
        policy: the policy that made the placement.
        reason: one sentence.
        before, predicted: balancedness of the present placement and of this one, for the same loads.
        moves: ``[L]`` slots whose expert is not on that rank now.
    """

    placement: Placement
    policy: str
    reason: str
    before: Balancedness
    predicted: Balancedness
    moves: NDArray[np.int64]


def _figure(value: float | None) -> str:
    return "no data" if value is None else f"{value:.4f}"


def plan_placement(
    loads: ArrayLike,
    *,
    topology: Topology,
    num_slots: int,
    num_groups: int = 1,
    current: Placement | None = None,
    policy: str = "global",
    target: float | None = None,
    max_moves: int | None = None,
    num_threads: int | None = None,
) -> Plan:
    """Plan a placement for ``loads [L, E]``.

    Args:
        num_slots: P over all ranks.
        current: placement in use; None means ``Placement.initial``.
        policy: one of ``POLICIES``.

    Raises:
        ValueError: names the field, what was found and what is allowed.
    """
    array = validate_loads(loads)
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}, expected one of {', '.join(POLICIES)}")
    num_layers, num_experts = array.shape
    check_plan_numbers(num_experts, num_slots, num_groups, topology.num_nodes, topology.ep_size)
    if current is None:
        current = Placement.initial(num_layers, num_experts, num_slots, topology)
    found = (current.num_layers, current.num_logical_experts, current.num_slots, current.topology)
    wanted = (num_layers, num_experts, num_slots, topology)
    if found != wanted:
        raise ValueError(
            f"current placement is (layers, experts, slots, topology) {found}, expected {wanted}"
        )
    placement = full_placement(
        array,
        current,
        num_groups=num_groups,
        hierarchical=policy == "hierarchical",
        num_threads=num_threads,
    )
    before = balancedness(rank_loads(array, current))
    predicted = balancedness(rank_loads(array, placement))
    reason = f"{policy} plan from scratch: balancedness {_figure(before.mean)} -> {_figure(predicted.mean)}"
    if policy == "hierarchical":
        free = full_placement(array, current, num_threads=num_threads)
        flat = balancedness(rank_loads(array, free)).mean
        bound = node_bound(array, num_groups, topology)
        reason += (
            f"; keeping {num_groups} groups on {topology.num_nodes} nodes allows at most {_figure(bound)}, "
            f"a global plan reaches {_figure(flat)}"
        )
    return Plan(placement, policy, reason, before, predicted, current.moved_slots(placement))
