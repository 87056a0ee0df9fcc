"""The adapter for any PyTorch MoE: refusals with class and remedy, and the same answers from two ranks as from one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from evenroute.dist.engines.torch import MoeBlock, check_gate, find_blocks, router_config_of
from evenroute.routing.settings.config import RouterConfig
from support.compiled import compile_planner
from support.control_plane import RebalancerProcess, child_environment
from support.torchrun import finish, start_torchrun
from support.toy_moe import EXPERTS, HIDDEN, TOP_K, Block, Gate, SoftmaxGate, make_model

WORKER = Path(__file__).resolve().parents[2] / "support/adapted_rank.py"


def test_blocks_and_routing_form_are_found() -> None:
    model = make_model(layers=3)
    assert [block.name for block in find_blocks(model)] == ["layers.0", "layers.1", "layers.2"]
    config = router_config_of(model)
    assert config == RouterConfig(
        EXPERTS, TOP_K, scoring="sigmoid", num_groups=4, topk_group=2, routed_scaling_factor=2.5
    )
    for block in find_blocks(model):
        check_gate(block, config)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)


def listed_experts(block: Block) -> None:
    block.experts = nn.ModuleList([nn.Linear(8, 8)])  # type: ignore[assignment]


def biased_experts(block: Block) -> None:
    block.experts.down_proj_bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))


def fp8_experts(block: Block) -> None:
    for name in ("gate_up_proj", "down_proj"):
        data = getattr(block.experts, name).detach().to(torch.float8_e4m3fn)
        setattr(block.experts, name, nn.Parameter(data, requires_grad=False))


def gelu_experts(block: Block) -> None:
    block.experts.act_fn = nn.GELU()  # type: ignore[assignment]


def flat_experts(block: Block) -> None:
    block.experts.down_proj = nn.Parameter(block.experts.down_proj.detach().transpose(1, 2).contiguous())


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (listed_experts, "experts of class ModuleList"),
        (biased_experts, r"further tensors \['down_proj_bias'\], which would stay behind"),
        (fp8_experts, "dtype torch.float8_e4m3fn"),
        (gelu_experts, "activation GELU, expected SiLU"),
        (flat_experts, r"down_proj \[16, 16, 32\], expected \[E, 2 I, H\] and \[E, H, I\]"),
    ],
)
def test_a_block_that_cannot_be_taken_is_refused_with_class_and_remedy(
    change: Callable[[Block], None], found: str
) -> None:
    """U10: refused at start, with the class found and the remedy; not an assert in the first forward pass."""
    model = make_model()
    change(model.layers[1])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=rf"model Model: layers\.1 \(Block\) has .*{found}.*use the router directly"
    ):
        find_blocks(model)


def test_a_model_without_an_moe_block_is_refused_with_class_and_remedy() -> None:
    with pytest.raises(
        ValueError, match=r"model Dense: found no MoE block, .*gate_up_proj.*minimal_engine\.py"
    ):
        find_blocks(Dense())


def test_a_configuration_without_experts_is_refused_with_the_fields() -> None:
    model = make_model()
    model.config = SimpleNamespace(hidden_size=8)
    with pytest.raises(
        ValueError, match=r"Model\.config \(SimpleNamespace\): found no num_experts or n_routed_experts"
    ):
        router_config_of(model)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scoring": "softmax"},
        {"renormalize": False},
        {"routed_scaling_factor": 1.0},
        {"num_groups": 1, "topk_group": 1},
        {"topk_method": "greedy"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_gate_that_answers_otherwise_is_refused(wrong: dict[str, object]) -> None:
    right = {
        "scoring": "sigmoid",
        "num_groups": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "renormalize": True,
    }
    block = MoeBlock("layers.7", Block(Gate()))
    config = RouterConfig(EXPERTS, TOP_K, **{**right, **wrong})  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"layers\.7 \(Block\): gate Gate and the router answer differently; row \d+: "
    ):
        check_gate(block, config)


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_gates_are_checked_too(renormalize: bool) -> None:
    block = MoeBlock("mlp", Block(SoftmaxGate(renormalize)))
    check_gate(block, RouterConfig(EXPERTS, TOP_K, renormalize=renormalize))
    with pytest.raises(ValueError, match="answer differently"):
        check_gate(block, RouterConfig(EXPERTS, TOP_K, renormalize=not renormalize))


def test_a_gate_that_returns_logits_alone_is_refused() -> None:
    block = MoeBlock("mlp", Block(nn.Linear(HIDDEN, EXPERTS)))
    with pytest.raises(ValueError, match=r"gate Linear returned Tensor, expected \(logits, weights, ids\)"):
        check_gate(block, RouterConfig(EXPERTS, TOP_K))


@pytest.mark.parametrize("tokens", ["own", pytest.param("shared", marks=pytest.mark.slow)])
def test_two_ranks_answer_as_the_whole_model_before_and_after_experts_move(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])
    compile_planner()
    flags = ["--interval", "2w", "--policy", "global"]
    with RebalancerProcess(tmp_path, flags=flags) as rebalancer:
        process = start_torchrun(2, rebalancer.bind, tokens, script=WORKER)
        status, out, err = finish(process, 240)
    assert status == 0, out + err[-4000:]
    results = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert len(results) == 2, out
    for result in results:
        assert result["moved"] > 0, f"no expert moved within the limit: {result} {rebalancer.log()[-3000:]}"
        assert result["worst"] < 1e-4, f"answers differ from the original model by {result['worst']}"
    assert sum(result["bytes"] for result in results) > 0
    assert results[0]["key"] == results[1]["key"]
    assert results[0]["key"][1] >= 1
