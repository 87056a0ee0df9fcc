"""The cost of a deal by batch size, and from which size on it pays."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from evenroute.tools.bench.dispatch.cost import deal_costs, least_rows


def test_every_deal_has_a_cost() -> None:
    costs = deal_costs("qwen3", [4], torch.device("cpu"), ["weighted", "batch"])
    assert set(costs) == {4}
    assert all(value > 0 for value in costs[4].values())


def test_it_pays_from_the_size_on_where_all_larger_ones_gain() -> None:
    costs = {rows: {"weighted": 3.0, "batch": 8.0} for rows in (64, 128, 256, 512)}
    assert least_rows(costs, "batch", {64: 9.0, 128: 4.0, 256: 6.0, 512: 7.0}) == 256
    assert least_rows(costs, "batch", {64: 9.0, 128: 9.0, 256: 9.0, 512: 5.0}) is None
    assert least_rows(costs, "batch", dict.fromkeys(costs, 6.0)) == 64
