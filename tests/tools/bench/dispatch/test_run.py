"""`evenroute bench dispatch`: batches as drawn, dealt as a Router deals them, and what the longest rank takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import plan_placement
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.bench.dispatch.deals import DEALS, Dealer
from evenroute.tools.bench.dispatch.traffic import draw_batches
from support.command import assert_one_line_error, evenroute

LOADS = 1e4 / np.arange(1, 65)[None] ** 0.7


@pytest.mark.parametrize("kind", ["iid", "prompts"])
@pytest.mark.parametrize("tokens", [1, 100, 2000])
def test_batches_have_all_their_tokens(kind: str, tokens: int) -> None:
    counts = draw_batches(LOADS[0], 4, tokens, 8, kind, np.random.default_rng(0))
    assert counts.sum(axis=1).tolist() == [8 * tokens] * 4
    if tokens < 2000:
        assert counts.max() <= tokens  # no token has an expert twice
    if kind == "iid" and tokens == 2000:
        assert np.abs(counts.sum(axis=0) / counts.sum() - LOADS[0] / LOADS.sum()).max() < 0.005


def test_every_deal_serves_every_token_where_its_expert_lies() -> None:
    plan = plan_placement(LOADS, topology=Topology(8), num_slots=80, policy="joint", top_k=8, num_threads=1)
    dealer = Dealer(plan.placement, 8)
    counts = torch.from_numpy(draw_batches(LOADS[0], 8, 16, 8, "iid", np.random.default_rng(0)))
    for name in DEALS:
        slots = dealer.deal(name, 0, counts, 16, 1)
        by_expert = torch.zeros(64, dtype=torch.int64)
        by_expert.index_add_(0, torch.from_numpy(plan.placement.physical_to_logical[0].copy()).long(), slots)
        assert torch.equal(by_expert, counts.sum(0)), name
    touched = {
        name: int((dealer.deal(name, 0, counts, 16, 1) > 0).view(8, 10).sum(1).max()) for name in DEALS
    }
    assert touched["auto"] < touched["even"]


def test_auto_is_what_a_router_does_by_default() -> None:
    """The same slots, up to where an expert's tickets stand."""
    plan = plan_placement(LOADS, topology=Topology(8), num_slots=80, policy="joint", top_k=8, num_threads=1)
    counts = draw_batches(LOADS[0], 8, 16, 8, "iid", np.random.default_rng(0))
    dealt = Dealer(plan.placement, 8).deal("auto", 0, torch.from_numpy(counts[:1]), 16, 1)
    router = Router(RouterConfig(64, 8), DispatchTables(plan.placement, ep_rank=0, device="cpu"))
    ids = torch.from_numpy(np.repeat(np.arange(64), counts[0]).astype(np.int32)).view(8, 16).T.contiguous()
    found = router(None, 0, logical_ids=ids, weights=torch.ones(ids.shape)).physical_ids
    by_slot = torch.bincount(found.flatten().long(), minlength=80)
    assert int((by_slot - dealt).abs().max()) <= 2
    assert torch.equal(by_slot > 0, dealt > 0)


def test_the_command_says_what_each_deal_takes() -> None:
    flags = ("--cells", "8/320", "--tokens", "32", "--layers", "2", "--repeats", "1", "--traffic", "iid")
    done = evenroute("bench", "dispatch", *flags, "--json")
    assert done.status == 0, done.err
    [cell] = done.json["cells"]
    assert set(cell["deals"]) == set(DEALS)
    assert cell["deals"]["auto"]["us"] < 0.95 * cell["deals"]["even"]["us"]
    assert done.json["times"]["source"] == "roofline"
    text = evenroute("bench", "dispatch", *flags).out
    assert "10.2 us an expert touched" in text
    assert "auto takes over 1 % longer than even dealing in 0 of 1 cells" in text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cells", "8-320"), "--cells: found '8-320'"),
        (("--cells", "8/100"), "nearest valid num_slots"),
        (("--tokens", "0"), "--tokens: found '0'"),
        (("--traffic", "poisson"), "--traffic: found 'poisson'"),
        (("--data", "missing.json"), "missing.json"),
        (("--expert-us", "10"), "token_us is missing"),
        (("--experts", "missing.json"), "missing.json"),
        (("--top-k", "300"), "--top-k: found 300"),
    ],
)
def test_wrong_flags_are_one_line(flags: tuple[str, ...], said: str) -> None:
    assert_one_line_error(evenroute("bench", "dispatch", *flags), said)


def test_measured_times_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "experts.json"
    sizes = ("--touched", "2,4", "--tokens", "1,8,64")
    done = evenroute("bench", "experts", "--device", "cpu", *sizes, "-o", file, "--json")
    assert done.status == 0, done.err
    assert json.loads(file.read_text()) == done.json
    assert done.json["expert_us"] > 0
    assert len(done.json["cells"]) == 6
    flags = ("--cells", "4/256", "--tokens", "8", "--layers", "1", "--repeats", "1", "--traffic", "iid")
    found = evenroute("bench", "dispatch", "--experts", file, *flags, "--json")
    assert found.json["times"] == {
        "expert_us": done.json["expert_us"],
        "token_us": done.json["token_us"],
        "source": "measured",
    }
    file.write_text("{}")
    assert_one_line_error(evenroute("bench", "dispatch", "--experts", file), "not a file of expert times")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a host without a GPU can't do")
def test_experts_are_measured_on_a_gpu_alone() -> None:
    assert_one_line_error(evenroute("bench", "experts"), "torch sees no CUDA device")


def test_times_come_from_the_slope_and_the_largest_cell() -> None:
    from evenroute.tools.bench.experts import fit_times

    cells = [
        {"touched": n, "tokens": t, "us": 48 + n * max(28.9, 0.1 * t)}
        for n in (8, 16, 32)
        for t in (1, 64, 1024)
    ]
    fit = fit_times(cells)
    assert fit.expert_us == pytest.approx(28.9)
    assert fit.fixed_us == pytest.approx(48.0)
    assert fit.token_us == pytest.approx(0.1)
