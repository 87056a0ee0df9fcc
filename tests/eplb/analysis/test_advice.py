"""Advice: each verdict on loads that deserve it, and every figure against its definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evenroute.eplb.analysis.advice import NOT_ENOUGH, NOT_NOW, RECOMMEND, advise
from evenroute.eplb.analysis.measures import (
    HARDWARE,
    AdviceSettings,
    Workload,
    cross_table,
    enough_tokens,
    fewest_within,
    good_for,
    redundancy_candidates,
    staleness,
)
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

LAYERS, EXPERTS = 4, 32
SETTINGS = AdviceSettings(ep_size=8, top_k=4, top_k_known=True, expert_bytes=1000, hardware=HARDWARE["h200"])


def skewed(seed: int = 0, scale: float = 1e6, spread: float = 1.2) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, spread, (LAYERS, EXPERTS)).round(3) * scale


def steady(windows: int, seed: int = 0) -> list[np.ndarray]:
    return [skewed(seed)] * windows


class TestVerdicts:
    def test_skewed_steady_traffic_is_recommended(self) -> None:
        facts = advise([Workload("a", steady(6), window_seconds=60.0)], SETTINGS)
        assert facts["verdict"] == RECOMMEND
        assert facts["balancedness_after"] > 0.95 > facts["balancedness_now"]
        assert facts["step_time_gain"] > 0.02
        assert facts["plan_stays_good_windows"] is None  # it stayed good to the end

    def test_even_traffic_is_not_now(self) -> None:
        facts = advise([Workload("a", [np.full((LAYERS, EXPERTS), 1e6)])], SETTINGS)
        assert facts["verdict"] == NOT_NOW
        assert "shorter by 2 % would be worth it" in facts["reasons"][0]

    def test_traffic_that_changes_faster_than_any_plan_is_not_now(self) -> None:
        """Every window has other hot experts: a plan from one is useless in the next."""
        windows = [skewed(seed, spread=1.5) for seed in range(12)]
        facts = advise([Workload("a", windows)], SETTINGS)
        assert facts["ageing"][1]["balancedness"] < 0.7
        assert facts["verdict"] == NOT_NOW

    def test_a_handful_of_tokens_is_not_enough_evidence(self) -> None:
        facts = advise([Workload("a", [np.minimum(skewed(scale=1.0).round(), 5)])], SETTINGS)
        assert facts["verdict"] == NOT_ENOUGH
        assert "too few" in facts["reasons"][0]

    def test_no_load_is_not_enough_evidence(self) -> None:
        facts = advise([Workload("a", [np.zeros((LAYERS, EXPERTS))])], SETTINGS)
        assert facts["verdict"] == NOT_ENOUGH
        assert facts["reasons"] == ["no load at all"]

    def test_one_rank_has_nothing_to_balance(self) -> None:
        facts = advise([Workload("a", [skewed()])], replace(SETTINGS, ep_size=1))
        assert facts["verdict"] == NOT_NOW

    def test_a_memory_price_that_is_too_high_is_not_now(self) -> None:
        small = replace(SETTINGS, expert_bytes=10**10, num_redundant_experts=32)
        facts = advise([Workload("a", steady(6))], small)
        assert facts["verdict"] == NOT_NOW
        assert "memory" in facts["reasons"][0]

    def test_a_higher_bar_turns_the_verdict(self) -> None:
        facts = advise([Workload("a", steady(6))], replace(SETTINGS, min_gain=0.99))
        assert facts["verdict"] == NOT_NOW


class TestFigures:
    def test_now_is_experts_in_order(self) -> None:
        loads = skewed()
        facts = advise([Workload("a", [loads])], SETTINGS)
        plain = Placement.initial(LAYERS, EXPERTS, EXPERTS, Topology(8))
        assert facts["balancedness_now"] == pytest.approx(balancedness(rank_loads(loads, plain)).mean)

    def test_gain_is_share_times_saved_time(self) -> None:
        loads = skewed()
        facts = advise([Workload("a", [loads])], replace(SETTINGS, experts_share=0.25, share_given=True))
        assert facts["step_time_gain"] == pytest.approx(0.25 * facts["expert_time_saved"])
        assert facts["experts_share_is"] == "given"
        assert "upper bound" in facts["gain_basis"]

    @pytest.mark.parametrize("batch", [None, 4096])
    def test_the_headline_uses_the_figure_that_step_time_follows(self, batch: int | None) -> None:
        """Layers of very different load: there the mean over layers says something else than the total."""
        rng = np.random.default_rng(0)
        base = skewed() * np.geomspace(1, 100, LAYERS)[:, None]
        for windows in ([base], [base * rng.lognormal(0, 0.2, base.shape) for _ in range(6)]):
            facts = advise([Workload("a", windows)], replace(SETTINGS, batch_tokens=batch, top_k=2))
            now, expected = facts["total_balancedness_now"], facts["total_balancedness_expected"]
            plain = Placement.initial(LAYERS, EXPERTS, EXPERTS, Topology(8))
            assert now == pytest.approx(balancedness(rank_loads(np.sum(windows, axis=0), plain)).total)
            assert abs(now - facts["balancedness_now"]) > 0.001
            saved = 1 - now / expected
            assert facts["step_time_gain"] == pytest.approx(SETTINGS.experts_share * saved)
            assert facts["reasons"][0].startswith(
                f"total balancedness {now:.3f} -> {expected:.3f}: a step gets "
            )

    def test_an_old_plan_gains_less_than_a_fresh_one(self) -> None:
        rng = np.random.default_rng(0)
        base = skewed()
        drifting = [base * rng.lognormal(0, 0.3, base.shape) for _ in range(8)]
        fresh = advise([Workload("a", [np.sum(drifting, axis=0)])], SETTINGS)
        aged = advise([Workload("a", drifting)], SETTINGS)
        assert aged["expert_time_saved"] < fresh["expert_time_saved"]
        assert "one window old" in aged["gain_basis"]

    def test_memory_price(self) -> None:
        facts = advise([Workload("a", [skewed()])], replace(SETTINGS, num_redundant_experts=16))
        assert facts["memory_bytes_per_rank"] == 16 / 8 * LAYERS * 1000
        assert facts["memory_part"] == pytest.approx(8000 / 141e9)

    def test_migration_price(self) -> None:
        workload = Workload("a", [skewed(seed) for seed in (0, 1, 0, 1)], window_seconds=10.0)
        facts = advise([workload], replace(SETTINGS, replan_seconds=43200.0))
        assert facts["plans_per_day"] == 2
        assert facts["migration_bytes_per_day"] == pytest.approx(2 * 1000 * facts["moves_per_plan"])
        expected = facts["migration_bytes_per_day"] / 8 / 50e9
        assert facts["migration_seconds_per_day"] == pytest.approx(expected)

    def test_smallest_redundancy_within_one_percent(self) -> None:
        facts = advise([Workload("a", [skewed()])], SETTINGS)
        curve = {p["num_redundant_experts"]: p["balancedness"] for p in facts["redundancy_curve"]}
        best = max(curve.values())
        chosen = facts["smallest_redundancy_within_1_percent"]
        assert curve[chosen] >= 0.99 * best
        assert all(value < 0.99 * best for number, value in curve.items() if number < chosen)

    def test_prefill_and_decode(self) -> None:
        apart = [Workload("p", [skewed(0)], "prefill"), Workload("d", [skewed(1)], "decode")]
        phases = advise(apart, SETTINGS)["phases"]
        assert phases["own_placements"]
        assert phases["own_plan"] > phases["one_plan_for_both"] > phases["other_phases_plan"]
        same = [Workload("p", [skewed(0)], "prefill"), Workload("d", [skewed(0) * 3], "decode")]
        assert not advise(same, SETTINGS)["phases"]["own_placements"]
        assert advise([apart[0]], SETTINGS)["phases"] is None

    def test_small_batches_reach_less(self) -> None:
        workload = Workload("a", [skewed()])
        small = advise([workload], replace(SETTINGS, batch_tokens=32))
        large = advise([workload], replace(SETTINGS, batch_tokens=65536))
        assert small["batch_balancedness_after"] < 0.8 < large["batch_balancedness_after"]
        assert small["step_time_gain"] < large["step_time_gain"]

    def test_same_input_same_output(self) -> None:
        workload = Workload("a", [skewed(seed) for seed in range(4)])
        assert advise([workload], SETTINGS) == advise([workload], SETTINGS)


class TestParts:
    def test_candidates_divide_over_the_ranks(self) -> None:
        assert redundancy_candidates(32, 8)[:3] == [0, 8, 16]
        assert redundancy_candidates(30, 8)[:3] == [2, 10, 18]
        assert 12 in redundancy_candidates(32, 8, 12)
        assert max(redundancy_candidates(2, 2)) <= 2

    def test_fewest_within(self) -> None:
        curve = [
            {"num_redundant_experts": n, "balancedness": b} for n, b in ((0, 0.9), (8, 0.991), (16, 1.0))
        ]
        assert fewest_within(curve) == 8
        assert fewest_within(curve, within=0.2) == 0

    def test_good_for(self) -> None:
        curve = [{"lag": lag, "balancedness": b} for lag, b in ((0, 1.0), (1, 0.9), (2, 0.8), (4, 0.6))]
        assert good_for(curve, 0.5) == 4  # half of 0.9 - 0.5 is gone below 0.7
        assert good_for(curve, 0.1) is None
        assert good_for(curve[:1], 0.5) is None

    def test_enough_tokens(self) -> None:
        curve = [{"tokens": n, "balancedness": b} for n, b in ((1000, 0.8), (10000, 0.97), (None, 0.99))]
        assert enough_tokens(curve, 0.05) == 10000
        assert enough_tokens(curve, 0.001) is None

    def test_staleness_of_constant_loads_is_flat(self) -> None:
        curve = staleness(Workload("a", steady(10)), SETTINGS, 8)
        assert [point["lag"] for point in curve] == [0, 1, 2, 4, 8]
        assert len({round(point["balancedness"], 9) for point in curve}) == 1

    def test_cross_table_has_the_own_plan_on_its_diagonal(self) -> None:
        table = cross_table([Workload("a", [skewed(0)]), Workload("b", [skewed(1)])], SETTINGS, 8)
        assert table[0, 0] > table[0, 1]
        assert table[1, 1] > table[1, 0]
