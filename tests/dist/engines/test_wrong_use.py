"""What callers of the engine adapters get wrong: one ValueError of one line, before anything is planned or changed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist
from torch import nn

from evenroute.dist.config import AgentConfig
from evenroute.dist.engines import vllm_policy as adapter_vllm
from evenroute.dist.engines.torch import (
    MoeBlock,
    adapt,
    check_gate,
    router_config_of,
)
from evenroute.eplb.planner.deepseek import rebalance_experts
from evenroute.routing.settings.config import RouterConfig
from support import vllm_stand_in as vllm
from support.refusals import refused
from support.toy_moe import EXPERTS, TOP_K, Block, Gate, make_model

L, E, P, R = 2, 8, 12, 4
WEIGHT = torch.arange(1.0, L * E + 1).reshape(L, E)
OLD = torch.arange(P).remainder(E).repeat(L, 1)
NOT_INTEGERS = ("8", None, 1.5, 8.0, float("nan"), True, [8], torch.ones(2), 1j, 10**400)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (None, "weight must be a torch.Tensor [layers, experts], found None"),
        ([[1.0] * E], "weight must be a torch.Tensor [layers, experts], found a list"),
        (WEIGHT.numpy(), "weight must be a torch.Tensor [layers, experts], found a numpy.ndarray"),
        (5, "weight must be a torch.Tensor [layers, experts], found 5"),
        (WEIGHT[0], "weight must be [layers, experts >= 1], found shape [8]"),
        (WEIGHT[None], "weight must be [layers, experts >= 1], found shape [1, 2, 8]"),
        (WEIGHT[:, :0], "weight must be [layers, experts >= 1], found shape [2, 0]"),
        (WEIGHT.to(torch.complex64), "weight must hold real numbers, found torch.complex64"),
        (WEIGHT.to("meta"), "weight can't be read | meta"),
        (WEIGHT.to_sparse(), "weight can't be read"),
        (-WEIGHT, "loads: layer 0 expert 0 is -1.0"),
    ],
)
def test_weights(weight: Any, words: str) -> None:
    refused(words, lambda: adapter_vllm.plan_maps(weight, P, 1, 1, R))


def test_numbers() -> None:
    good = {"num_replicas": P, "num_groups": 1, "num_nodes": 1, "num_ranks": R}
    for name in good:
        for bad in NOT_INTEGERS:
            refused(f"{name} must be", lambda: adapter_vllm.plan_maps(WEIGHT, **{**good, name: bad}))  # noqa: B023
    for kind in (np.int64, np.int32, torch.tensor):
        adapter_vllm.plan_maps(WEIGHT, **{name: kind(value) for name, value in good.items()})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float16, torch.float8_e4m3fn])
def test_loads_of_any_dtype_are_taken(dtype: torch.dtype) -> None:
    weight = WEIGHT.to(dtype).requires_grad_(dtype.is_floating_point)
    for planner in (adapter_vllm.plan_maps, rebalance_experts):
        maps = planner(weight, P, 1, 1, R)
        assert maps[0].shape == (L, P)
        assert (maps[-1].sum(dim=1) == P).all()


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ([[0]], "must be a torch.Tensor [layers, slots], found a list"),
        (OLD.numpy(), "must be a torch.Tensor [layers, slots], found a numpy.ndarray"),
        (OLD[0], "must be [2, slots], found shape [12]"),
        (OLD[None], "must be [2, slots], found shape [1, 2, 12]"),
        (OLD[:1], "must be [2, slots], found shape [1, 12]"),
        (OLD.float(), "must hold integers, found torch.float32"),
        (OLD > 3, "must hold integers, found torch.bool"),
        (OLD.to("meta"), "can't be read"),
    ],
)
def test_the_placement_in_use(old: Any, words: str) -> None:
    refused(f"old_global_expert_indices | {words}", lambda: adapter_vllm.plan_maps(WEIGHT, P, 1, 1, R, old))


def test_an_expert_beyond_32_bits_is_no_other_expert(caplog: pytest.LogCaptureFixture) -> None:
    """It is told and not used, as any placement that breaks our rules; it does not wrap to an id in range."""
    caplog.set_level("WARNING", "evenroute")
    adapter_vllm.plan_maps(WEIGHT, P, 1, 1, R, OLD + (1 << 32), policy="incremental")
    assert "is not taken as a start: physical_to_logical must lie in" in caplog.text


CONTEXT = vllm.EplbRebalanceContext(WEIGHT[None], OLD, vllm.EplbTopology(1, 1, R), P)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_window_cpu": WEIGHT}, "load_window_cpu must be a torch.Tensor [samples, layers, experts]"),
        ({"load_window_cpu": None}, "load_window_cpu must be a torch.Tensor | None"),
        ({"topology": None}, "context | is not one of a vLLM known here | num_groups"),
        ({"num_replicas": "12"}, "num_replicas must be an integer, found '12'"),
        ({"physical_to_logical_map_cpu": [[0]]}, "old_global_expert_indices | found a list"),
    ],
)
def test_the_context_form(change: dict[str, Any], words: str) -> None:
    policy = adapter_vllm.build_policy(vllm.ContextPolicy, plan_type=vllm.EplbPlan)()
    good = {name: getattr(CONTEXT, name) for name in ("load_window_cpu", "topology", "num_replicas")}
    good["physical_to_logical_map_cpu"] = OLD
    policy.plan_rebalance(SimpleNamespace(**good), policy.create_state(L))
    refused(words, lambda: policy.plan_rebalance(SimpleNamespace(**{**good, **change}), None))


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("name must be text, found 3", lambda: adapter_vllm.register(3)),
        *((f"policy={found} is not one of full, incremental", lambda bad=bad: adapter_vllm.register(policy=bad))
          for bad, found in ((None, "None"), (3, "3"), ("auto", "'auto'"))),
        ("expected rebalance_experts or plan_rebalance",
         lambda: adapter_vllm.interface_form(type("Odd", (), {"rebalance_experts": 5}))),
    ],
)  # fmt: skip
def test_the_engine_s_classes(words: str, call: Callable[[], Any]) -> None:
    refused(words, call)


# ------------------------------------------------------------------------------------- any PyTorch model


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({name: bad}, f"{name} must be a {kind}, found ")
          for name, kind, bads in (
              ("model", "Module", (None, 3, nn.Linear)),
              ("group", "ProcessGroup", (None, 3, "world")),
              ("agent", "AgentConfig", (None, "tcp://a:1", {})),
              ("config", "RouterConfig", ({}, 3)),
              ("placement", "Placement", ([[0]], np.zeros((2, 12)))),
              ("migration", "MigrationConfig", ({}, 3)),
              ("blocks", "Sequence", (3, nn.Linear(1, 1))))
          for bad in bads),
        *(({"num_redundant_experts": bad}, "num_redundant_experts must be") for bad in (*NOT_INTEGERS, -1)),
        *(({"num_nodes": bad}, "num_nodes must be") for bad in (*NOT_INTEGERS, 0)),
        *(({"tokens": bad}, "tokens= | is not one of own, shared") for bad in (None, 3, ["own"], "all")),
        *(({"dispatch": bad}, "dispatch must be text, found") for bad in (None, 3, ["auto"])),
        ({"blocks": []}, "blocks must hold at least one MoeBlock"),
        ({"blocks": [Block(Gate())]}, "blocks: 0 must be a MoeBlock"),
    ],
)  # fmt: skip
def test_adapt(change: dict[str, Any], words: str) -> None:
    model = make_model()
    before = dict(model.named_modules())
    given: dict[str, Any] = {"group": torch_dist.ProcessGroup(0, 1), "agent": AgentConfig(), **change}
    refused(words, lambda: adapt(given.pop("model", model), **given))
    assert dict(model.named_modules()) == before


def loose_experts(block: Block) -> None:
    """Tensors that are neither parameters nor buffers."""
    experts = nn.Module()
    experts.gate_up_proj = torch.zeros(EXPERTS, 4, 4)
    experts.down_proj = torch.zeros(EXPERTS, 4, 2)
    block.experts = experts  # type: ignore[assignment]


def test_blocks() -> None:
    config = RouterConfig(EXPERTS, TOP_K)
    refused(
        "a (Linear): found no `gate` and `experts`",
        lambda: check_gate(MoeBlock("a", nn.Linear(1, 1)), config),
    )
    block = Block(Gate())
    loose_experts(block)
    refused("without stacked gate_up_proj and down_proj", lambda: check_gate(MoeBlock("a", block), config))


@pytest.mark.parametrize(
    ("field", "words"),
    [("num_experts_per_tok", "num_experts_per_tok"), ("n_group", "n_group"), ("topk_group", "topk_group")],
)
def test_a_model_s_configuration(field: str, words: str) -> None:
    for bad in ("two", [2], 1.5, 1j):
        model = make_model()
        model.config = SimpleNamespace(**{**vars(model.config), field: bad})
        refused(
            f"Model.config (SimpleNamespace): {words} must be an integer",
            lambda model=model: router_config_of(model),  # type: ignore[misc]
        )
    model = make_model()
    model.config = SimpleNamespace(**{**vars(model.config), "routed_scaling_factor": "2.5"})
    refused("routed_scaling_factor must be a finite number, found '2.5'", lambda: router_config_of(model))
