"""Plans from the placement in use: budgets, targets, costs, and how far from the optimum they are."""

import itertools

import numpy as np
import pytest

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.moves import MoveCost, MoveLimits
from evenroute.eplb.planner.plan import plan_placement
from support.planning import plain_check, plain_moves, real_loads

SLOTS = 58 * 288
CHANGES = [(0, 5), (5, 0), (3, 9), (11, 2), (7, 1), (4, 10)]


@pytest.fixture(scope="module")
def real() -> list[np.ndarray]:
    return list(real_loads().values())


@pytest.fixture(scope="module")
def plans(real) -> list[Placement]:
    return [plan_placement(loads, topology=Topology(32), num_slots=288).placement for loads in real]


@pytest.mark.parametrize(
    ("policy", "part", "least"),
    [
        ("incremental", 0.08, 0.975),
        ("incremental", 0.10, 0.985),
        ("weighted", 0.02, 0.97),
        ("weighted", 0.04, 0.99),
    ],
)
def test_budgets_on_real_changes(real, plans, policy: str, part: float, least: float) -> None:
    """A sample of the 132 changes, hard ones among them; `evenroute bench planner` judges all."""
    means = []
    for old, new in CHANGES:
        plan = plan_placement(
            real[new],
            topology=Topology(32),
            num_slots=288,
            current=plans[old],
            policy=policy,
            max_moves=int(part * SLOTS),
        )
        mean, _ = plain_check(plan.placement, real[new], 32)
        moves = plain_moves(plans[old], plan.placement, 32)
        assert plan.moves.tolist() == moves
        assert sum(moves) <= part * SLOTS
        assert plan.predicted.mean == pytest.approx(mean, abs=1e-9)
        means.append(mean)
    assert np.mean(means) >= least


def test_more_budget_is_never_worse_and_slots_of_a_rank_stay_put(real, plans) -> None:
    before = 0.0
    for budget in (0, 1, 10, 50, 200, 600):
        plan = plan_placement(
            real[5],
            topology=Topology(32),
            num_slots=288,
            current=plans[0],
            policy="incremental",
            max_moves=budget,
        )
        mean, _ = plain_check(plan.placement, real[5], 32)
        assert mean >= before - 1e-12
        before = mean
        old, new = plans[0].physical_to_logical, plan.placement.physical_to_logical
        for a, b in zip(old.reshape(-1, 9), new.reshape(-1, 9), strict=True):
            for slot, expert in enumerate(a):
                if expert in b:
                    assert b[slot] == expert


@pytest.mark.parametrize("policy", ["incremental", "weighted"])
def test_a_target_is_met_with_few_moves_and_a_limit_per_rank_is_kept(real, plans, policy: str) -> None:
    def plan(**limits):
        return plan_placement(
            real[5], topology=Topology(32), num_slots=288, current=plans[0], policy=policy, **limits
        )

    moves = []
    for target in (0.90, 0.95, 0.97):
        made = plan(target=target)
        assert plain_check(made.placement, real[5], 32)[0] >= target
        moves.append(int(made.moves.sum()))
    assert moves == sorted(moves)
    assert moves[-1] < 0.12 * SLOTS
    capped = plan(max_moves_per_rank=4).placement
    fetched = np.zeros(32, dtype=int)
    for old, new in zip(plans[0].physical_to_logical, capped.physical_to_logical, strict=True):
        for rank in range(32):
            part = slice(rank * 9, rank * 9 + 9)
            fetched[rank] += len(set(new[part].tolist()) - set(old[part].tolist()))
    assert 0 < fetched.max() <= 4


def test_moves_must_pay_for_themselves(real, plans) -> None:
    def moves(**changes: float) -> int:
        cost = MoveCost(
            **{
                "bytes_per_expert": 44e6,
                "intra_node_bytes_per_second": 200e9,
                "inter_node_bytes_per_second": 25e9,
                "seconds_in_use": 60,
                **changes,
            }
        )
        plan = plan_placement(
            real[5], topology=Topology(32), num_slots=288, current=plans[0], policy="weighted", cost=cost
        )
        return int(plan.moves.sum())

    base = moves()
    assert moves(seconds_in_use=1e-6) == 0
    assert moves(seconds_in_use=0.1) < base
    assert moves(bytes_per_expert=44e9) < base
    with pytest.raises(ValueError, match="seconds_in_use must be a finite number > 0, found 0"):
        moves(seconds_in_use=0)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"target": 1.5}, "target=1.5"),
        ({"max_moves": -1}, "max_moves must be >= 0"),
        ({"max_moves_per_rank": -3}, "max_moves_per_rank must be >= 0"),
        ({"target": 0.9, "cost": MoveCost(1, 1, 1, 1)}, "exclude each other"),
    ],
)
def test_impossible_limits_are_refused(limits, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_placement([[1, 2, 3, 4]], topology=Topology(2), num_slots=4, policy="weighted", **limits)
    assert MoveLimits(max_moves=0).max_moves == 0


@pytest.mark.parametrize("policy", ["incremental", "weighted"])
def test_the_number_of_threads_changes_nothing_and_a_missed_target_is_named(real, plans, policy: str) -> None:
    made = [
        plan_placement(
            real[9],
            topology=Topology(32),
            num_slots=288,
            current=plans[2],
            policy=policy,
            max_moves=150,
            target=0.999,
            num_threads=threads,
        )
        for threads in (1, 2, 5)
    ]
    assert len({plan.placement.digest() for plan in made}) == 1
    assert "target 0.999 is not reached" in made[0].notices[0]


def optimum(loads: np.ndarray, old: np.ndarray, ranks: int, budget: int) -> float:
    """Least largest rank load with even shares over all placements within the budget, by enumeration."""
    local = len(old) // ranks
    sets = list(itertools.combinations(range(len(loads)), local))
    held = [set(old[r * local : (r + 1) * local].tolist()) for r in range(ranks)]
    best = np.inf
    for choice in itertools.product(sets, repeat=ranks):
        if sum(len(set(s) - h) for s, h in zip(choice, held, strict=True)) > budget:
            continue
        count = np.bincount(np.concatenate(choice), minlength=len(loads))
        if (count == 0).any():
            continue
        best = min(best, max(float((loads[list(s)] / count[list(s)]).sum()) for s in choice))
    return best


def test_gap_to_the_optimum_on_small_cases() -> None:
    random = np.random.default_rng(2)
    gaps, full_gaps = [], []
    for _ in range(25):
        experts, ranks, local = 5, 3, 2
        old = plan_placement(
            random.lognormal(0, 1, (1, experts)), topology=Topology(ranks), num_slots=ranks * local
        ).placement
        loads = random.lognormal(0, 1, (1, experts))
        for budget, found_gaps in ((2, gaps), (6, full_gaps)):
            policy = "incremental" if budget == 2 else "global"
            plan = plan_placement(
                loads,
                topology=Topology(ranks),
                num_slots=ranks * local,
                current=old,
                policy=policy,
                max_moves=budget,
            )
            best = optimum(loads[0], old.physical_to_logical[0], ranks, budget)
            reached = rank_loads(loads, plan.placement).max()
            assert reached >= best * (1 - 1e-9)
            found_gaps.append(reached / best - 1)
    # On tiny cases a greedy search is not the optimum: 8 % above it with a budget of 2, 4 % for full plans.
    print(f"mean gap to the optimum: incremental {np.mean(gaps):.3f}, global {np.mean(full_gaps):.3f}")
    assert np.mean(gaps) < 0.10
    assert np.mean(full_gaps) < 0.06


def test_robust_raises_the_worst_window_and_windows_are_refused_by_name(real, plans) -> None:
    windows = np.array([real[0], real[5], real[9]])

    def worst(how: str) -> float:
        plan = plan_placement(
            windows,
            topology=Topology(32),
            num_slots=288,
            current=plans[3],
            policy="weighted",
            max_moves=300,
            windows=how,
        )
        return min(balancedness(rank_loads(w, plan.placement)).mean for w in windows)

    assert worst("robust") >= worst("mean")
    windows[1, 3, 7] = np.nan
    with pytest.raises(ValueError, match="window 1: loads: layer 3 expert 7 is nan"):
        plan_placement(windows, topology=Topology(32), num_slots=288)
