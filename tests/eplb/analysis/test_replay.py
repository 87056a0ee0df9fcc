"""Replay: who is used when, what it costs, and that a sweep equals its single runs."""

from __future__ import annotations

import numpy as np
import pytest

from evenroute.eplb.analysis.replay import (
    Replay,
    ReplaySettings,
    load_map,
    replay,
    static_factors,
    worthwhile_redundancy,
)
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import plan_placement
from evenroute.eplb.planner.policy import RebalancePolicy
from support.foreign_files import random_counts, random_map

LAYERS, EXPERTS, RANKS = 3, 16, 4


def settings(**changes: object) -> ReplaySettings:
    known: dict[str, object] = {"ep_size": RANKS, "num_redundant_experts": 4}
    return ReplaySettings(**(known | changes))  # type: ignore[arg-type]


def run(windows: np.ndarray, **changes: object) -> Replay:
    made = Replay(LAYERS, EXPERTS, settings(**changes))
    replay(windows, [made])
    return made


@pytest.fixture(scope="module")
def windows() -> np.ndarray:
    return random_counts(12, LAYERS, EXPERTS)


def test_none_is_the_start_placement(windows: np.ndarray) -> None:
    result = run(windows, policy="none").result
    start = Placement.initial(LAYERS, EXPERTS, 20, Topology(RANKS))
    expected = [balancedness(rank_loads(window, start)).mean for window in windows]
    assert [point.mean for point in result.points] == pytest.approx(expected)
    assert (result.num_plans, result.moves) == (0, 0)


def test_a_plan_takes_effect_in_the_window_after_it() -> None:
    constant = np.repeat(random_counts(1, LAYERS, EXPERTS), 6, axis=0)
    result = run(constant, policy="global").result
    plan = plan_placement(constant[0], topology=Topology(RANKS), num_slots=20)
    means = [point.mean for point in result.points]
    assert means[0] == pytest.approx(plan.before.mean)
    assert means[1:] == pytest.approx([plan.predicted.mean] * 5)
    assert result.points[1].moves == int(plan.moves.sum()) > 0
    assert result.placement is not None
    assert result.placement.digest() == plan.placement.digest()


def test_delay_and_interval() -> None:
    constant = np.repeat(random_counts(1, LAYERS, EXPERTS), 12, axis=0)
    result = run(constant, interval=3, delay=4).result
    assert [point.window for point in result.points if point.moves] == [7]
    # While a plan is under way no other is made, though one was due after window 5.
    assert [point.window for point in result.points if point.planned] == [2, 8, 11]


def test_dead_band_keeps_a_good_placement() -> None:
    """After the first plan nothing is gained any more: later plans are not used."""
    constant = np.repeat(random_counts(1, LAYERS, EXPERTS), 6, axis=0)
    assert run(constant, dead_band=0.01).result.num_switches == 1
    assert run(constant, dead_band=0.9).result.num_switches == 0


def test_predictors() -> None:
    """Two windows with different hot experts: the plan fits what the predictor saw."""
    first = np.ones((LAYERS, EXPERTS), int) * 10
    second = first.copy()
    first[:, 0], second[:, 9] = 200, 100
    wanted = {
        "last": second.astype(float),
        "mean": first + second.astype(float),
        "decay": first * 0.5**0.5 + second,
    }
    for predictor, loads in wanted.items():
        made = run(np.stack([first, second, second]), predictor=predictor, history=2, interval=2)
        plan = plan_placement(loads, topology=Topology(RANKS), num_slots=20)
        assert made.result.placement is not None
        assert made.result.placement.digest() == plan.placement.digest(), predictor


def test_gain_is_against_no_eplb_and_exact() -> None:
    """One layer, two ranks: 30+10 | 10+10 without; a redundant pair of slots spreads expert 0."""
    loads = np.array([[[30, 10, 10, 10]]] * 2)
    start = Placement(np.array([[0, 1, 2, 0, 3, 1]]), 4, Topology(2))
    made = Replay(1, 4, ReplaySettings(ep_size=2, num_redundant_experts=2, policy="none"), start)
    replay(loads, [made])
    facts = made.result.as_dict(experts_share=0.5, expert_bytes=100)
    # Without: fullest rank 40. With: 15 + 5 + 10 and 15 + 10 + 5.
    assert facts["balancedness_total"] == 1.0
    assert facts["expert_time_saved"] == pytest.approx(1 - 30 / 40)
    assert facts["step_time_gain"] == pytest.approx(0.125)
    assert facts["moved_bytes"] == 0


def test_bytes_are_moves_times_the_size(windows: np.ndarray) -> None:
    facts = run(windows).result.as_dict(experts_share=0.4, expert_bytes=7)
    assert facts["moved_bytes"] == 7 * facts["moves"] > 0
    assert facts["moves"] == sum(point["moves"] for point in facts["points"])
    assert run(windows).result.as_dict(experts_share=0.4, expert_bytes=None)["moved_bytes"] is None


def test_a_sweep_is_its_single_runs_and_repeats(windows: np.ndarray) -> None:
    choices = [settings(interval=i, policy=p) for i in (1, 4) for p in ("none", "global")]
    together = replay(windows, [Replay(LAYERS, EXPERTS, one) for one in choices])
    for result, one in zip(together, choices, strict=True):
        alone = Replay(LAYERS, EXPERTS, one)
        replay(windows, [alone])
        share = {"experts_share": 0.4, "expert_bytes": 1}
        assert result.as_dict(**share) == alone.result.as_dict(**share)


def test_windows_without_load_are_no_data() -> None:
    windows = random_counts(3, LAYERS, EXPERTS)
    windows[1] = 0
    result = run(windows).result
    assert [point.mean is None for point in result.points] == [False, True, False]
    assert result.mean is not None


def test_worthwhile_redundancy(windows: np.ndarray) -> None:
    choices = [Replay(LAYERS, EXPERTS, settings(num_redundant_experts=n)) for n in (0, 4, 8, 16)]
    results = replay(windows, choices)
    found = worthwhile_redundancy(results)
    assert found is not None
    totals = {r.settings.num_redundant_experts: r.total for r in results}
    best = max(value for value in totals.values() if value is not None)
    chosen = found["num_redundant_experts"]
    assert (totals[chosen] or 0) >= 0.99 * best
    assert all((totals[n] or 0) < 0.99 * best for n in totals if n < chosen)
    assert worthwhile_redundancy(results[:1]) is None


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_static_dispatch_takes_the_nearest(nodes: int) -> None:
    """Against a plain loop over source ranks: own replica, else the node's, else all of them."""
    topology = Topology(RANKS, nodes)
    placement = Placement(random_map(LAYERS, EXPERTS, 24, RANKS), EXPERTS, topology)
    expected = np.zeros((LAYERS, 24))
    for layer in range(LAYERS):
        row = placement.physical_to_logical[layer]
        for expert in range(EXPERTS):
            slots = np.flatnonzero(row == expert)
            ranks = slots // placement.num_local_slots
            for source in range(RANKS):
                near = ranks == source
                if not near.any():
                    near = ranks // topology.ranks_per_node == source // topology.ranks_per_node
                if not near.any():
                    near = np.ones(len(slots), bool)
                expected[layer, slots[near]] += 1 / near.sum() / RANKS
    assert np.allclose(static_factors(placement), expected)


def test_static_dispatch_loads_sum_to_the_loads() -> None:
    loads = random_counts(1, LAYERS, EXPERTS)[0]
    placement = Placement(random_map(LAYERS, EXPERTS, 24, RANKS), EXPERTS, Topology(RANKS))
    assert load_map(placement, "static")(loads).sum(axis=1) == pytest.approx(loads.sum(axis=1))
    assert load_map(placement, "dynamic")(loads) == pytest.approx(rank_loads(loads, placement))


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"policy": "best"}, "policy='best'"),
        ({"predictor": "psychic"}, "predictor="),
        ({"dispatch": "psychic"}, "dispatch="),
        ({"interval": 0}, "interval=0"),
        ({"delay": -1}, "delay=-1"),
        ({"history": 0}, "history=0"),
        ({"dead_band": 1.5}, "dead_band"),
        ({"num_redundant_experts": -1}, "num_redundant_experts"),
        ({"num_redundant_experts": 5}, "num_slots=21"),
        ({"num_nodes": 3}, "num_nodes=3"),
    ],
)
def test_wrong_settings(changes: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Replay(LAYERS, EXPERTS, settings(**changes))


def test_rebalancer_policy_decides_like_the_rebalancer(windows: np.ndarray) -> None:
    """A full plan first, then what `RebalancePolicy` says about the same windows, and no more."""
    big = windows * 1000
    made = run(big, policy="rebalancer")
    policy = RebalancePolicy(Topology(RANKS), 20)
    placement = Placement.initial(LAYERS, EXPERTS, 20, Topology(RANKS))
    actions = []
    for window in big:
        decision = policy.decide(window, placement)
        actions.append(decision.action)
        placement = placement if decision.plan is None else decision.plan.placement
    assert actions[0] == "full"
    assert made.result.points[0].planned
    last = made._pending[1] if made._pending is not None else made.result.placement
    assert last is not None
    assert last.digest() == placement.digest()
    assert made.result.num_plans == len(big)
    assert made.result.moves < run(big, policy="global").result.moves


def test_rebalancer_policy_adds_windows_up_between_decisions(windows: np.ndarray) -> None:
    made = run(windows * 1000, policy="rebalancer", interval=4)
    policy = RebalancePolicy(Topology(RANKS), 20)
    start = Placement.initial(LAYERS, EXPERTS, 20, Topology(RANKS))
    first = policy.decide((windows * 1000)[:4].sum(axis=0), start)
    assert first.plan is not None
    assert made.result.points[4].moves == int(first.plan.moves.sum())
    assert [point.window for point in made.result.points if point.planned] == [3, 7, 11]
