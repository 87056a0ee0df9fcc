"""Our planner behind the three forms of vLLM's policy interface, against stand-ins of the engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from evenroute.dist.engines.vllm_policy import build_policy, interface_form, plan_maps, register
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support import vllm_stand_in as vllm

LAYERS, EXPERTS, SLOTS, RANKS = 3, 32, 40, 8


@pytest.fixture
def loads() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(LAYERS, EXPERTS, generator=generator).pow(4).mul(1000).round()


@pytest.fixture
def old() -> torch.Tensor:
    placement = Placement.initial(LAYERS, EXPERTS, SLOTS, Topology(RANKS))
    return torch.from_numpy(placement.physical_to_logical.astype(np.int64))


@pytest.fixture
def installed() -> Iterator[None]:
    yield
    vllm.uninstall()


def achieved(rows: torch.Tensor, loads: torch.Tensor) -> float:
    placement = Placement(rows.numpy().astype(np.int32), EXPERTS, Topology(RANKS))
    mean = balancedness(rank_loads(loads.double().numpy(), placement)).mean
    assert mean is not None
    return mean


@pytest.mark.parametrize("abstract", [vllm.MapsPolicy, vllm.MapPolicy])
def test_the_engine_gets_a_better_map_in_its_own_form(
    abstract: type, loads: torch.Tensor, old: torch.Tensor, installed: None
) -> None:
    table = vllm.install(abstract, abstract)
    policy = register()
    assert issubclass(policy, abstract)
    new = vllm.engine_rearranges(table["default"], loads, old, 1, 1, RANKS)
    assert achieved(new, loads) > max(0.9, achieved(old, loads) + 0.1)


def test_the_context_form(loads: torch.Tensor, old: torch.Tensor) -> None:
    policy = build_policy(vllm.ContextPolicy, plan_type=vllm.EplbPlan)()
    window = torch.stack([loads * 0.25, loads * 0.75])
    context = vllm.EplbRebalanceContext(window, old, vllm.EplbTopology(1, 1, RANKS), SLOTS)
    plan = policy.plan_rebalance(context, policy.create_state(LAYERS))
    assert isinstance(plan, vllm.EplbPlan)
    assert torch.equal(
        plan.physical_to_logical_map, plan_maps(loads, SLOTS, 1, 1, RANKS, old).physical_to_logical
    )
    with pytest.raises(ValueError, match="plan_type: missing"):
        build_policy(vllm.ContextPolicy)


def test_an_unknown_interface_is_refused_with_the_class_found(installed: None) -> None:
    vllm.install(vllm.UnknownPolicy, vllm.UnknownPolicy)
    with pytest.raises(
        ValueError, match=r"UnknownPolicy: found methods \['rearrange'\], expected rebalance_experts"
    ):
        register()
    assert interface_form(vllm.MapsPolicy) == "maps"
    assert interface_form(vllm.MapPolicy) == "map"
    assert interface_form(vllm.ContextPolicy) == "context"


def test_without_vllm_registering_says_so() -> None:
    with pytest.raises(ImportError, match="vllm"):
        register()


def test_a_balanced_placement_stays_put(loads: torch.Tensor, old: torch.Tensor) -> None:
    once = plan_maps(loads, SLOTS, 1, 1, RANKS, old)
    twice = plan_maps(loads, SLOTS, 1, 1, RANKS, once.physical_to_logical)
    ranks = [
        rows.view(LAYERS, RANKS, -1).sort(-1).values
        for rows in (once.physical_to_logical, twice.physical_to_logical)
    ]
    assert torch.equal(*ranks), "the same loads moved weights again"


def test_groups_stay_on_a_node() -> None:
    loads = torch.rand(2, 32, generator=torch.Generator().manual_seed(3))
    rows = plan_maps(loads, 40, 8, 2, 8).physical_to_logical
    for row in rows:
        nodes = [set((row[:20] // 4).tolist()), set((row[20:] // 4).tolist())]
        assert not nodes[0] & nodes[1]


def test_a_start_that_breaks_our_rules_is_told_and_not_used(
    loads: torch.Tensor, old: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    twice = old.clone()
    twice[0, :5] = torch.tensor([0, 0, 1, 2, 3])
    twice[0, 32:] = torch.tensor([4, 1, 2, 3, 5, 6, 7, 8])
    with caplog.at_level(logging.WARNING, "evenroute"):
        plan_maps(loads, SLOTS, 1, 1, RANKS, twice)
    assert "twice on rank 0" in caplog.text


def test_few_moves_on_request(loads: torch.Tensor, old: torch.Tensor) -> None:
    def moved(maps: torch.Tensor) -> int:
        before, after = (Placement(m.numpy().astype(np.int32), EXPERTS, Topology(RANKS)) for m in (old, maps))
        return int(before.moved_slots(after).sum())

    full = plan_maps(loads, SLOTS, 1, 1, RANKS, old).physical_to_logical
    few = plan_maps(loads, SLOTS, 1, 1, RANKS, old, policy="incremental").physical_to_logical
    assert 0 < moved(few) < moved(full)
    assert achieved(few, loads) > achieved(old, loads)
    with pytest.raises(ValueError, match="policy='weighted' is not one of full, incremental"):
        register(policy="weighted")
