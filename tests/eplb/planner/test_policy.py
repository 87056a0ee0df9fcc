"""When to plan: quiet on stationary noise, awake on drift."""

import numpy as np
import pytest

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy


def skewed(random: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    loads = random.lognormal(0, 1, (layers, experts))
    return loads / loads.sum(axis=1, keepdims=True)


def test_no_move_on_stationary_noise_after_the_first_ten_of_200_windows() -> None:
    random = np.random.default_rng(0)
    truth = skewed(random, 6, 256)
    policy = RebalancePolicy(Topology(32), 288)
    placement = Placement.initial(6, 256, 288, Topology(32))
    actions, means = [], []
    for _ in range(200):
        decision = policy.decide(random.multinomial(100_000 * 8, truth), placement)
        actions.append(decision.action)
        if decision.plan is not None:
            moved = int(placement.moved_slots(decision.plan.placement).sum())
            assert (moved > 0) == (decision.action in ("full", "moves"))
            placement = decision.plan.placement
        means.append(balancedness(rank_loads(truth, placement)).mean)
    assert actions[0] == "full"
    assert set(actions[10:]) <= {"stay", "shares"}
    assert actions[10:].count("shares") < 40
    assert min(means) > 0.975


def test_a_change_of_workload_is_answered_by_shares_and_moves_not_by_a_full_plan() -> None:
    random = np.random.default_rng(1)
    old, new = skewed(random, 4, 64), skewed(random, 4, 64)
    policy = RebalancePolicy(Topology(8), 80)
    placement = Placement.initial(4, 64, 80, Topology(8))
    actions = []
    for window in range(12):
        truth = old if window < 4 else new
        decision = policy.decide(random.multinomial(10**7, truth), placement)
        actions.append(decision.action)
        if decision.plan is not None:
            placement = decision.plan.placement
    assert actions[0] == "full"
    assert "full" not in actions[1:]
    assert "moves" in actions[4:7]
    assert balancedness(rank_loads(new, placement)).mean > 0.97
    policy.request_full_plan()
    assert policy.decide(random.multinomial(10**7, new), placement).action == "full"


def test_empty_windows_and_bad_settings() -> None:
    policy = RebalancePolicy(Topology(2), 4)
    placement = Placement.initial(1, 4, 4, Topology(2))
    assert policy.decide(np.zeros((1, 4)), placement).action == "stay"
    with pytest.raises(ValueError, match="layers, expected 1"):
        policy.decide(np.ones((2, 4)), placement)
    with pytest.raises(ValueError, match="target=2"):
        PolicySettings(target=2)


def test_without_uneven_shares_the_plans_are_even() -> None:
    random = np.random.default_rng(3)
    policy = RebalancePolicy(Topology(8), 80, PolicySettings(uneven_shares=False, max_move_fraction=0.1))
    placement = Placement.initial(2, 64, 80, Topology(8))
    for _ in range(4):
        decision = policy.decide(random.multinomial(10**7, skewed(random, 2, 64)), placement)
        assert decision.action in ("full", "moves", "stay")
        if decision.plan is not None:
            placement = decision.plan.placement
        assert placement.shares is None
