"""A planner for tests that never stays: another placement each time, on two ranks, every other one in uneven shares."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import SHARE_TOTAL, Placement


def plan(loads: Any, *, topology: Any, num_slots: int, current: Placement, **_: Any) -> Any:
    """Random, drawn anew for each placement that it follows; the same for the same one."""
    assert topology.ep_size == 2
    random = np.random.default_rng(current.digest())
    experts = current.num_logical_experts
    rows, shares = [], []
    for _layer in range(current.num_layers):
        order = random.permutation(experts)
        both, rest = order[: num_slots - experts], order[num_slots - experts :]
        half = len(rest) // 2
        ranks = [random.permutation(np.concatenate([both, part])) for part in (rest[:half], rest[half:])]
        row = np.concatenate(ranks)
        share = np.full(num_slots, SHARE_TOTAL)
        for expert in both:
            first, second = np.flatnonzero(row == expert)
            share[first] = random.integers(SHARE_TOTAL // 8, SHARE_TOTAL * 7 // 8)
            share[second] = SHARE_TOTAL - share[first]
        rows.append(row)
        shares.append(share)
    uneven = np.array(shares, dtype=np.uint16) if current.shares is None else None
    placement = Placement(np.array(rows, dtype=np.int32), experts, topology, uneven)
    return SimpleNamespace(
        placement=placement,
        policy="random",
        reason="another one",
        before=balancedness(rank_loads(loads, current)),
        predicted=balancedness(
            np.ones((current.num_layers, topology.ep_size))
        ),  # never worse than what is in use
        moves=current.moved_slots(placement),
    )
