"""The membership rules under faults: random schedules, every moment of a short one, and planted faults."""

import pytest

from support.elastic_ambush import LeaverStops
from support.elastic_mutations import PLANTED, schedule_of
from support.elastic_world import Budget, World


@pytest.mark.parametrize("first", [0, 25])
def test_random_schedules_break_no_promise(first: int) -> None:
    for seed in range(first, first + 25):
        assert not World(seed).run(), f"seed {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 4000, 500))
def test_many_random_schedules_break_no_promise(first: int) -> None:
    for seed in range(first, first + 500):
        assert not World(seed).run(), f"seed {seed}"


def at_each_moment(kind: str, n: int, moments: range, **more: int) -> None:
    """One fault, at each of these moments of a schedule without any other."""
    none = dict.fromkeys(vars(Budget()), 0)
    for moment in moments:
        world = World(7, budget=Budget(**{**none, "publish": 2, **more}), n=n)
        world.loss = world.double = 0.0
        while not world.lives[-1].members.ledger.records:
            world.event()
        for _ in range(moment):
            world.event()
        setattr(world.budget, kind, 1)
        world.cause()
        found = world.run(events=120)
        assert not found, f"{kind} at moment {moment}: {found[0]}"


@pytest.mark.parametrize("kind", ["die", "stop", "join", "leave", "crash"])
def test_a_fault_at_each_moment(kind: str) -> None:
    at_each_moment(kind, 3, range(0, 90, 9))


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("kind", ["die", "stop", "join", "leave", "crash"])
def test_a_fault_at_every_moment(kind: str, n: int) -> None:
    at_each_moment(kind, n, range(250))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["die", "stop", "crash", "join", "leave"])
@pytest.mark.parametrize("kind", ["die", "stop", "crash"])
def test_two_faults_at_many_moments(kind: str, first: str) -> None:
    at_each_moment(kind, 3, range(0, 120, 2), **{first: 1})


def test_a_leaver_that_stops_before_those_who_stay_have_decided_harms_nothing() -> None:
    worlds = [LeaverStops(seed) for seed in range(30)]
    found = [world.run() for world in worlds]
    assert not any(found), found
    assert sum(world.cover["ambushed"] for world in worlds) >= 10


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_planted_faults_are_caught(name: str) -> None:
    assert any(schedule_of(seed, name).run() for seed in range(150))
