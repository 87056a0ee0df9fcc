"""Auto, backtest, tokens, locality and warm-up."""

import numpy as np
import pytest

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.backtest import backtest
from evenroute.eplb.planner.history.windows import combine_windows, sampling_loss
from evenroute.eplb.planner.locality import crossing_fraction
from evenroute.eplb.planner.plan import plan_placement
from evenroute.eplb.planner.warm_up import warm_up
from support.planning import plain_check

RANDOM = np.random.default_rng(5)
TRUTH = RANDOM.lognormal(0, 1, (3, 64))


def test_auto_takes_a_full_plan_at_the_start_few_moves_later_and_nothing_when_all_is_well() -> None:
    topology = Topology(8)
    first = plan_placement(TRUTH, topology=topology, num_slots=80, policy="auto")
    assert first.policy == "global"
    assert first.reason.startswith("auto takes global")
    calm = plan_placement(TRUTH, topology=topology, num_slots=80, current=first.placement, policy="auto")
    assert calm.policy == "stay"
    assert calm.placement.digest() == first.placement.digest()
    other = TRUTH[:, ::-1]
    moved = plan_placement(
        other, topology=topology, num_slots=80, current=first.placement, policy="auto", max_moves=24
    )
    assert moved.policy == "weighted"
    assert 0 < moved.moves.sum() <= 24
    assert all(word in moved.reason for word in ("stay", "shares", "global", "because"))
    assert "\n" not in moved.reason


def test_auto_does_not_move_for_noise() -> None:
    share = RANDOM.lognormal(0, 1, (4, 256))
    share /= share.sum(axis=1, keepdims=True)
    topology = Topology(32)
    placement = plan_placement(
        RANDOM.multinomial(800_000, share), topology=topology, num_slots=288, policy="auto"
    ).placement
    for _ in range(20):
        counts = RANDOM.multinomial(800_000, share)
        plan = plan_placement(counts, topology=topology, num_slots=288, current=placement, policy="auto")
        assert plan.policy in ("stay", "shares")
        assert plan.moves.sum() == 0
        placement = plan.placement


def test_hierarchical_is_a_candidate_where_asked() -> None:
    plan = plan_placement(TRUTH, topology=Topology(8, 2), num_slots=80, num_groups=4, policy="auto")
    assert "hierarchical" in plan.reason


def test_too_few_tokens_are_named_and_the_loss_foreseen_holds() -> None:
    topology = Topology(8)
    share = TRUTH / TRUTH.sum(axis=1, keepdims=True)
    losses, foreseen = [], []
    for seed in range(8):
        counts = np.random.default_rng(seed).multinomial(2000, share)
        plan = plan_placement(counts, topology=topology, num_slots=80)
        losses.append(1 - balancedness(rank_loads(TRUTH, plan.placement)).mean)
        foreseen.append(sampling_loss(counts, topology, 80).mean())
    assert np.mean(losses) == pytest.approx(np.mean(foreseen), rel=0.5)
    few = plan_placement(np.random.default_rng(0).multinomial(200, share), topology=topology, num_slots=80)
    assert "too few tokens" in few.notices[0]
    many = plan_placement(np.random.default_rng(0).multinomial(10**7, share), topology=topology, num_slots=80)
    assert many.notices == ()
    assert (sampling_loss(np.zeros((2, 4)), Topology(2), 4) == 0).all()


def test_ways_to_combine_windows() -> None:
    windows = np.array([[[4.0, 0.0]], [[0.0, 2.0]], [[0.0, 0.0]]])
    assert combine_windows(windows, "mean").tolist() == [[4, 2]]
    assert combine_windows(windows, "last").tolist() == [[0, 0]]
    assert combine_windows(windows, "ewma").tolist() == [[0.5, 0.5]]


def test_backtest_prefers_the_last_window_under_drift_and_the_mean_under_noise() -> None:
    placement = Placement.initial(3, 64, 80, Topology(8))
    share = TRUTH / TRUTH.sum(axis=1, keepdims=True)
    noisy = np.array([RANDOM.multinomial(3000, share) for _ in range(12)])
    assert backtest(noisy, placement=placement).best in ("mean", "ewma", "robust")
    jumps = [TRUTH, TRUTH[:, ::-1], np.roll(TRUTH, 20, axis=1)]
    drifting = np.array([jumps[i // 3] for i in range(9)])
    result = backtest(drifting, placement=placement)
    assert result.best == "last"
    assert result.scores["last"] > result.scores["mean"]
    assert result.num_windows == 8
    slots = placement.physical_to_logical.size
    assert all(0 < moves <= 8 * int(0.02 * slots) for moves in result.moves.values())
    assert backtest(drifting, placement=placement, most_windows=3).num_windows == 3
    assert backtest(drifting[:2], placement=placement).num_windows == 1
    still = backtest(drifting, placement=placement, move_fraction=0.0)
    assert set(still.moves.values()) == {0}
    plan = plan_placement(
        drifting, topology=Topology(8), num_slots=80, current=placement, policy="weighted", windows="auto"
    )
    assert "last would have given" in plan.notices[0]


def test_source_loads_keep_tokens_on_their_node_at_equal_balance() -> None:
    topology = Topology(8, 2)
    home = RANDOM.random((3, 64)) < 0.5
    per_node = np.stack([np.where(home, 0.9, 0.1), np.where(home, 0.1, 0.9)]) * TRUTH
    sources = np.repeat(per_node, 4, axis=0) / 4
    blind = plan_placement(TRUTH, topology=topology, num_slots=80)
    aware = plan_placement(TRUTH, topology=topology, num_slots=80, source_loads=sources)
    plain_check(aware.placement, TRUTH, 8)
    assert aware.predicted.mean >= blind.predicted.mean - 0.002
    before, after = (crossing_fraction(p.placement, sources) for p in (blind, aware))
    assert after < 0.7 * before
    with pytest.raises(ValueError, match="source_loads must be"):
        plan_placement(TRUTH, topology=topology, num_slots=80, source_loads=per_node)


def test_a_prefill_plan_is_not_a_decode_plan() -> None:
    """One placement, shares of their own per phase: better than one set of shares for both."""
    prefill, decode = TRUTH, RANDOM.lognormal(0, 1, (3, 64))
    placement = plan_placement(prefill + decode, topology=Topology(8), num_slots=96).placement
    for loads in (prefill, decode):
        own = plan_placement(loads, topology=Topology(8), num_slots=96, current=placement, policy="shares")
        assert own.predicted.mean > balancedness(rank_loads(loads, placement)).mean


def test_warm_up_reports_progress() -> None:
    seen = []
    warm_up(lambda done, total, name: seen.append((done, total, name)))
    assert [done for done, _, _ in seen] == list(range(len(seen)))
    assert seen[-1][0] == seen[-1][1]
