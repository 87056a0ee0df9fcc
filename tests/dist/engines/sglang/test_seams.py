"""The plug-in is on with settings only; a changed seam, an unknown version or setting ends the start by name."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from evenroute.dist.engines.sglang import limits, seams
from support.sglang_inside import HookRegistry, TopKConfig, TopKOutputFormat, sglang_inside

DOCS = Path(__file__).resolve().parents[4] / "docs" / "sglang.md"


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, types.ModuleType]]:
    monkeypatch.setenv("EVENROUTE_REBALANCER", "ipc:///tmp/nobody")
    with sglang_inside() as found:
        yield found


def refused(capsys: pytest.CaptureFixture[str], call: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        call()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1
    return said


def test_every_seam_is_registered(inside: Any) -> None:
    seams.register()
    assert set(HookRegistry.hooks) == {
        next(t for t in seam.targets if not t.endswith("load_weights_from_distributed"))
        for seam in seams.SEAMS
    }


def test_without_settings_and_in_other_processes_nothing_is_hooked(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(__import__("sys").modules, "sglang.srt.managers.scheduler")
    seams.register()
    assert HookRegistry.hooks == {}
    with sglang_inside():
        monkeypatch.delenv("EVENROUTE_REBALANCER")
        seams.register()
        assert HookRegistry.hooks == {}


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "1.0"])
def test_another_version_is_refused(
    version: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENROUTE_REBALANCER", "ipc:///tmp/nobody")
    with sglang_inside(version):
        said = refused(capsys, seams.register)
    assert f"version {version} found, evenroute knows 0.5.17 to 0.5.23" in said


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.targets[0].rpartition(".")[2])
def test_a_seam_that_is_gone_is_refused(
    seam: seams.HookPoint, inside: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in seam.targets:
        above, _, name = target.rpartition(".")
        holder: Any = inside.get(above)
        if holder is None:
            module, _, cls = above.rpartition(".")
            holder = getattr(inside[module], cls)
        if name in vars(holder):
            delattr(holder, name)
    assert f"{seam.targets[0]} is not there" in refused(capsys, seams.register)


def test_a_seam_that_changed_is_refused(inside: Any, capsys: pytest.CaptureFixture[str]) -> None:
    topk: Any = inside["sglang.srt.layers.moe.topk"]
    kept, topk.select_experts = topk.select_experts, lambda hidden_states, logits, topk_config: None
    said = refused(capsys, seams.register)
    assert "topk.select_experts has changed: no parameter router_logits, layer_id" in said
    topk.select_experts = kept
    manager: Any = inside["sglang.srt.eplb.eplb_manager"].EPLBManager
    manager.on_new_event = lambda self: None
    assert "EPLBManager has changed: methods on_new_event are not known" in refused(capsys, seams.register)
    del manager.on_new_event
    recorder: Any = inside["sglang.srt.eplb.expert_distribution"].ExpertDistributionRecorder
    recorder.on_other_dispatch = lambda self: None
    assert "ExpertDistributionRecorder has changed: methods on_other" in refused(capsys, seams.register)


def test_a_hook_that_sglang_did_not_apply_is_refused(inside: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seams.register()  # and nobody applies what was registered
    assert "EPLBManager could not be hooked" in refused(capsys, seams.require_hooks)


REFUSED: dict[str, dict[str, Any]] = {
    "--pp-size 2": {"pp_size": 2},
    "--ep-size 2 with --tp-size 4": {"tp_size": 4},
    "--dp-size 2 without --enable-dp-attention": {"dp_size": 2},
    "--elastic-ep-backend mooncake": {"elastic_ep_backend": "mooncake"},
    "--ep-dispatch-algorithm lp": {"ep_dispatch_algorithm": "lp"},
    "--enable-two-batch-overlap": {"enable_two_batch_overlap": True},
    "--enable-pdmux": {"enable_pdmux": True},
    "--enable-memory-saver": {"enable_memory_saver": True},
    "--enable-waterfill": {"enable_waterfill": True},
    "--startup-weight-load-mode overlap": {"startup_weight_load_mode": "overlap"},
    "--moe-a2a-backend megamoe": {"moe_a2a_backend": "megamoe"},
    "device npu": {"device": "npu"},
}


@pytest.mark.parametrize("found", REFUSED)
def test_settings_that_are_not_served_end_the_start(found: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = dict(REFUSED[found])
    parallel = types.SimpleNamespace(pp_size=1, moe_ep_size=2, tp_size=2)
    for name in ("pp_size", "tp_size"):
        setattr(parallel, name, given.pop(name, getattr(parallel, name)))
    device = types.SimpleNamespace(type=given.pop("device", "cpu"))
    args = types.SimpleNamespace(**given)
    said = refused(capsys, lambda: limits.check_engine(args, parallel, device))
    assert f"evenroute in SGLang: {found} is not served; " in said
    assert found.partition(" with ")[0].split()[0] in DOCS.read_text(), "no remedy in docs/sglang.md"


def test_what_is_served_is_not_refused() -> None:
    parallel = types.SimpleNamespace(pp_size=1, moe_ep_size=8, tp_size=8)
    args = types.SimpleNamespace(dp_size=8, enable_dp_attention=True, moe_a2a_backend="deepep")
    limits.check_engine(args, parallel, torch.device("cpu"))


def test_forms_without_ids_and_unknown_fields_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for form in (TopKOutputFormat.BYPASSED, TopKOutputFormat.TRITON_KERNEL, TopKOutputFormat.PACKED):
        config = TopKConfig(4, output_format=form)
        said = refused(capsys, lambda c=config: limits.check_layer(3, c, TopKOutputFormat))
        assert re.search(rf"layer 3: output format {form.name}: .*--moe-runner-backend triton", said)
    limits.check_layer(3, TopKConfig(4, output_format=TopKOutputFormat.STANDARD), TopKOutputFormat)
    new = __import__("dataclasses").make_dataclass("New", [("top_k", int), ("next_thing", int)])(4, 1)
    assert "TopKConfig has changed: field next_thing" in refused(
        capsys, lambda: limits.check_layer(0, new, TopKOutputFormat)
    )
