"""Exact shares: equal to the linear programme, rounded without loss, and never moving anything."""

import numpy as np
import pytest
from scipy.optimize import linprog

from evenroute.eplb.loads.balance import rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.layers import normalized
from evenroute.eplb.planner.moves import exact_shares
from evenroute.eplb.planner.plan import plan_placement
from support.planning import plain_check, real_loads


def linear_programme(load: np.ndarray, slots: np.ndarray, ranks: int) -> float:
    """Lowest possible largest rank load, by HiGHS: variables are the load of every slot and the maximum."""
    size, local = len(slots), len(slots) // ranks
    objective = np.zeros(size + 1)
    objective[-1] = 1
    below = np.zeros((ranks, size + 1))
    for slot in range(size):
        below[slot // local, slot] = 1
    below[:, -1] = -1
    served = np.zeros((len(load), size + 1))
    served[slots, np.arange(size)] = 1
    answer = linprog(
        objective, A_ub=below, b_ub=np.zeros(ranks), A_eq=served, b_eq=load, bounds=(0, None), method="highs"
    )
    assert answer.status == 0
    return float(answer.fun)


def random_case(random: np.random.Generator) -> tuple[np.ndarray, Placement]:
    ranks = int(random.integers(2, 9))
    experts = int(random.integers(ranks, 25))
    slots = int(random.integers(-(-experts // ranks), experts + 1)) * ranks
    slots = min(slots, 3 * experts // ranks * ranks)
    loads = random.lognormal(0, 2, (3, experts)) * (random.random((3, experts)) > 0.2)
    loads[:, 0] += 1
    other = random.lognormal(0, 2, (3, experts))
    return loads, plan_placement(other, topology=Topology(ranks), num_slots=slots).placement


def test_equal_to_the_linear_programme() -> None:
    random = np.random.default_rng(0)
    for _ in range(60):
        loads, placement = random_case(random)
        scaled = normalized(loads)
        ranks = placement.topology.ep_size
        _, levels = exact_shares(scaled, placement.physical_to_logical.copy(), ranks)
        for layer in range(3):
            best = linear_programme(scaled[layer], placement.physical_to_logical[layer], ranks)
            assert levels[layer] == pytest.approx(best, rel=1e-9)


def test_on_real_loads_shares_alone_reach_087_and_rounding_costs_nothing() -> None:
    real = list(real_loads().values())
    exact_means, rounded_means = [], []
    for old, new in [(0, 5), (3, 7), (7, 3), (10, 1), (2, 11), (8, 4)]:
        current = plan_placement(real[old], topology=Topology(32), num_slots=288).placement
        scaled = normalized(real[new])
        _, levels = exact_shares(scaled, current.physical_to_logical.copy(), 32)
        for layer in (0, 29, 57):
            best = linear_programme(scaled[layer], current.physical_to_logical[layer], 32)
            assert levels[layer] == pytest.approx(best, rel=1e-9)
        exact_means.append((scaled.sum(axis=1) / 32 / levels).mean())
        plan = plan_placement(
            real[new], topology=Topology(32), num_slots=288, current=current, policy="shares"
        )
        assert plan.moves.sum() == 0
        assert (plan.placement.physical_to_logical == current.physical_to_logical).all()
        rounded_means.append(plain_check(plan.placement, real[new], 32)[0])
    assert np.array(rounded_means) == pytest.approx(np.array(exact_means), abs=1e-4)


def test_an_idle_expert_keeps_even_shares_and_a_dead_band_keeps_rows() -> None:
    slots = np.array([[0, 1, 1, 2, 0, 3]], dtype=np.int32)
    loads = [[0.0, 10, 4, 0]]
    current = Placement(slots, 4, Topology(3))
    plan = plan_placement(loads, topology=Topology(3), num_slots=6, current=current, policy="shares")
    shares = plan.placement.shares
    assert shares is not None
    assert shares[0].tolist() == [32768, 45874, 19661, 65535, 32767, 65535]
    assert rank_loads(loads, plan.placement)[0] == pytest.approx([7, 7, 0], abs=1e-3)
    banded = plan_placement(
        loads, topology=Topology(3), num_slots=6, current=current, policy="shares", share_gain=0.5
    )
    assert banded.placement.digest() == current.digest()


def test_uneven_shares_save_redundant_slots() -> None:
    """Old plan, new loads: shares with 8 redundant slots beat even ones with 32 on EP8 (planning.md, 3)."""
    real = list(real_loads().values())
    current = {
        slots: plan_placement(real[0], topology=Topology(8), num_slots=slots).placement
        for slots in (264, 288)
    }
    few = plan_placement(real[5], topology=Topology(8), num_slots=264, current=current[264], policy="shares")
    many = plan_placement(real[5], topology=Topology(8), num_slots=288, current=current[288], policy="stay")
    assert few.predicted.mean > many.predicted.mean
