"""Sets of shares for small batches: few experts on the longest rank, and never longer than even dealing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenroute.eplb.placement.classes import ShareClasses, default_class_rows
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.classes.sets import (
    class_times,
    classes_text,
    expected_tokens,
    longest_rank,
    sets_gain,
    with_classes,
)
from evenroute.eplb.planner.classes.times import ExpertTimes
from evenroute.eplb.planner.kernels.classes import choose_replicas
from evenroute.eplb.planner.plan import plan_placement
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy
from support.placements import random_placement

TIMES = ExpertTimes()


def zipf(layers: int, experts: int, exponent: float = 0.8, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    load = 1e5 / np.arange(1, experts + 1) ** exponent
    return np.stack([rng.permutation(load) for _ in range(layers)])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), top_k=st.sampled_from([1, 2, 8]), exponent=st.floats(0.0, 2.0))
def test_no_set_takes_longer_than_even_or_planned_shares(seed: int, top_k: int, exponent: float) -> None:
    placement = random_placement(np.random.default_rng(seed), 2, 16, 32, Topology(4), uneven=True)
    loads = zipf(2, 16, exponent, seed)
    made = with_classes(placement, loads, top_k, TIMES)
    assert made.rows()[0].slots is not placement
    np.testing.assert_array_equal(made.all_shares(), placement.all_shares())
    sizes = default_class_rows(16, top_k, 4)
    for size, taken, even in class_times(made, loads, top_k, TIMES):
        assert size in sizes
        own = longest_rank(placement, loads, top_k, size, TIMES, placement.all_shares()).mean()
        assert taken <= min(own, even) * (1 + 1e-9)


def test_one_replica_an_expert_spreads_experts_evenly_over_ranks() -> None:
    """Weights alone count: a rank's longest time is its number of experts, and an even one is there to be found."""
    topology, loads = Topology(8), zipf(3, 64)
    placement = plan_placement(loads, topology=topology, num_slots=96, num_threads=1).placement
    for row, load in zip(placement.physical_to_logical, loads, strict=True):
        used = np.empty(96, np.bool_)
        tokens = np.full(64, 50.0) * load / load  # all touched, none beyond the crossover
        longest = choose_replicas(row, tokens, 8, 10.0, 0.01, used)
        assert np.bincount(row[used], minlength=64).tolist() == [1] * 64
        assert used.reshape(8, 12).sum(axis=1).max() == 8
        assert longest == pytest.approx(80.0)


def test_hot_experts_use_as_many_replicas_as_their_tokens_ask_for() -> None:
    row = np.array([0, 1, 0, 2, 0, 3, 0, 4], np.int32)
    used = np.empty(8, np.bool_)
    choose_replicas(row, np.array([25.0, 1.0, 1.0, 1.0, 1.0]), 4, 10.0, 1.0, used)
    assert int(used[row == 0].sum()) == 3  # ceil(25 / 10)
    assert used[row > 0].all()


def test_an_idle_layer_and_a_placement_without_redundancy_have_none() -> None:
    loads = zipf(2, 16)
    loads[1] = 0
    made = with_classes(Placement.initial(2, 16, 32, Topology(4)), loads, 2, TIMES)
    assert made.classes is not None
    assert made.row(0).classes is not None
    assert made.row(1).classes is None
    assert with_classes(Placement.initial(2, 16, 16, Topology(4)), loads, 2, TIMES).classes is None


def test_layers_may_have_a_set_for_small_batches_alone() -> None:
    placement, loads = Placement.initial(2, 16, 32, Topology(4)), zipf(2, 16)
    full = with_classes(placement, loads, 2, TIMES).classes
    assert full is not None
    last = np.array([[True, True], [True, False]])
    sets = ShareClasses(
        np.where(last, full.rows, 0), np.where(last[:, :, None], full.shares, 0).astype(np.uint16)
    )
    made = replace(placement, classes=sets)
    again = Placement.from_rows(made.rows(), 16, Topology(4))
    assert again.digest() == made.digest()
    assert class_times(again, loads, 2, TIMES) == class_times(made, loads, 2, TIMES) != []


def test_expected_tokens_stay_below_one_a_token() -> None:
    tokens = expected_tokens(np.array([[90.0, 10.0, 0.0]]), 2, 10, 4)
    assert tokens.tolist() == [[40.0, 8.0, 0.0]]
    assert expected_tokens(np.zeros((1, 3)), 2, 10, 4).tolist() == [[0.0, 0.0, 0.0]]


def test_plans_with_shares_carry_sets_where_k_is_known() -> None:
    loads, topology = zipf(2, 16), Topology(4)
    for policy in ("weighted", "shares", "joint", "auto"):
        plan = plan_placement(loads, topology=topology, num_slots=32, policy=policy, top_k=2, num_threads=1)
        assert plan.placement.classes is not None, policy
        assert "shares by batch size, longest rank a layer: up to" in plan.notices[-1]
        assert "(roofline)" in plan.notices[-1]
    for names in ({"policy": "global", "top_k": 2}, {"policy": "weighted"}):
        plan = plan_placement(loads, topology=topology, num_slots=32, num_threads=1, **names)  # type: ignore[arg-type]
        assert plan.placement.classes is None, names
    with pytest.raises(ValueError, match="top_k"):
        plan_placement(loads, topology=topology, num_slots=32, top_k=0)


def test_the_policy_publishes_sets_alone_where_they_save_time() -> None:
    topology, counts = Topology(4), zipf(2, 16).astype(np.int64)
    policy = RebalancePolicy(topology, 32, PolicySettings(top_k=2), num_threads=1)
    first = policy.decide(counts, Placement.initial(2, 16, 32, topology))
    assert first.plan is not None
    assert first.plan.placement.classes is not None
    assert "shares by batch size" in first.reason
    without = replace(first.plan.placement, classes=None)
    found = policy.decide(counts, without)
    assert found.action == "shares"
    assert found.plan is not None
    assert not found.plan.moves.any()
    assert found.plan.placement.digest() == first.plan.placement.digest()
    assert policy.decide(counts, found.plan.placement).action == "stay"
    even = RebalancePolicy(topology, 32, PolicySettings(top_k=2, uneven_shares=False), num_threads=1)
    decision = even.decide(counts, Placement.initial(2, 16, 32, topology))
    assert decision.plan is None or decision.plan.placement.classes is None


def test_gain_and_text() -> None:
    loads, plain = zipf(2, 16), Placement.initial(2, 16, 32, Topology(4))
    made = with_classes(plain, loads, 2, TIMES)
    assert sets_gain(plain, made, loads, 2, TIMES) > 0.3
    assert sets_gain(made, made, loads, 2, TIMES) == 0.0
    assert classes_text([], TIMES) == ""
    assert class_times(plain, loads, 2, TIMES) == []


def test_times() -> None:
    assert TIMES.crossover == pytest.approx(139.7, abs=0.1)
    tokens = np.array([[0, 1, 140, 1400]])
    assert TIMES.of_ranks(tokens, 2).tolist() == [[10.2, pytest.approx(10.22 + 102.2)]]
    assert TIMES.expected(np.array([[0.0, 100.0]]), 2).tolist() == [[0.0, pytest.approx(10.2)]]
    for names in ({"expert_us": 0}, {"token_us": float("nan")}, {"source": "guessed"}):
        with pytest.raises(ValueError, match=next(iter(names))):
            ExpertTimes(**names)  # type: ignore[arg-type]


def test_even_shares_are_what_even_dealing_takes() -> None:
    placement, loads = Placement.initial(1, 8, 16, Topology(4)), np.ones((1, 8))
    even = even_shares(placement.physical_to_logical)
    assert longest_rank(placement, loads, 8, 1000, TIMES, even).tolist() == [
        pytest.approx(4 * 2000 * 0.073, rel=1e-4)
    ]
