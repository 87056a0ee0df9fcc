"""DeepSeek's entry point (deepseek-ai/EPLB, ``rebalance_experts``), with this project's planner behind it."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_integer
from evenroute.eplb.loads.balance import validate_loads
from evenroute.eplb.placement.placement import replica_counts
from evenroute.eplb.placement.topology import check_plan_numbers
from evenroute.eplb.planner.plan import plan_placement


def rebalance_experts(
    weight: ArrayLike, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Plan replicas and their slots from scratch.

    Args:
        weight: ``[L, E]`` loads, any array-like.
        num_replicas: number of *physical* experts P (the name is DeepSeek's).
        num_groups: expert groups; groups stay on a node if there are several of both, else ``global``.
        num_nodes, num_gpus: over all nodes.

    Returns:
        ``phy2log [L, P]``, ``log2phy [L, E, X]`` (X = most replicas of any expert, -1 padded) and
        ``logcnt [L, E]``, all int64.

    Raises:
        ValueError: numbers that do not divide (with the nearest valid ``num_replicas``), bad loads.
    """
    loads = validate_loads(weight)
    num_replicas, num_groups = as_integer("num_replicas", num_replicas), as_integer("num_groups", num_groups)
    num_nodes, num_gpus = as_integer("num_nodes", num_nodes), as_integer("num_gpus", num_gpus)
    num_layers, num_experts = loads.shape
    topology = check_plan_numbers(num_experts, num_replicas, num_groups, num_nodes, num_gpus)
    policy = "hierarchical" if num_groups > 1 and num_nodes > 1 else "global"
    plan = plan_placement(
        loads, topology=topology, num_slots=num_replicas, num_groups=num_groups, policy=policy
    )
    phy2log = plan.placement.physical_to_logical.astype(np.int64)
    logcnt = replica_counts(phy2log, num_experts)
    most = int(logcnt.max()) if logcnt.size else 1
    log2phy = np.full((num_layers, num_experts, most), -1, dtype=np.int64)
    for layer, row in enumerate(phy2log):
        order = np.argsort(row, kind="stable")
        starts = np.concatenate(([0], np.cumsum(logcnt[layer])[:-1]))
        replica = np.arange(num_replicas) - starts[row[order]]
        log2phy[layer, row[order], replica] = order
    return phy2log, log2phy, logcnt.astype(np.int64)
