"""Moves and balance priced in seconds."""

import pytest

from evenroute.eplb.planner.cost import TimeCosts

COSTS = TimeCosts(seconds_per_slot=0.002, slowdown=0.5, load_fraction=0.25)


def test_ranks_fetch_side_by_side_and_serving_loses_a_part_of_the_time() -> None:
    assert COSTS.moving(80, 8) == pytest.approx(80 / 8 * 0.002 * 0.5)
    assert COSTS.moving(0, 8) == 0.0


def test_a_step_is_as_long_as_its_hottest_rank_makes_a_part_of_it() -> None:
    # At balancedness 0.5 the hottest rank has twice the mean: 0.75 + 0.25 * 2 steps of perfect balance.
    assert COSTS.saved(100.0, before=0.5, after=1.0) == pytest.approx(100 * (1 - 1 / 1.25))
    assert COSTS.saved(100.0, before=0.8, after=0.8) == 0.0
    assert COSTS.saved(100.0, before=1.0, after=0.5) < 0.0


def test_the_price_of_a_slot_is_what_it_costs_over_what_balance_brings() -> None:
    # Near perfect balance a layer's share 1/L of the step falls by load_fraction for each unit of balancedness.
    assert COSTS.price_per_slot(60.0, num_layers=4, num_ranks=8) == pytest.approx(
        COSTS.moving(1, 8) * 4 / (60.0 * 0.25)
    )


@pytest.mark.parametrize("name", ["bytes_per_slot", "seconds_per_slot", "step_seconds", "load_fraction"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), "1"])
def test_amounts_are_positive_numbers(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        TimeCosts(**{name: value})


@pytest.mark.parametrize("name", ["slowdown", "load_fraction"])
def test_parts_lie_between_0_and_1(name: str) -> None:
    assert getattr(TimeCosts(**{name: 1.0}), name) == 1.0
    with pytest.raises(ValueError, match=rf"{name}=1.5, expected a number in \[0, 1\]"):
        TimeCosts(**{name: 1.5})


def test_without_a_price_moves_are_those_of_44_mb_over_25_gb_a_second() -> None:
    usual = TimeCosts()
    assert usual.seconds_per_slot == pytest.approx(usual.bytes_per_slot / 25e9)
    assert (usual.slowdown, usual.step_seconds, usual.load_fraction, usual.source) == (
        1.0,
        0.05,
        0.5,
        "default",
    )
