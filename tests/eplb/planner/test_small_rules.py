"""Small promises of the planner: what is not good enough is searched, no data scores nothing, wrong numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from evenroute.eplb.loads.balance import placement_balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.auto import (
    CROSSING_PRICE,
    MOVE_PRICE,
    SHARE_PRICE,
    Candidate,
    best_candidate,
    score_of,
)
from evenroute.eplb.planner.counts import even_balancedness, improve_even
from evenroute.eplb.planner.full import full_placement
from evenroute.eplb.planner.moves import MoveCost
from evenroute.eplb.planner.plan import plan_placement
from evenroute.eplb.planner.policy import RebalancePolicy

L, E, P, R = 6, 32, 40, 8
START = Placement.initial(L, E, P, Topology(R))


def skewed() -> np.ndarray:
    loads = np.random.default_rng(0).lognormal(0, 1.5, (L, E))
    return loads / loads.max(axis=1, keepdims=True)


def test_layers_below_good_enough_are_searched_for_better_counts_and_moves() -> None:
    loads = skewed()
    plain = full_placement(loads, START, search_counts=False).physical_to_logical
    before = even_balancedness(loads, plain, R)
    rows = plain.copy()
    improve_even(loads, rows, R, 1)
    after = even_balancedness(loads, rows, R)
    assert (after >= before).all()
    assert after[3] > 0.999  # further counts alone end at 0.9979
    assert after[4] > 0.998
    kept = before >= 0.998
    assert (rows[kept] == plain[kept]).all(), "good layers stay as they are"
    made = full_placement(loads, START).physical_to_logical
    assert (even_balancedness(loads, made, R) >= after - 1e-12).all()


def score(loads: np.ndarray, moves: int = 0, **changes: object) -> float:
    given: dict[str, object] = {
        "crossing": None,
        "cost": None,
        "noise": 0.0,
        "at_start": False,
        "policy": "stay",
    }
    given |= changes
    result = placement_balancedness(loads, START)
    policy, crossing = given.pop("policy"), given.pop("crossing")
    return score_of(policy, result, moves, crossing, loads, START, START, **given)  # type: ignore[arg-type]


def test_a_score_is_balancedness_less_what_the_change_costs() -> None:
    loads, nothing = skewed(), np.zeros((L, E))
    mean = placement_balancedness(loads, START).mean
    assert mean is not None
    assert score(loads) == mean
    assert score(loads, policy="global") == pytest.approx(mean - SHARE_PRICE)
    assert score(loads, 24, policy="global", noise=0.01) == pytest.approx(
        mean - SHARE_PRICE - MOVE_PRICE * 24 / (L * P) - 0.02
    )
    assert score(loads, 24, policy="global", noise=0.01, at_start=True) == mean
    assert score(loads, crossing=0.25) == pytest.approx(mean - CROSSING_PRICE * 0.25)
    assert score(nothing) == 0.0, "no data is no gain"
    cost = MoveCost(1e6, 1e9, 1e9, 100.0)
    assert score(nothing, cost=cost) == 0.0
    assert score(loads, cost=cost) == 0.0, "the placement in use gains nothing on itself"
    seconds = 24 * 1e6 / 1e9 / R
    assert score(loads, 24, cost=cost, policy="global") == pytest.approx(-seconds / 100.0 - SHARE_PRICE)


def test_the_earlier_of_equal_candidates_is_taken() -> None:
    made = [
        Candidate(name, START, value, None, 0, None) for name, value in (("a", 0.5), ("b", 0.5), ("c", 0.4))
    ]
    best, reason = best_candidate(made, 0, False)
    assert best.policy == "a"
    assert reason.startswith("auto takes a no data with 0.00% moved, because balancedness less the price")


@pytest.mark.parametrize(
    "call",
    [
        lambda n: plan_placement(skewed(), topology=Topology(R), num_slots=P, num_threads=n),
        lambda n: RebalancePolicy(Topology(R), P, num_threads=n),
    ],
)
@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_a_wrong_number_of_threads_is_refused(call: Callable[[object], object], bad: object) -> None:
    with pytest.raises(ValueError, match="num_threads"):
        call(bad)
    call(1)
