"""What redundancy and the deal are worth at a batch size: the expected time of the rank that takes longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evenroute.eplb.analysis.measures import SAMPLED_LAYERS, AdviceSettings, Workload, redundancy_candidates
from evenroute.eplb.loads.skew import Floats
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.classes.sets import longest_rank, shares_for
from evenroute.eplb.planner.history.windows import frequencies
from evenroute.eplb.planner.plan import plan_placement

SIZES = (8, 32, 128, 512, 2048)  # tokens a rank


def by_batch_size(
    workloads: Sequence[Workload], settings: AdviceSettings, redundant: int, top_k: int
) -> list[dict[str, Any]]:
    """A row a batch size, in microseconds a layer: without redundant experts, with them dealt evenly, by batch size.

    `SAMPLED_LAYERS` layers at most; the plan is one for the mean of the workloads.
    """
    mean = np.mean([frequencies(workload.total) for workload in workloads], axis=0)
    busy = mean[mean.any(axis=1)]
    loads = busy[np.unique(np.linspace(0, len(busy) - 1, SAMPLED_LAYERS).round().astype(int))]
    num_experts = loads.shape[1]
    fewest = redundancy_candidates(num_experts, settings.ep_size)[0]
    plain, made = (_plan(loads, settings, number, top_k) for number in (fewest, redundant))

    def takes(placement: Placement, tokens: int, even: bool) -> float:
        shares = even_shares(placement.physical_to_logical) if even else shares_for(placement, tokens)
        return float(longest_rank(placement, loads, top_k, tokens, settings.times, shares).mean())

    given = settings.batch_tokens
    sizes = {*SIZES} | ({max(1, given // settings.ep_size)} if given is not None else set())
    rows = []
    for tokens in sorted(sizes):
        found = {
            "without": takes(plain, tokens, True),
            "even": takes(made, tokens, True),
            "by_size": takes(made, tokens, False),
        }
        rows.append(
            {"tokens": tokens, **{f"{name}_us": us for name, us in found.items()}, "best": _best(found)}
        )
    return rows


def _best(found: dict[str, float]) -> str:
    """The simplest of what comes within 1 % of the least time."""
    least = min(found.values())
    return next(name for name in ("even", "by_size", "without") if found[name] <= 1.01 * least)


def _plan(loads: Floats, settings: AdviceSettings, redundant: int, top_k: int) -> Placement:
    return plan_placement(
        loads,
        topology=Topology(settings.ep_size, settings.num_nodes),
        num_slots=loads.shape[1] + redundant,
        policy="joint",
        top_k=top_k,
        expert_times=settings.times,
    ).placement
