"""What redundancy and the deal are worth at a batch size."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from evenroute.eplb.analysis.advice import advise
from evenroute.eplb.analysis.batches import by_batch_size
from evenroute.eplb.analysis.measures import AdviceSettings, Workload
from evenroute.eplb.planner.classes.times import ExpertTimes
from evenroute.tools.report.advice import _by_batch_size

LOADS = 1e6 * np.random.default_rng(0).permuted(np.tile(1 / np.arange(1, 65) ** 0.5, (3, 1)), axis=1)
SETTINGS = AdviceSettings(ep_size=8, top_k=8, top_k_known=True, num_redundant_experts=32)


def test_small_batches_pay_for_redundancy_dealt_evenly_and_large_ones_gain() -> None:
    rows = {row["tokens"]: row for row in by_batch_size([Workload("a", [LOADS])], SETTINGS, 32, 8)}
    assert list(rows) == [8, 32, 128, 512, 2048]
    small, large = rows[32], rows[2048]
    assert small["even_us"] == pytest.approx(12 * 10.2, rel=0.01)  # all slots of a rank touched
    assert small["without_us"] == pytest.approx(8 * 10.2, rel=0.15)
    assert small["by_size_us"] < 0.8 * small["even_us"]
    assert small["best"] in ("by_size", "without")
    assert large["even_us"] < large["without_us"]
    assert large["by_size_us"] <= 1.01 * large["even_us"]
    for row in rows.values():
        assert row["by_size_us"] <= 1.01 * row["even_us"]


def test_a_given_batch_is_shown_per_rank_and_times_count() -> None:
    settings = replace(SETTINGS, batch_tokens=8 * 100, times=ExpertTimes(100.0, 0.073, "given"))
    rows = {row["tokens"]: row for row in by_batch_size([Workload("a", [LOADS])], settings, 32, 8)}
    assert 100 in rows
    assert rows[32]["even_us"] == pytest.approx(1200.0, rel=0.01)


def test_the_advice_says_what_redundancy_costs_and_gives() -> None:
    facts = advise([Workload("a", [LOADS])], SETTINGS)
    lines = dict(_by_batch_size(facts))
    assert "10.2 us an expert touched" in lines["by batch size"]
    assert "with 32: costs" in lines["  32 tokens a rank"]
    assert "shares by batch size" in lines["  32 tokens a rank"]
    assert "gives" in lines["  2048 tokens a rank"]
