"""Off unless configured; configured wrongly, or beside an engine that is not known, the process ends in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evenroute.dist.engines.vllm import entry, seams
from evenroute.dist.engines.vllm.limits import config_problem, layer_problem
from evenroute.dist.engines.vllm.weights import expert_weights
from support import vllm_worker_stand_in as vllm

ADDRESS = "tcp://127.0.0.1:7421"


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    vllm.install()
    monkeypatch.setattr(entry, "check_seams", lambda version: None)  # the stand-in has no sources of vLLM's
    monkeypatch.setattr(entry, "_installed", False)
    ours = logging.getLogger("evenroute")
    kept = ours.handlers[:], ours.level, ours.propagate
    for name in ("EVENROUTE_REBALANCER", "EVENROUTE_MODE"):
        monkeypatch.delenv(name, raising=False)
    yield
    ours.handlers, ours.level, ours.propagate = kept
    vllm.uninstall()


def wrapped() -> set[str]:
    owners = (vllm.EplbState, vllm.BaseRouter, vllm.FirstRunner, vllm.SecondRunner)
    return {
        f"{one.__name__}.{name}"
        for one in owners
        for name, call in vars(one).items()
        if hasattr(call, "__wrapped__")
    }


def end_of(call: Any, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        call()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("evenroute in vLLM: ")
    assert said.count("\n") == 1
    return said


def test_without_settings_nothing_is_wrapped_or_added() -> None:
    entry.register()
    config = vllm.EngineArgs(vllm.make_config(enable_eplb=False)).create_engine_config()
    vllm.WorkerBase(config)
    assert wrapped() == set()
    assert config.additional_config == {}


@pytest.mark.parametrize("by", ["table", "environment"])
def test_settings_reach_the_workers(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "environment":
        monkeypatch.setenv("EVENROUTE_REBALANCER", ADDRESS)
    entry.register()
    config = vllm.EngineArgs(
        vllm.make_config({"rebalancer": ADDRESS} if by == "table" else None)
    ).create_engine_config()
    assert wrapped() == set()  # the first process runs no model
    assert config.additional_config["evenroute"]["rebalancer"] == ADDRESS
    assert "evenroute_version" in config.additional_config
    monkeypatch.delenv("EVENROUTE_REBALANCER", raising=False)  # a worker on another host
    vllm.WorkerBase(config)
    assert wrapped() == {
        *(
            f"EplbState.{name}"
            for name in ("add_model", "prepare_forward", "step", "rearrange", "start_async_loop")
        ),
        "BaseRouter._select_experts",
        *(
            f"{one}.{name}"
            for one in ("FirstRunner", "SecondRunner")
            for name in ("_dummy_run", "reload_weights")
        ),
    }
    before = vllm.EplbState.step
    vllm.WorkerBase(config)
    assert vllm.EplbState.step is before  # once


def test_in_shadow_vllm_goes_on_balancing() -> None:
    entry.register()
    vllm.WorkerBase(vllm.make_config({"rebalancer": ADDRESS, "mode": "shadow"}))
    assert not {"EplbState.rearrange", "EplbState.start_async_loop", "BaseRouter._select_experts"} & wrapped()


def test_an_unknown_version_and_an_unknown_seam_end_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVENROUTE_REBALANCER", ADDRESS)
    vllm.install(__version__="0.34.1")
    assert "0.34.1 found, evenroute knows 0.26 to 0.33" in end_of(entry.register, capsys)
    vllm.install()
    monkeypatch.setattr(entry, "check_seams", seams.check_seams)
    monkeypatch.setattr(
        seams, "installed_source", lambda file: "class EplbState:\n    def add_model(self, models): ...\n"
    )
    said = end_of(entry.register, capsys)
    assert "distributed.eplb.eplb_state.EplbState.add_model has parameters (self, models)" in said
    assert "0.32.0: " in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"enable_eplb": False}, "give --enable-expert-parallel --enable-eplb"),
        ({"enable_expert_parallel": False}, "give --enable-expert-parallel --enable-eplb"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline parallelism is not supported with evenroute: --pipeline-parallel-size 1",
        ),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"enable_elastic_ep": True}, "no --enable-elastic-ep"),
        ({"use_ubatching": True}, "no --enable-dbo"),
    ],
)
def test_a_parallel_form_that_is_refused(change: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    entry.register()
    arguments = vllm.EngineArgs(vllm.make_config({"rebalancer": ADDRESS}, **change))
    assert words in end_of(arguments.create_engine_config, capsys)


@pytest.mark.parametrize(
    ("place", "name", "value", "words"),
    [
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
        ("cache_config", "cpu_offload_gb", 4, "CPU offload"),
        ("", "weight_transfer_config", object(), "weight transfer"),
        ("", "lora_config", object(), "LoRA"),
        ("", "offload_config", SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=1)), "CPU offload"),
    ],
)
def test_a_configuration_that_is_refused(place: str, name: str, value: Any, words: str) -> None:
    config = vllm.make_config()
    assert config_problem(config) == ""
    setattr(getattr(config, place) if place else config, name, value)
    assert config_problem(config).startswith(words)


def broken_layer(**change: Any) -> Any:
    layer = vllm.make_layer()
    for name, value in change.items():
        owner, _, attribute = name.rpartition("__")
        setattr(getattr(layer, owner) if owner else layer, attribute, value)
    return layer


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"router": object()}, "not one of vLLM's BaseRouter"),
        ({"router__num_fused_shared_experts": 1}, "fused shared experts"),
        ({"router__eplb_state": None}, "EPLB is off in it"),
        ({"routed_experts__quant_method": SimpleNamespace(is_monolithic=True)}, "another --moe-backend"),
        ({"do_naive_dispatch_combine": True}, "gathers all ranks' tokens before it routes"),
        ({"routed_experts__local_num_experts": 3}, "3 local slots found, expected 8"),
        ({"expert_map": torch.tensor([0, -1] * 8)}, "--expert-placement-strategy linear"),
    ],
)
def test_a_layer_that_is_refused(change: Any, words: str) -> None:
    assert layer_problem(vllm.make_layer(), vllm.BaseRouter, 0, vllm.EXPERTS) == ""
    assert words in layer_problem(broken_layer(**change), vllm.BaseRouter, 0, vllm.EXPERTS)


class KernelSettings:
    """As vLLM's quantisation settings: an object of its package that holds tensors."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.scale = scale


KernelSettings.__module__ = "vllm.stand_in"


def moved(layer: Any) -> Any:
    listed = [tensor.view(vllm.EXPERTS, -1) for tensor in layer.routed_experts.parameters()]
    return expert_weights([layer], [listed], vllm.EXPERTS)


def test_all_scales_move_or_the_quantisation_is_refused_by_name() -> None:
    layer = vllm.make_layer()
    experts = layer.routed_experts
    experts.w13_scale = nn.Parameter(torch.rand(vllm.EXPERTS, 4), requires_grad=False)
    whole = torch.rand(1).expand(vllm.EXPERTS)  # one scale of a whole tensor
    experts.settings = KernelSettings(whole)
    experts.alias = KernelSettings(experts.w13_scale.t())  # the same memory
    assert list(moved(layer).layers[0].tensors) == ["w13", "w2", "w13_scale"]
    experts.settings = KernelSettings(torch.rand(vllm.EXPERTS, 1).to(torch.float8_e4m3fn))
    with pytest.raises(
        ValueError, match=r"layer 0: settings.scale has a row for each expert.* is not supported"
    ):
        moved(layer)
