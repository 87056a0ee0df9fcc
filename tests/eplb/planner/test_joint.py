"""Joint planning: one placement for several windows, within its budget, never worse than what is in use."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.full import full_placement, respects_groups
from evenroute.eplb.planner.history.expected import Expected
from evenroute.eplb.planner.joint import full_joint_placement, joint_placement, node_bars
from evenroute.eplb.planner.kernels.two_modes import find_kinds
from evenroute.eplb.planner.plan import plan_placement
from support.planning import plain_check, plain_moves


def windows_of(random: np.random.Generator, count: int, layers: int, experts: int) -> np.ndarray:
    base = random.lognormal(0, 1, (layers, experts))
    return base * random.lognormal(0, 0.7, (count, layers, experts))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 4),
    st.sampled_from([(2, 6, 8), (4, 8, 12), (4, 10, 12), (3, 7, 12), (5, 5, 5)]),
    st.sampled_from([0, 1, 3, 8]),
    st.booleans(),
    st.sampled_from(["all", "one window idle", "one layer idle", "one expert hot"]),
)
def test_valid_within_budget_no_worse_and_the_same_every_time(seed, count, shape, max_moves, even, kind):
    ranks, experts, slots = shape
    random = np.random.default_rng(seed)
    loads = windows_of(random, count, 2, experts)
    if kind == "one window idle":
        loads[0] = 0.0
    elif kind == "one layer idle":
        loads[:, 1] = 0.0
    elif kind == "one expert hot":
        loads[:, :, 0] *= 1e9
    expected = Expected(loads, random.dirichlet(np.ones(count)))
    start = Placement.initial(2, experts, slots, Topology(ranks))

    def make(scale: float, threads: int) -> Placement:
        scaled = Expected(loads * scale, expected.weights)
        return joint_placement(scaled, start, max_moves=max_moves, even=even, num_threads=threads)

    made = make(1.0, 1)
    plain_check(made, loads[-1], ranks)
    assert sum(plain_moves(start, made, ranks)) <= max_moves
    assert not even or made.shares is None
    before, after = expected.balancedness(start), expected.balancedness(made)
    assert (after.per_layer >= before.per_layer - 1e-9).all()
    idle = ~loads.any(axis=(0, 2))
    assert (made.physical_to_logical[idle] == start.physical_to_logical[idle]).all()
    assert make(1.0, 2).digest() == made.digest()
    assert make(0.5, 1).digest() == made.digest()


def test_expected_balancedness_is_the_weighted_mean_over_windows_counted_by_hand() -> None:
    placement = Placement(np.array([[0, 1, 2, 0], [0, 1, 2, 1]], dtype=np.int32), 3, Topology(2))
    loads = np.array([[[4.0, 2, 2], [0, 0, 0]], [[2.0, 6, 4], [1, 2, 1]]])
    found = Expected(loads, np.array([0.25, 0.75])).balancedness(placement)
    # Layer 0: ranks 4 and 4, then 7 and 5; layer 1: no load, then 2 and 2.
    assert found.per_layer.tolist() == pytest.approx([0.25 * 1 + 0.75 * 6 / 7, 1.0])
    assert found.mean == pytest.approx((0.25 + 0.75 * 6 / 7 + 1) / 2)
    assert found.worst_layer == 0


def test_two_kinds_of_traffic_are_balanced_at_once() -> None:
    random = np.random.default_rng(5)
    loads = windows_of(random, 2, 3, 64)
    topology = Topology(8)
    start = full_placement(loads[0], Placement.initial(3, 64, 80, topology))
    for_mean = plan_placement(
        loads / loads.sum(axis=2, keepdims=True),
        topology=topology, num_slots=80, current=start, policy="weighted", max_moves=24, windows="mean",
    ).placement  # fmt: skip
    joint = plan_placement(
        loads, topology=topology, num_slots=80, current=start, policy="joint", max_moves=24
    )
    expected = Expected(loads, np.full(2, 0.5))
    assert joint.policy == "joint"
    assert joint.moves.sum() <= 24
    assert joint.predicted.mean == pytest.approx(expected.balancedness(joint.placement).mean)
    assert expected.balancedness(for_mean).mean < 0.93
    assert joint.predicted.mean > 0.96
    fresh = plan_placement(loads, topology=topology, num_slots=80, policy="joint")
    assert fresh.predicted.mean > 0.99


def test_a_steady_layer_gets_no_moves_and_a_restless_one_all() -> None:
    random = np.random.default_rng(6)
    loads = windows_of(random, 1, 2, 64)
    start = full_joint_placement(
        Expected(loads, np.ones(1)), Placement.initial(2, 64, 72, Topology(8)), num_threads=1
    )
    changed = loads.copy()
    changed[0, 1] = random.permutation(changed[0, 1])
    made = joint_placement(Expected(changed, np.ones(1)), start, max_moves=8)
    moves = start.moved_slots(made)
    assert moves[0] == 0
    assert 0 < moves[1] <= 8


def test_limits_of_a_plan_hold_for_joint_too() -> None:
    loads = windows_of(np.random.default_rng(7), 3, 2, 32)
    topology = Topology(4)
    start = Placement.initial(2, 32, 40, topology)

    def plan(**limits):
        return plan_placement(loads, topology=topology, num_slots=40, current=start, policy="joint", **limits)

    free = plan()
    enough = plan(target=0.9)
    assert 0.9 <= enough.predicted.mean < free.predicted.mean
    assert enough.moves.sum() < free.moves.sum()
    few = plan(max_moves_per_rank=1)
    old, new = start.holds(), few.placement.holds()
    assert ((new & ~old).sum(axis=(0, 2)) <= 1).all()
    unreached = plan(target=1.0, max_moves=1)
    assert any("target 1.0 is not reached" in notice for notice in unreached.notices)


def test_groups_stay_on_their_nodes() -> None:
    random = np.random.default_rng(8)
    loads = windows_of(random, 3, 2, 32)
    topology = Topology(8, 2)
    expected = Expected(loads, np.full(3, 1 / 3))
    start = full_joint_placement(
        expected, Placement.initial(2, 32, 40, topology), num_groups=4, hierarchical=True
    )
    moved = joint_placement(
        Expected(random.permuted(loads, axis=2), expected.weights),
        start,
        max_moves=20,
        barred=node_bars(start, 4),
    )
    assert start.moved_slots(moved).sum() > 0
    for placement in (start, moved):
        plain_check(placement, loads[0], 8)
        assert all(respects_groups(row, 4, 32, 2) for row in placement.physical_to_logical)


@pytest.mark.parametrize(("ranks", "experts", "slots"), [(8, 64, 72), (4, 32, 40), (8, 64, 96)])
def test_a_full_plan_has_two_modes_and_moves_keep_them(ranks: int, experts: int, slots: int) -> None:
    loads = windows_of(np.random.default_rng(9), 2, 3, experts)
    start = full_placement(loads[0], Placement.initial(3, experts, slots, Topology(ranks)))
    moved = joint_placement(Expected(loads, np.full(2, 0.5)), start, max_moves=6)
    two_modes = 0
    for placement in (start, moved):
        rows = placement.physical_to_logical
        kinds = np.zeros(rows.shape, dtype=np.int8)
        find_kinds(rows, ranks, experts, kinds)
        for row, kind in zip(rows, kinds, strict=True):
            primaries = row[kind == 0]
            if len(primaries) == 0:
                continue
            two_modes += 1
            assert sorted(primaries.tolist()) == list(range(experts))
            assert set((kind.reshape(ranks, -1) == 0).sum(axis=1).tolist()) == {experts // ranks}
        assert placement is moved or two_modes == 3
    assert two_modes > 3


def test_a_layout_without_two_modes_is_told() -> None:
    # Rank 0 holds experts 0, 1, 2 that are nowhere else: three primaries, two would be its part.
    row = np.array([[0, 1, 2, 3, 4, 3, 5, 6, 3, 7, 4, 3][:12]], dtype=np.int32)
    kinds = np.zeros(row.shape, dtype=np.int8)
    find_kinds(row, 4, 8, kinds)
    assert (kinds == 1).all()


def zipf(experts: int, exponent: float) -> np.ndarray:
    return 1.0 / np.arange(1, experts + 1)[None] ** exponent


@pytest.mark.parametrize(
    ("loads", "ranks", "slots", "even", "shares"),
    [
        (zipf(128, 1.0), 64, 192, 0.967, 0.999),
        (zipf(384, 1.0), 128, 512, 0.962, 0.99),
        (zipf(256, 1.5), 32, 288, 0.99, 0.999),
        (np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]]), 8, 16, 0.906, 1.0),
        (np.where(np.arange(256) % 50 == 7, 1.0 + np.arange(256), 0.0)[None], 32, 288, 0.93, 0.999),
    ],
)
def test_skewed_and_tight_loads(loads, ranks: int, slots: int, even: float, shares: float) -> None:
    topology = Topology(ranks)
    flat = plan_placement(loads, topology=topology, num_slots=slots, policy="global").placement
    assert flat.shares is None
    assert plain_check(flat, loads, ranks)[0] >= even
    joint = plan_placement(loads, topology=topology, num_slots=slots, policy="joint").placement
    assert plain_check(joint, loads, ranks)[0] >= shares - 1e-4
