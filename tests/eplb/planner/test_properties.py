"""Whatever is asked for, a plan is valid, no worse than standing still, and the same every time."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenroute.eplb.loads.balance import placement_balancedness
from evenroute.eplb.placement.placement import SHARE_TOTAL
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import POLICIES, plan_placement
from support.planning import plain_check, plain_moves


@st.composite
def cases(draw):
    nodes = draw(st.sampled_from([1, 2, 3]))
    ranks = nodes * draw(st.integers(1, 3))
    groups = nodes * draw(st.integers(1, 2))
    experts = groups * draw(st.integers(1, 4))
    least, most = -(-experts // ranks), experts // nodes
    if least > most:
        experts = groups * ranks
        least, most = -(-experts // ranks), experts // nodes
    local = draw(st.integers(least, most))
    layers = draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["lognormal", "counts", "zeros", "hot", "equal", "huge", "tiny", "sparse"]))
    shape = (2, layers, experts)
    loads = {
        "lognormal": lambda: random.lognormal(0, 2, shape),
        "counts": lambda: random.integers(0, 1000, shape).astype(float),
        "zeros": lambda: np.zeros(shape),
        "hot": lambda: np.where(np.arange(experts) == random.integers(experts), 1e6, 1.0) * np.ones(shape),
        "equal": lambda: np.full(shape, 7.0),
        "huge": lambda: random.random(shape) * 1e308,
        "tiny": lambda: random.random(shape) * 1e-300,
        "sparse": lambda: random.random(shape) * (random.random(shape) < 0.2),
    }[kind]()
    return loads, Topology(ranks, nodes), ranks * local, groups


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(cases(), st.sampled_from(POLICIES), st.sampled_from([None, 0, 2]))
def test_any_plan_is_valid_and_no_worse(case, policy: str, max_moves: int | None) -> None:
    loads, topology, slots, groups = case
    start = plan_placement(loads[0], topology=topology, num_slots=slots, policy="auto").placement

    def make(scale: float):
        return plan_placement(
            loads[1] * scale,
            topology=topology,
            num_slots=slots,
            num_groups=groups,
            current=start,
            policy=policy,
            max_moves=max_moves,
        )

    plan = make(1.0)
    ranks = topology.ep_size
    plain_check(plan.placement, loads[1] / max(loads[1].max(), 1e-300), ranks)
    assert plan.moves.tolist() == plain_moves(start, plan.placement, ranks)
    if max_moves is not None and policy in ("incremental", "weighted", "joint"):
        assert plan.moves.sum() <= max_moves
    if policy in ("shares", "stay"):
        assert plan.moves.sum() == 0
    idle = ~loads[1].any(axis=1)
    assert (plan.placement.physical_to_logical[idle] == start.physical_to_logical[idle]).all()
    if policy != "hierarchical":
        before = placement_balancedness(loads[1], start).per_layer
        after = placement_balancedness(loads[1], plan.placement).per_layer
        assert (after >= before - 1e-9).all()
    if plan.placement.shares is not None:
        sums = [
            np.bincount(s, weights=w)
            for s, w in zip(plan.placement.physical_to_logical, plan.placement.shares, strict=True)
        ]
        assert all((s == SHARE_TOTAL).all() for s in sums)
    assert make(1.0).placement.digest() == plan.placement.digest()
    assert make(0.5).placement.digest() == plan.placement.digest()


def test_shares_are_honoured_by_the_predicted_loads() -> None:
    loads = np.array([[90.0, 10, 20, 30]])
    start = plan_placement(np.ones((1, 4)), topology=Topology(3), num_slots=6).placement
    plan = plan_placement(loads, topology=Topology(3), num_slots=6, current=start, policy="shares")
    shares = plan.placement.shares
    assert shares is not None
    by_hand = np.zeros(3)
    for slot, expert in enumerate(plan.placement.physical_to_logical[0].tolist()):
        by_hand[slot // 2] += loads[0, expert] * shares[0, slot] / SHARE_TOTAL
    assert plan.predicted.mean == pytest.approx(by_hand.mean() / by_hand.max(), rel=1e-12)
