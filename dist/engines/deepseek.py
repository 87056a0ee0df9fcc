"""`rebalance_experts` of deepseek-ai/EPLB for torch callers: the same signature, this project's planner behind it.

    from evenroute.dist.engines.deepseek import rebalance_experts  # was: from eplb import rebalance_experts

Differences from the original: numbers that do not divide are refused with the nearest that do (the original asserts);
no expert comes twice on a rank; a load that is NaN, infinite or negative is refused. It can't keep weights where they
are: it is not told the placement in use (`evenroute.eplb.planner.plan.plan_placement` is). Callers without torch use
`evenroute.eplb.planner.deepseek`, which gives numpy arrays.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.dist.engines.loads import host_loads
from evenroute.eplb.planner import deepseek


def rebalance_experts(
    weight: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan replicas and their slots from scratch.

    Args:
        weight: ``[L, E]`` loads, any numeric dtype, on any device.
        num_replicas: number of *physical* experts P, a multiple of ``num_gpus`` (the name is DeepSeek's).
        num_groups: expert groups; kept on a node if there are several of both.
        num_nodes, num_gpus: over all nodes; ``num_gpus % num_nodes == 0``.

    Returns:
        ``phy2log [L, P]``, ``log2phy [L, E, X]`` (X = most replicas of any expert, -1 padded), ``logcnt [L, E]``:
        int64 on the CPU, as the original returns them.

    Raises:
        ValueError: numbers that do not divide (with the nearest valid ``num_replicas``), bad loads.
    """
    loads = host_loads("weight", weight)
    arrays = deepseek.rebalance_experts(loads, num_replicas, num_groups, num_nodes, num_gpus)
    phy2log, log2phy, logcnt = (torch.from_numpy(array) for array in arrays)
    return phy2log, log2phy, logcnt
