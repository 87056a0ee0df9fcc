"""Figures out of the ranks' reports: fitted, robust, kept."""

import numpy as np
import pytest

from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.price.measured import MeasuredCosts, RankTimes
from evenroute.eplb.planner.price.relation import StepTimeFit
from evenroute.eplb.planner.price.worth import Worth

BASE, BY_MEAN, BY_EXCESS = 0.05, 8e-7, 6e-7


def seconds_of(mean: float, hottest: float) -> float:
    return BASE + BY_MEAN * mean + BY_EXCESS * (hottest - mean)


def drawn(count: int, seed: int = 0, noise: float = 0.02, spread: float = 0.3):
    random = np.random.default_rng(seed)
    for _ in range(count):
        mean = 1e5 * random.uniform(1 - spread, 1 + spread)
        hottest = mean * random.uniform(1.02, 1.6)
        yield seconds_of(mean, hottest) * (1 + noise * random.standard_normal()), mean, hottest


def test_the_relation_is_found_under_noise_and_tokens_are_not_taken_for_imbalance() -> None:
    fit = StepTimeFit()
    for row in drawn(60):
        fit.add(*row)
    found = fit.relation()
    assert found is not None
    assert found.by_excess == pytest.approx(BY_EXCESS, rel=0.15)
    assert found.balanced(1e5) == pytest.approx(seconds_of(1e5, 1e5), rel=0.1)
    assert found.load_fraction(1e5) == pytest.approx(BY_EXCESS * 1e5 / seconds_of(1e5, 1e5), rel=0.2)


def test_the_same_number_of_tokens_in_every_interval_is_enough() -> None:
    fit = StepTimeFit()
    for _, _, hottest in drawn(20):
        fit.add(seconds_of(1e5, hottest), 1e5, hottest)
    found = fit.relation()
    assert found is not None
    assert found.by_excess == pytest.approx(BY_EXCESS, rel=0.01)


@pytest.mark.parametrize("what", ["few", "noise", "tokens alone", "balanced"])
def test_nothing_is_said_where_the_intervals_do_not_show_it(what: str) -> None:
    fit, random = StepTimeFit(), np.random.default_rng(1)
    for seconds, mean, hottest in drawn(4 if what == "few" else 50):
        if what == "noise":
            seconds = random.uniform(0.01, 0.2)
        if what == "tokens alone":
            seconds = (BASE + 8e-7 * mean) * (1 + 0.02 * random.standard_normal())
        fit.add(seconds, mean, mean if what == "balanced" else hottest)
    assert fit.relation() is None


def reports(measured: MeasuredCosts, ranks: int, run: int = 1, **changed) -> None:
    times = {"num_steps": 50, "step_seconds": 0.1, "lost_seconds": 0.4, "transfer_seconds": 1.6, "slots": 80}
    for rank in range(ranks):
        measured.add(run, rank, RankTimes(**(times | {"bytes_per_slot": 4e7} | changed)))


def test_a_slot_costs_what_the_steps_lost_to_moving() -> None:
    given, measured = TimeCosts(), MeasuredCosts()
    assert measured.costs(given, 8) is given
    reports(measured, 8)
    found = measured.costs(given, 8)
    assert (found.source, found.step_source) == ("measured", "default")
    assert found.moving(80, 8) == pytest.approx(0.4)
    assert found.bytes_per_slot == 4e7
    reports(measured, 8, lost_seconds=4.8)  # steps may lose more than transfers took
    assert measured.costs(given, 8).moving(80, 8) == pytest.approx(4.8)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_one_odd_rank_changes_nothing(ranks: int) -> None:
    plain, odd = MeasuredCosts(), MeasuredCosts()
    for measured in (plain, odd):
        reports(measured, ranks)
    odd.add(1, ranks - 1, RankTimes(2**31, 3600.0, 1e9, 1e9, 2**40, 2.0**40))
    assert odd.costs(TimeCosts(), ranks) == plain.costs(TimeCosts(), ranks)
    assert odd.end_interval(1e5, 2e5) == plain.end_interval(1e5, 2e5) == 0.1


def test_it_goes_on_after_a_restart_and_a_new_run_counts_its_own_moves() -> None:
    measured = MeasuredCosts()
    for seconds, mean, hottest in drawn(30):
        reports(measured, 4, step_seconds=seconds)
        measured.end_interval(mean, hottest)
    again = MeasuredCosts(measured.state)
    assert again.state == measured.state
    assert again.costs(TimeCosts(), 4) == measured.costs(TimeCosts(), 4)
    assert measured.costs(TimeCosts(), 4).step_source == "measured"
    for one in (measured, again):
        reports(one, 4, run=2, slots=0, lost_seconds=0.0, transfer_seconds=0.0)
        assert one.moved.slots == 0
    assert again.costs(TimeCosts(), 4) == measured.costs(TimeCosts(), 4)
    assert again.costs(TimeCosts(), 4).source == "measured", "of the run before"


def test_an_interval_without_reports_or_load_teaches_nothing() -> None:
    measured = MeasuredCosts()
    assert measured.end_interval(1e5, 2e5) is None
    reports(measured, 2)
    assert measured.end_interval(0.0, 0.0) is None
    assert measured.state["sums"] == [0.0] * 16


def test_what_rebalancing_saved_is_told_by_default_then_by_the_measured_relation() -> None:
    worth, measured, given = Worth(1), MeasuredCosts(), TimeCosts(load_fraction=0.25)
    assert worth.savings(measured, given, 8) is None
    worth.moves = 40
    worth.served(100, 2e5, 1e5, 1e5, 0.1, given)
    first = worth.savings(measured, given, 8)
    assert first is not None
    assert first.saved == pytest.approx(8 * 100 * 0.1 * 0.25)
    assert first.cost == pytest.approx(8 * given.moving(40, 8))
    assert "(default prices)" in first.told()
    for seconds, mean, hottest in drawn(40, noise=0.0):
        reports(measured, 8, step_seconds=seconds)
        measured.end_interval(mean, hottest)
    found = Worth(**worth.state).savings(measured, measured.costs(given, 8), 8)
    assert found is not None
    assert found.saved == pytest.approx(8 * 100 * BY_EXCESS * 1e5, rel=1e-3)
    assert found.cost == pytest.approx(8 * 0.4)
    assert (found.saved_source, found.cost_source) == ("measured", "measured")
