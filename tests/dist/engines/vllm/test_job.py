"""A model of the stand-in engine on one rank: what is counted, what reaches vLLM, what its own balancer still does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as torch_dist

from evenroute.dist.engines.plugin import read_settings
from evenroute.dist.engines.vllm.hooks import Hooks
from evenroute.dist.engines.vllm.routes import _models
from evenroute.eplb.placement.placement import PlacementRow
from support import vllm_worker_stand_in as vllm
from support.ports import free_port


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    torch_dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    torch_dist.destroy_process_group()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """`start(runner, **settings)`: the runner with its model loaded, beside a rebalancer that is not there."""
    made: list[Any] = []

    def load(runner: Any, **settings: Any) -> Any:
        table = {
            "rebalancer": f"ipc://{tmp_path}/none.sock",
            "start_limit_s": 0.05,
            "close_limit_s": 0.05,
            **settings,
        }
        found = read_settings("vLLM", table, {})
        assert found is not None
        vllm.install()
        config = vllm.make_config()
        Hooks(found, config).install()
        runner.load_model()
        made.append(runner)
        return runner.eplb_state._evenroute_job

    yield load
    for runner in made:  # all that started
        runner.eplb_state._evenroute_job.agent.close()
    _models.clear()
    vllm.uninstall()


def counted(job: Any) -> np.ndarray[Any, Any]:
    return job.routes.layers[0].router.counters.take().numpy()


def wanted(rows: int, padded: int) -> np.ndarray[Any, Any]:
    logits = torch.randn(padded, vllm.EXPERTS, generator=torch.Generator().manual_seed(padded))
    ids = logits[:rows].topk(vllm.TOP_K).indices.flatten()
    return np.tile(np.bincount(ids.numpy(), minlength=vllm.EXPERTS), (vllm.LAYERS, 1))


@pytest.mark.parametrize("kind", [vllm.FirstRunner, vllm.SecondRunner])
@pytest.mark.parametrize("choice", ["auto", "engine"])
def test_real_rows_count_and_dummies_padding_and_warm_up_do_not(start: Any, kind: Any, choice: str) -> None:
    runner = kind()
    job = start(runner, choice=choice, window_steps=1000)
    runner._dummy_run(9, is_profile=True)
    runner._dummy_run(7, skip_eplb=True)
    assert counted(job).sum() == 0
    first = job._state.num_unpadded_tokens_tensors[0]
    found = runner.execute(5, 8)
    for weights, ids in found:
        assert ids.dtype == torch.int64
        assert weights.dtype == torch.float32
        assert ids.shape == (8, vllm.TOP_K)
        assert bool(((ids >= 0) & (ids < vllm.EXPERTS)).all())  # padding has slots too, for vLLM's kernels
    runner._dummy_run(6)  # an idle rank's, behind a real pass
    runner.execute(3, 3)
    runner._dummy_run(4, skip_eplb=True)
    np.testing.assert_array_equal(counted(job), wanted(5, 8) + wanted(3, 3))
    assert job._state.num_unpadded_tokens_tensors[0] is first
    # A step is a pass with a boundary: two real ones and an idle one; warm-up and profile runs have none.
    assert job.agent._closing.step == 4
    assert runner.eplb_state.calls == []  # nothing of vLLM's own balancer ran
    assert [bool(route.choice.reason) for route in job.routes.layers] == [choice == "engine"] * vllm.LAYERS


def test_a_router_that_answers_otherwise_keeps_its_choice(start: Any) -> None:
    runner = vllm.FirstRunner(vllm.OddRouter)
    job = start(runner, window_steps=1000)
    assert "answers otherwise" in job.routes.layers[0].choice.reason
    weights, ids = runner.execute(4, 4)[0]
    logits = torch.randn(4, vllm.EXPERTS, generator=torch.Generator().manual_seed(4))
    lowest, places = (-logits).softmax(dim=-1).topk(vllm.TOP_K)
    assert torch.equal(ids, places)  # one rank, identity: slots are experts
    torch.testing.assert_close(weights, lowest / lowest.sum(dim=-1, keepdim=True))
    assert counted(job).sum() == 4 * vllm.TOP_K * vllm.LAYERS


def test_in_shadow_vllm_routes_and_balances_and_evenroute_counts(start: Any) -> None:
    runner = vllm.FirstRunner()
    job = start(runner, mode="shadow", window_steps=1000)
    runner._dummy_run(6)
    _, ids = runner.execute(5, 8)[0]
    assert bool((ids >= 1000).all())  # vLLM's own mapping, of all rows
    np.testing.assert_array_equal(counted(job), wanted(5, 8))
    assert runner.eplb_state.calls == ["start_async_loop", "step", "step"]


def test_vllms_maps_become_those_of_a_committed_row(start: Any) -> None:
    job = start(vllm.FirstRunner())
    state = job._state
    for layer in range(vllm.LAYERS):  # as agreed at the start
        assert state.logical_to_physical_map[layer, :, 0].tolist() == list(range(vllm.EXPERTS))
        assert state.logical_replica_count[layer].tolist() == [1] * vllm.EXPERTS
    slots = np.array([3, 1, 0, 2, 3, 5, 6, 7], dtype=np.int32)
    job._write_maps(1, PlacementRow(slots, None))
    assert state.physical_to_logical_map[1].tolist() == slots.tolist()
    assert state.logical_replica_count[1].tolist() == [1, 1, 1, 2, 0, 1, 1, 1]
    assert state.logical_to_physical_map[1, 3].tolist() == [0, 4, -1, -1]
    assert state.logical_to_physical_map[1, 4].tolist() == [-1] * 4
    assert state.physical_to_logical_map[0].tolist() == list(range(vllm.EXPERTS))


def test_routed_experts_that_vllm_returns_are_logical(start: Any, tmp_path: Path) -> None:
    runner = vllm.FirstRunner()
    (tmp_path / "dumps").mkdir()
    job = start(runner, record_dir=str(tmp_path / "dumps"))
    seen: list[torch.Tensor] = []
    runner.model.moe_layers[1].router.capture_fn = seen.append
    runner.execute(6, 6)
    logits = torch.randn(6, vllm.EXPERTS, generator=torch.Generator().manual_seed(6))
    assert torch.equal(seen[0].long(), logits.topk(vllm.TOP_K).indices)
    assert torch.equal(job.routes.kept[0, :6].long(), seen[0].long())  # what a recording gets


def test_the_operator_is_what_runs_under_a_compiler(start: Any) -> None:
    runner = vllm.FirstRunner()
    job = start(runner, window_steps=1000)
    layer, hidden = runner.model.moe_layers[0], torch.zeros(5, vllm.HIDDEN)

    @torch.compile(fullgraph=True, backend="eager")
    def routed(logits: torch.Tensor) -> Any:
        return layer.router._select_experts(hidden, logits, torch.int32)

    logits = torch.randn(5, vllm.EXPERTS)
    runner.eplb_state.prepare_forward(runner.model_config, 4)
    weights, ids = routed(logits)
    direct = layer.router._select_experts(hidden, logits, torch.int32)
    assert torch.equal(weights, direct[0])
    assert torch.equal(ids, direct[1])
    assert counted(job)[0].sum() == 2 * 4 * vllm.TOP_K


def test_weights_are_not_reloaded(start: Any) -> None:
    runner = vllm.FirstRunner()
    start(runner)
    with pytest.raises(RuntimeError, match="weights can't be reloaded"):
        runner.reload_weights()


def test_a_draft_with_experts_ends_the_process(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runner = vllm.FirstRunner()
    start(runner)
    with pytest.raises(SystemExit):
        runner.eplb_state.add_model(runner.model, runner.model_config)
    assert "a draft model with experts of its own" in capsys.readouterr().err


def test_a_model_of_another_make_ends_the_process(start: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runner = vllm.FirstRunner()
    del runner.model.moe_layers[1].moe_config
    with pytest.raises(SystemExit):
        start(runner)
    assert "'moe_config': this model's layers are not like those" in capsys.readouterr().err
