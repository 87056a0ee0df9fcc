"""When to plan: quiet on stationary noise, awake on drift."""

import numpy as np
import pytest

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy, answer


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


def alternating(random: np.random.Generator, windows: int, layers: int = 3):
    kinds = [skewed(random, layers, 64), skewed(random, layers, 64)]
    for window in range(windows):
        truth = kinds[window % 2]
        yield random.multinomial(10**6, truth), kinds[(window + 1) % 2]


def test_alternating_traffic_is_balanced_for_the_next_window_not_for_the_last() -> None:
    policy = RebalancePolicy(Topology(8), 72)
    placement = Placement.initial(3, 64, 72, Topology(8))
    following, moved = [], []
    for counts, truth in alternating(np.random.default_rng(4), 24):
        decision = policy.decide(counts, placement)
        moved.append(0 if decision.plan is None else int(decision.plan.moves.sum()))
        placement = placement if decision.plan is None else decision.plan.placement
        following.append(balancedness(rank_loads(truth, placement)).mean)
    assert min(following[10:]) > 0.98
    assert sum(moved[4:]) <= 0.02 * 20 * 3 * 72


def test_moves_keep_to_the_budget_over_any_twenty_windows() -> None:
    random = np.random.default_rng(5)
    settings = PolicySettings(max_move_fraction=0.03)
    policy = RebalancePolicy(Topology(8), 72, settings)
    policy.skip_start()
    placement = Placement.initial(2, 64, 72, Topology(8))
    moved = []
    for _ in range(30):
        decision = policy.decide(random.multinomial(10**6, skewed(random, 2, 64)), placement)
        if decision.plan is not None:
            moved.append(int(decision.plan.moves.sum()))
            placement = decision.plan.placement
        else:
            moved.append(0)
    whole = 0.03 * 2 * 72
    assert max(moved) <= 4 * whole
    assert max(moved) > whole, "a change of traffic is answered with more than one window's budget"
    assert all(sum(moved[first : first + 20]) <= 20 * whole for first in range(11))


def test_moves_must_save_more_time_than_they_cost_and_the_reason_says_whose_figures() -> None:
    def decide(settings: PolicySettings):
        random = np.random.default_rng(6)
        policy = RebalancePolicy(Topology(8), 72, settings)
        policy.skip_start()
        placement = Placement.initial(2, 64, 72, Topology(8))
        return policy.decide(random.multinomial(10**6, skewed(random, 2, 64)), placement)

    by_default = decide(PolicySettings())
    assert by_default.action == "moves"
    assert "(default figures)" in by_default.reason
    measured = decide(
        PolicySettings(costs=TimeCosts(seconds_per_slot=1e-4, source="measured", step_source="measured"))
    )
    assert measured.action == "moves"
    assert "(measured figures)" in measured.reason
    partly = decide(PolicySettings(costs=TimeCosts(seconds_per_slot=1e-4, source="given")))
    assert "(cost given, gain by default figures)" in partly.reason
    slow = TimeCosts(seconds_per_slot=60.0, source="measured")
    assert decide(PolicySettings(costs=slow, life_seconds=1.0)).action in ("shares", "stay")
    policy = RebalancePolicy(Topology(8), 72)  # figures that come later than the settings
    policy.skip_start()
    policy.costs = TimeCosts(seconds_per_slot=1e4, source="measured")
    random = np.random.default_rng(6)
    placement = Placement.initial(2, 64, 72, Topology(8))
    assert policy.decide(random.multinomial(10**6, skewed(random, 2, 64)), placement).action != "moves"


def test_a_process_without_memory_answers_as_decide_does_and_memory_is_rebuilt_from_windows() -> None:
    seen = [counts for counts, _ in alternating(np.random.default_rng(7), 6)]
    start = Placement.initial(3, 64, 72, Topology(8))
    whole, parts = RebalancePolicy(Topology(8), 72), RebalancePolicy(Topology(8), 72)
    placement = start
    for counts in seen:
        decision = whole.decide(counts, placement)
        question = parts.observe(counts, placement)
        assert question is not None
        other = answer(question, placement, parts.settings)
        parts.settle(other)
        assert (other.action, other.reason) == (decision.action, decision.reason)
        placement = placement if decision.plan is None else decision.plan.placement
        assert other.plan is None or other.plan.placement.digest() == placement.digest()
    restarted = RebalancePolicy(Topology(8), 72)
    restarted.remember(seen)
    for old, new in zip(whole.memory.forecast(), restarted.memory.forecast(), strict=True):
        assert np.array_equal(old, new)


def test_hierarchical_settings_keep_groups_on_nodes() -> None:
    random = np.random.default_rng(8)
    topology = Topology(8, 2)
    policy = RebalancePolicy(topology, 80, PolicySettings(hierarchical=True, num_groups=4))
    placement = Placement.initial(2, 64, 80, topology)
    for _ in range(4):
        decision = policy.decide(random.multinomial(10**6, skewed(random, 2, 64)), placement)
        placement = placement if decision.plan is None else decision.plan.placement
        group = (placement.physical_to_logical // 16).reshape(2, 2, -1)
        for layer in group:
            assert not set(layer[0].tolist()) & set(layer[1].tolist())


def test_a_steady_layer_gets_no_moves_and_a_restless_one_those_of_its_neighbours() -> None:
    random = np.random.default_rng(9)
    truth = skewed(random, 4, 64)
    policy = RebalancePolicy(Topology(8), 72)
    placement = Placement.initial(4, 64, 72, Topology(8))
    moved = np.zeros(4, dtype=np.int64)
    most = 0
    for window in range(16):
        if window % 4 == 3:
            truth[2] = skewed(random, 1, 64)[0]
        decision = policy.decide(random.multinomial(10**6, truth), placement)
        if decision.plan is not None:
            moved += decision.plan.moves if window else 0
            most = max(most, int(decision.plan.moves[2]) if window else 0)
            placement = decision.plan.placement
    assert moved[[0, 1, 3]].tolist() == [0, 0, 0]
    assert moved[2] > 0
    assert most > 0.02 * 72, "more than its own part of the budget"
