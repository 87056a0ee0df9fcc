"""Full plans: valid for every input, good on real loads, DeepSeek's signature, refused numbers."""

import itertools

import numpy as np
import pytest

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.deepseek import rebalance_experts
from evenroute.eplb.planner.plan import plan_placement
from support.planning import plain_check, plain_moves, real_loads


@pytest.mark.parametrize(
    ("ranks", "slots", "mean", "worst"),
    [(32, 288, 0.9995, 0.998), (72, 288, 0.997, 0.97), (8, 264, 0.9999, 0.9998)],
)
def test_global_on_real_loads(ranks: int, slots: int, mean: float, worst: float) -> None:
    figures = []
    for loads in real_loads().values():
        plan = plan_placement(loads, topology=Topology(ranks), num_slots=slots)
        figures.append(plain_check(plan.placement, loads, ranks))
        assert plan.predicted.mean == pytest.approx(figures[-1][0], abs=1e-12)
    assert np.mean([f[0] for f in figures]) >= mean
    assert min(f[1] for f in figures) >= worst


def test_hierarchical_keeps_groups_on_nodes_and_says_what_it_costs() -> None:
    loads = real_loads("prefill_in4096")["prefill_in4096"]
    plan = plan_placement(loads, topology=Topology(32, 4), num_slots=288, num_groups=8, policy="hierarchical")
    plain_check(plan.placement, loads, 32)
    for row in plan.placement.physical_to_logical:
        node_of_group = {}
        for slot, expert in enumerate(row.tolist()):
            node = slot // (288 // 4)
            assert node_of_group.setdefault(expert // 32, node) == node
    assert "keeping 8 groups on 4 nodes gives 0.7987, at most 0.7992 without leaving" in plan.notices[0]
    assert "a global plan reaches 0.9997" in plan.notices[0]


def test_a_stated_part_of_slots_may_leave_their_node() -> None:
    loads = real_loads("prefill_in4096")["prefill_in4096"]
    means = []
    for spill in (0.0, 0.01, 0.02, 0.04):
        plan = plan_placement(
            loads, topology=Topology(32, 4), num_slots=288, num_groups=8, policy="hierarchical", spill=spill
        )
        mean, _ = plain_check(plan.placement, loads, 32)
        away = 0
        for row in plan.placement.physical_to_logical:
            node_group = (np.arange(288) // 72) * 8 + row // 32
            count = np.bincount(node_group, minlength=32).reshape(4, 8)
            away += 288 - count.max(axis=0).sum()
        assert away <= spill * 58 * 288
        means.append(mean)
    assert means == sorted(means)
    assert means[3] > means[0] + 0.1


def test_b16_no_expert_twice_on_a_rank() -> None:
    def largest(weight: list[int], slots: int, ranks: int) -> float:
        phy2log, log2phy, logcnt = rebalance_experts([weight], slots, 1, 1, ranks)
        assert logcnt.max() <= ranks
        for row in phy2log.reshape(ranks, -1).tolist():
            assert len(set(row)) == len(row)
        for expert, slots_of in enumerate(log2phy[0].tolist()):
            assert [s for s in slots_of if s >= 0] == np.flatnonzero(phy2log[0] == expert).tolist()
        per_slot = np.array(weight)[phy2log[0]] / logcnt[0][phy2log[0]]
        return float(per_slot.reshape(ranks, -1).sum(axis=1).max())

    assert largest([99, 19, 57, 70, 53, 70], 9, 3) <= 127
    assert largest([1000, 0, 0, 0], 8, 4) == 250
    assert largest([1000, 0, 0, 0], 16, 4) == 250
    with pytest.raises(ValueError, match="nearest valid num_slots: 16"):
        rebalance_experts([[1000, 0, 0, 0]], 20, 1, 1, 4)


def plain_deepseek(weight: np.ndarray, slots: int, ranks: int) -> tuple[float, bool]:
    """Largest rank load of replicate-and-pack as the field knows it, and whether a rank got an expert twice."""
    ids, count = list(range(len(weight))), np.ones(len(weight))
    for _ in range(slots - len(weight)):
        expert = int(np.argmax(weight / count))
        ids.append(expert)
        count[expert] += 1
    piece = (weight / count)[ids]
    load, held = np.zeros(ranks), [[] for _ in range(ranks)]
    for slot in np.argsort(-piece, kind="stable"):
        open_ranks = [r for r in range(ranks) if len(held[r]) < slots // ranks]
        rank = min(open_ranks, key=lambda r: load[r])
        held[rank].append(ids[slot])
        load[rank] += piece[slot]
    return float(load.max()), any(len(set(h)) < len(h) for h in held)


def test_b16_never_above_plain_replicate_and_pack() -> None:
    random, judged = np.random.default_rng(0), 0
    for _ in range(200):
        experts = int(random.integers(6, 17))
        ranks = int(random.integers(2, 9))
        fitting = [s for s in range(experts, 2 * experts + 1) if s % ranks == 0]
        if not fitting:
            continue
        slots = int(random.choice(fitting))
        weight = random.integers(1, 100, experts).astype(float)
        phy2log, _, logcnt = rebalance_experts(weight[None], slots, 1, 1, ranks)
        mine = (weight / logcnt[0])[phy2log[0]].reshape(ranks, -1).sum(axis=1).max()
        for row in phy2log.reshape(ranks, -1).tolist():
            assert len(set(row)) == len(row)
        theirs, duplicate = plain_deepseek(weight, slots, ranks)
        if not duplicate:
            judged += 1
            assert mine <= theirs * (1 + 1e-9)
    assert judged > 50


@pytest.mark.parametrize(
    "numbers",
    [
        (8, 10, 1, 1, 4),
        (8, 4, 1, 1, 4),
        (10, 12, 3, 1, 4),
        (8, 16, 8, 2, 1),
        (256, 256, 1, 1, 3),
        (8, 8, 0, 1, 4),
        (8, 8, 1, 0, 4),
        (8, 8, 1, 1, 0),
        (8, 8, 1, 1, -2),
        (4, 6, 1, 1, 1),
        (8, 16, 2, 3, 6),
        (8, 0, 1, 1, 4),
        (8, -8, 1, 1, 4),
        (8, 16, 2, 8, 8),
    ],
)
def test_b18_refused_with_the_nearest_that_works(numbers: tuple[int, int, int, int, int]) -> None:
    experts, slots, groups, nodes, ranks = numbers
    with pytest.raises(ValueError, match="nearest valid num_slots: ") as error:
        rebalance_experts(np.ones((2, experts)), slots, groups, nodes, ranks)
    text = str(error.value)
    assert "\n" not in text
    assert f"num_slots={slots}" in text
    assert f"num_logical_experts={experts}" in text
    nearest = int(text.rsplit("nearest valid num_slots: ", 1)[1])
    if ranks > 0:
        rebalance_experts(np.ones((2, experts)), nearest, 1, 1, ranks)


def test_b18_every_refused_slot_count_names_one_that_is_nearest() -> None:
    for experts, ranks in itertools.product((1, 3, 8, 13), (1, 2, 5, 8)):
        valid = [s for s in range(experts, experts * ranks + 1) if s % ranks == 0]
        for slots in range(max(0, experts - 3), experts * ranks + 6):
            if slots in valid:
                rebalance_experts(np.ones((1, experts)), slots, 1, 1, ranks)
                continue
            with pytest.raises(ValueError, match="nearest valid num_slots") as error:
                rebalance_experts(np.ones((1, experts)), slots, 1, 1, ranks)
            nearest = int(str(error.value).rsplit(": ", 1)[1])
            assert nearest in valid
            assert abs(nearest - slots) == min(abs(s - slots) for s in valid)


def test_b18_one_rank_is_identity_and_empty_is_empty() -> None:
    plan = plan_placement([[4, 3, 2, 9]], topology=Topology(1), num_slots=4)
    assert plan.placement.is_trivial()
    assert (plan.predicted.mean, plan.moves.tolist()) == (1.0, [0])
    phy2log, _, _ = rebalance_experts([[5]], 4, 1, 1, 4)
    assert phy2log.tolist() == [[0, 0, 0, 0]]
    empty = plan_placement(np.zeros((0, 8)), topology=Topology(4), num_slots=8)
    assert empty.placement.num_layers == 0
    assert empty.predicted.mean is None


def test_idle_layers_keep_their_placement_and_bad_loads_are_refused() -> None:
    current = Placement(np.array([[3, 2, 1, 0, 2, 1]] * 2), 4, Topology(2))
    plan = plan_placement([[0, 0, 0, 0], [9, 1, 1, 1]], topology=Topology(2), num_slots=6, current=current)
    assert plan.placement.physical_to_logical[0].tolist() == [3, 2, 1, 0, 2, 1]
    assert plan.moves[0] == 0
    assert plan.moves.tolist() == plain_moves(current, plan.placement, 2)
    with pytest.raises(ValueError, match="layer 1 expert 3 is nan"):
        plan_placement([[1] * 4, [1, 1, 1, np.nan]], topology=Topology(2), num_slots=6)


def test_same_input_same_bytes_whatever_the_threads_or_the_scale() -> None:
    loads = np.random.default_rng(3).integers(0, 10**6, (7, 64)).astype(float)
    tables = {
        plan_placement(
            loads * scale, topology=Topology(8), num_slots=80, num_threads=threads
        ).placement.physical_to_logical.tobytes()
        for threads in (1, 2, 3)
        for scale in (1.0, 3.0, 2.0**-40, 1e290)
    }
    assert len(tables) == 1


def test_an_impossible_hierarchy_is_refused() -> None:
    loads = np.ones((1, 8))
    with pytest.raises(ValueError, match="nearest valid num_groups: 4"):
        plan_placement(loads, topology=Topology(8, 4), num_slots=8, num_groups=1, policy="hierarchical")
    with pytest.raises(ValueError, match="nearest valid num_slots: 16"):
        plan_placement(loads, topology=Topology(8, 4), num_slots=24, num_groups=4, policy="hierarchical")
    with pytest.raises(ValueError, match="policy='magic' is not one of global"):
        plan_placement(loads, topology=Topology(8), num_slots=8, policy="magic")


def test_further_counts_are_tried_inside_every_node_too() -> None:
    pool = [600.0, 560, 120, 120, 20, 10, 10, 10]
    loads = np.array([pool + pool[::-1], pool[::-1] + pool])
    alone = plan_placement(loads[:, :8], topology=Topology(8), num_slots=16)
    plan = plan_placement(loads, topology=Topology(16, 2), num_slots=32, num_groups=2, policy="hierarchical")
    plain_check(plan.placement, loads, 16)
    assert plan.predicted.mean == pytest.approx(alone.predicted.mean, abs=1e-9)
    assert plan.predicted.mean > 0.9, "greedy counts give 0.78"
    for row in plan.placement.physical_to_logical.reshape(2, 2, 16):
        assert [len({int(expert) // 8 for expert in node}) for node in row] == [1, 1]


def test_a_node_without_load_is_left_as_it_is() -> None:
    loads = np.array([[9.0, 5, 3, 1, 0, 0, 0, 0]])
    plan = plan_placement(loads, topology=Topology(4, 2), num_slots=12, num_groups=2, policy="hierarchical")
    plain_check(plan.placement, loads, 4)
