"""The stress run's MoE half, driven without a rebalancer: checks pass while experts move and notice what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.run.driver import MoeDriver
from evenroute.tools.stress.checks import Finding
from evenroute.tools.stress.moe import MoeSizes, MoeStress
from support.placements import random_placement
from support.rank_pool import Ranks, rank_pool

LAYERS, EXPERTS, SLOTS, TOKENS = 3, 8, 12, 16


def _run(ranks: Ranks, mode: str, damage: str) -> list[Finding]:
    size = (LAYERS, EXPERTS, SLOTS, Topology(ranks.size))
    start = random_placement(np.random.default_rng(1), *size)
    tables = DispatchTables(start, ep_rank=ranks.rank, device="cpu")
    sizes = MoeSizes(hidden=16, intermediate=8, staging_layers=1, chunk_bytes=2048, verify=True)
    moe = MoeStress(
        start,
        tables,
        device=torch.device("cpu"),
        tokens=TOKENS,
        token_mode=mode,
        seed=3,
        sizes=sizes,
    )
    moe.mover.load(start)
    driver = MoeDriver(moe.mover, start, ranks.group("vote"))
    router = Router(
        RouterConfig(EXPERTS, 2, routed_scaling_factor=2.5, apply_routed_scaling_factor=False),
        tables,
        tokens=mode,
        emit=("weights", "physical_ids", "logical_ids"),
    )
    driver.propose(random_placement(np.random.default_rng(2), *size))
    generator = torch.Generator().manual_seed(ranks.rank if mode == "own" else 0)
    for step in range(60):
        driver.step()
        for layer in range(LAYERS):
            moe.forward(layer, step, router(torch.randn(TOKENS, EXPERTS, generator=generator), layer))
        if driver.idle:
            break
    if damage == "weights" and ranks.rank == 0:
        moe._tensors[1]["down"][2] += 1
    if damage == "outputs" and ranks.rank == 0:
        moe._tensors[1]["down"] *= 1.001
        moe.forward(1, 0, router(torch.randn(TOKENS, EXPERTS, generator=generator), 1))
        moe._tensors[1]["down"] /= 1.001
    elif damage == "outputs":
        moe.forward(1, 0, router(torch.randn(TOKENS, EXPERTS, generator=generator), 1))
    live: Placement = driver.live_placement()
    moe.close()
    return moe.findings(live, ranks.group("vote"))


def test_outputs_and_weights_hold_through_a_migration() -> None:
    for mode in ("own", "shared"):
        for findings in rank_pool(2).run(_run, mode, ""):
            assert [finding.name for finding in findings] == ["moe outputs", "moe weights"]
            assert all(finding.held for finding in findings), findings
            assert "received 0.000 MB" not in findings[1].detail


def test_a_damaged_slot_and_a_wrong_output_are_noticed_by_all_ranks() -> None:
    for findings in rank_pool(2).run(_run, "own", "weights"):
        assert not findings[1].held
        assert findings[1].detail.startswith("1 slots hold other weights")
    for findings in rank_pool(2).run(_run, "own", "outputs"):
        assert not findings[0].held


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["own", "shared"])
def test_the_whole_stress_run_with_weights(mode: str, tmp_path: Path) -> None:
    """Real agent, real rebalancer, real weights: they move, and every invariant holds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "evenroute.tools.stress", "--moe", "--layers", "4", "--num-experts", "32"]
    command += ["--num-redundant-experts", "8", "--top-k", "4", "--num-groups", "1", "--topk-group", "1"]
    command += ["--steps", "240", "--tokens", "64", "--step-delay", "0.05", "--policy", "global"]
    command += ["--zipf-exponent", "1.5", "--token-mode", mode, "--report", str(tmp_path / "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    found = {finding["name"]: finding for finding in report["invariants"]}
    assert found["moe outputs"]["held"]
    assert found["moe weights"]["held"]
    assert "received 0.000 MB" not in found["moe weights"]["detail"], "experts did move"
