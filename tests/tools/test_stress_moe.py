"""The stress run's MoE half, driven without a rebalancer: checks pass while experts move and notice what is wrong."""

from __future__ import annotations

import numpy as np
import torch

from evenroute.eplb.placement import Placement
from evenroute.eplb.topology import Topology
from evenroute.routing.config import RouterConfig
from evenroute.routing.router import Router
from evenroute.routing.tables import DispatchTables
from evenroute.tools.moe_driver import MoeDriver
from evenroute.tools.stress_checks import Finding
from evenroute.tools.stress_moe import MoeSizes, MoeStress
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
