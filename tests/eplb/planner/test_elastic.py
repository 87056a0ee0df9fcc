"""Ranks lost and added."""

import numpy as np
import pytest

from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.elastic import plan_elastic
from evenroute.eplb.planner.plan import plan_placement
from support.planning import plain_check

LOADS = np.random.default_rng(0).lognormal(0, 1, (4, 64))


def test_lost_ranks_every_expert_keeps_a_slot_and_little_moves() -> None:
    old = plan_placement(LOADS, topology=Topology(16), num_slots=96).placement
    sources = [r for r in range(16) if r not in (2, 9)]
    plan = plan_elastic(LOADS, old, Topology(14), sources, max_moves=0)
    plain_check(plan.placement, LOADS, 14)
    lost = 0
    for layer in range(4):
        kept = {e for r in sources for e in old.physical_to_logical[layer, r * 6 : r * 6 + 6].tolist()}
        lost += 64 - len(kept)
        for rank, source in enumerate(sources):
            new = plan.placement.physical_to_logical[layer, rank * 6 : rank * 6 + 6].tolist()
            was = old.physical_to_logical[layer, source * 6 : source * 6 + 6].tolist()
            for slot, expert in enumerate(was):
                assert expert not in new or new[slot] == expert
    assert plan.moves.sum() == lost
    better = plan_elastic(LOADS, old, Topology(14), sources, target=0.97)
    assert plain_check(better.placement, LOADS, 14)[0] >= 0.97
    assert better.moves.sum() >= lost


def test_added_ranks_are_filled_and_others_stay() -> None:
    old = plan_placement(LOADS, topology=Topology(8), num_slots=64).placement
    plan = plan_elastic(LOADS, old, Topology(10), [*range(8), None, None], max_moves=0)
    plain_check(plan.placement, LOADS, 10)
    assert (plan.placement.physical_to_logical[:, :64] == old.physical_to_logical).all()
    assert plan.moves.tolist() == [16] * 4
    fewer_a_rank = plan_elastic(LOADS, old, Topology(16), [*range(8), *[None] * 8], num_slots=64, max_moves=0)
    plain_check(fewer_a_rank.placement, LOADS, 16)
    assert fewer_a_rank.moves.sum() == 4 * 32


def test_refused_with_the_number_of_slots_needed() -> None:
    old = plan_placement(LOADS, topology=Topology(8), num_slots=64).placement
    with pytest.raises(ValueError, match="at least 66 slots are needed"):
        plan_elastic(LOADS, old, Topology(6), [0, 1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="old rank 1 is named twice"):
        plan_elastic(LOADS, old, Topology(3), [1, 1, 2], num_slots=66)
    with pytest.raises(ValueError, match="rank 8 is outside"):
        plan_elastic(LOADS, old, Topology(2), [8, 1], num_slots=66)
    with pytest.raises(ValueError, match="sources name 1 ranks, expected ep_size=2"):
        plan_elastic(LOADS, old, Topology(2), [1], num_slots=66)
