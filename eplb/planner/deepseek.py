"""DeepSeek's entry point (deepseek-ai/EPLB, ``rebalance_experts``), with this project's planner behind it.

    from evenroute import rebalance_experts  # was: from eplb import rebalance_experts

Differences from the original: numbers that do not divide are refused with the nearest that do (the original asserts);
no expert comes twice on a rank; a load that is NaN, infinite or negative is refused. It can't keep weights where they
are, for it does not know the placement in use (`plan_placement` does).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import CONVERSION_ERRORS, as_integer, one_line
from evenroute.eplb.loads.balance import validate_loads
from evenroute.eplb.placement.shares import count_replicas, logical_to_physical
from evenroute.eplb.placement.topology import check_plan_numbers
from evenroute.eplb.planner.plan import plan_placement


def rebalance_experts(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Any, Any, Any]:
    """Plan replicas and their slots from scratch.

    Args:
        weight: ``[L, E]`` loads, any numeric dtype: an array-like, or a torch tensor on any device.
        num_replicas: number of *physical* experts P, a multiple of ``num_gpus`` (the name is DeepSeek's).
        num_groups: expert groups; groups stay on a node if there are several of both, else ``global``.
        num_nodes, num_gpus: over all nodes; ``num_gpus % num_nodes == 0``.

    Returns:
        ``phy2log [L, P]``, ``log2phy [L, E, X]`` (X = most replicas of any expert, -1 padded) and ``logcnt [L, E]``,
        all int64: torch tensors on the CPU (as the original returns them) for a tensor, else numpy arrays.

    Raises:
        ValueError: numbers that do not divide (with the nearest valid ``num_replicas``), bad loads.
    """
    if not hasattr(weight, "new_tensor"):
        return _rebalance(weight, num_replicas, num_groups, num_nodes, num_gpus)
    # A tensor, by its methods alone: this package does not import torch.
    try:
        host = weight.detach().cpu()
        if host.is_complex():
            raise TypeError(f"{host.dtype} is complex")
        loads = np.asarray(host.double().numpy())
    except CONVERSION_ERRORS as error:  # meta, sparse, ...
        raise ValueError(f"weight must be numbers [layers, experts]: {one_line(error)}") from None
    maps = _rebalance(loads, num_replicas, num_groups, num_nodes, num_gpus)
    integers = host[:0].long()
    phy2log, log2phy, logcnt = (integers.new_tensor(array) for array in maps)
    return phy2log, log2phy, logcnt


def _rebalance(
    weight: Any, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    loads = validate_loads(weight)
    num_replicas, num_groups = as_integer("num_replicas", num_replicas), as_integer("num_groups", num_groups)
    num_nodes, num_gpus = as_integer("num_nodes", num_nodes), as_integer("num_gpus", num_gpus)
    num_experts = loads.shape[1]
    topology = check_plan_numbers(num_experts, num_replicas, num_groups, num_nodes, num_gpus)
    policy = "hierarchical" if num_groups > 1 and num_nodes > 1 else "global"
    plan = plan_placement(
        loads, topology=topology, num_slots=num_replicas, num_groups=num_groups, policy=policy
    )
    phy2log = plan.placement.physical_to_logical.astype(np.int64)
    logcnt = count_replicas(phy2log, num_experts)
    return phy2log, logical_to_physical(phy2log, logcnt), logcnt.astype(np.int64)
