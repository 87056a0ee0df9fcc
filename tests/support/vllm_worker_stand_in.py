"""A stand-in of vLLM's worker for its plug-in: a tiny MoE on one rank, with the names that the plug-in wraps.

Written from what the plug-in's seams say of vLLM. `install()` puts modules in the place of vLLM's, `uninstall()` takes
them away; `Worker` loads a model and runs real, dummy and profile passes as vLLM's runners do.
"""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 8, 2, 16
VERSION = "0.32.0"


class BaseRouter:
    """Chooses by a subclass's `_compute_routing`, then maps."""

    def __init__(self, top_k: int, eplb_state: Any) -> None:
        self.top_k, self.global_num_experts, self.eplb_state = top_k, EXPERTS, eplb_state
        self.capture_fn: Any = None

    def _compute_routing(self, hidden: Tensor, logits: Tensor, dtype: Any, *, input_ids: Any = None) -> Any:
        raise NotImplementedError

    def _apply_eplb_mapping(self, topk_ids: Tensor) -> Tensor:
        return topk_ids + 1000  # visible

    def _select_experts(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        topk_indices_dtype: Any = None,
        *,
        input_ids: Any = None,
    ) -> Any:
        weights, ids = self._compute_routing(
            hidden_states, router_logits, topk_indices_dtype, input_ids=input_ids
        )
        return weights, self._apply_eplb_mapping(ids)


class FusedTopKRouter(BaseRouter):
    scoring_func, renormalize = "softmax", True

    def _compute_routing(self, hidden: Tensor, logits: Tensor, dtype: Any, *, input_ids: Any = None) -> Any:
        weights, ids = torch.softmax(logits.float(), dim=-1).topk(self.top_k)
        return weights / weights.sum(dim=-1, keepdim=True), ids.to(torch.int32)


class OddRouter(FusedTopKRouter):
    """Says softmax, and takes the lowest."""

    def _compute_routing(self, hidden: Tensor, logits: Tensor, dtype: Any, *, input_ids: Any = None) -> Any:
        return super()._compute_routing(hidden, -logits, dtype)


OddRouter.__name__ = "FusedTopKBiasRouter"
for _kind in (FusedTopKRouter, OddRouter):
    _kind.__module__ = "vllm.model_executor.layers.fused_moe.router.stand_in"


class Experts(nn.Module):
    def __init__(self, num_local: int) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.randn(num_local, 2 * HIDDEN), requires_grad=False)
        self.w2 = nn.Parameter(torch.randn(num_local, HIDDEN), requires_grad=False)
        self.local_num_experts = num_local
        self.quant_method = SimpleNamespace(is_monolithic=False)


def make_layer(router: type[BaseRouter] = FusedTopKRouter, number: int = 0) -> Any:
    return SimpleNamespace(
        router=router(TOP_K, object()),
        routed_experts=Experts(EXPERTS),
        do_naive_dispatch_combine=False,
        expert_map=None,
        layer_name=f"model.layers.{number}.mlp.experts",
        moe_config=SimpleNamespace(is_sequence_parallel=False, hidden_dim=HIDDEN),
    )


class EplbState:
    def __init__(self) -> None:
        self.model_states: dict[str, Any] = {}
        self.calls: list[str] = []

    def add_model(self, model: Any, model_config: Any, model_name: Any = None) -> None:
        rows = torch.arange(EXPERTS).repeat(LAYERS, 1)
        self.model_states[model_config.compute_hash()] = SimpleNamespace(
            physical_to_logical_map=rows,
            logical_to_physical_map=torch.full((LAYERS, EXPERTS, 4), -1),
            logical_replica_count=torch.zeros(LAYERS, EXPERTS, dtype=torch.int64),
            num_unpadded_tokens_tensors=[torch.tensor(0, dtype=torch.int32)],
        )

    def prepare_forward(self, model_config: Any, num_unpadded_tokens: int, ubatch_slices: Any = None) -> None:
        state = self.model_states[model_config.compute_hash()]
        state.num_unpadded_tokens_tensors[0].fill_(num_unpadded_tokens)

    def step(self, is_dummy: bool = False, is_profile: bool = False, log_stats: bool = False) -> None:
        self.calls.append("step")

    def rearrange(self, is_profile: bool = False, rank_mapping: Any = None) -> None:
        self.calls.append("rearrange")

    def start_async_loop(self, rank_mapping: Any = None, is_profile: bool = False) -> None:
        self.calls.append("start_async_loop")


class FirstRunner:
    """vLLM's first runner tells nothing before a dummy pass; the second one tells its rows."""

    tells_dummies = False

    def __init__(self, router: type[BaseRouter] = FusedTopKRouter) -> None:
        layers = [make_layer(router, number) for number in range(LAYERS)]
        self.model = SimpleNamespace(
            moe_layers=layers,
            num_logical_experts=EXPERTS,
            expert_weights=[list(layer.routed_experts.parameters()) for layer in layers],
        )
        self.model_config = SimpleNamespace(model="/models/tiny/", compute_hash=lambda: "tiny")
        self.eplb_state = EplbState()

    def load_model(self) -> None:
        self.eplb_state.add_model(self.model, self.model_config)
        self.eplb_state.start_async_loop()

    def execute(self, rows: int, padded: int) -> list[Any]:
        self.eplb_state.prepare_forward(self.model_config, rows)
        found = self._forward(padded)
        self.eplb_state.step()
        return found

    def _forward(self, rows: int) -> list[Any]:
        generator = torch.Generator().manual_seed(rows)
        logits = torch.randn(rows, EXPERTS, generator=generator)
        hidden = torch.zeros(rows, HIDDEN)
        return [layer.router._select_experts(hidden, logits, torch.int64) for layer in self.model.moe_layers]

    def _dummy_run(self, num_tokens: int, skip_eplb: bool = False, is_profile: bool = False) -> list[Any]:
        if self.tells_dummies:
            self.eplb_state.prepare_forward(self.model_config, num_tokens)
        found = self._forward(num_tokens)
        if not skip_eplb:
            self.eplb_state.step(is_dummy=True, is_profile=is_profile)
        return found

    def reload_weights(self) -> str:
        return "reloaded"


class SecondRunner(FirstRunner):
    tells_dummies = True

    def _dummy_run(self, num_tokens: int, skip_eplb: bool = False, is_profile: bool = False) -> list[Any]:
        return super()._dummy_run(num_tokens, skip_eplb, is_profile)

    def reload_weights(self) -> str:
        return super().reload_weights()


class WorkerBase:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config


class EngineArgs:
    def __init__(self, config: Any) -> None:
        self.config = config

    def create_engine_config(self, usage_context: Any = None) -> Any:
        return self.config


def make_config(evenroute: Any = None, **parallel: Any) -> Any:
    """A `VllmConfig` that the plug-in takes."""
    known = {
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 2,
        "data_parallel_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**known, **parallel}),
        model_config=SimpleNamespace(),
        cache_config=SimpleNamespace(),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        additional_config={} if evenroute is None else {"evenroute": evenroute},
    )


_ORIGINALS = [
    (owner, name, value)
    for owner in (EplbState, BaseRouter, FirstRunner, SecondRunner, WorkerBase, EngineArgs)
    for name, value in vars(owner).items()
    if callable(value)
]


def install(**more: Any) -> None:
    """These classes in the places of vLLM's."""
    group = SimpleNamespace(rank_in_group=0, world_size=1, cpu_group=None, device_group=None)
    if torch_dist.is_initialized():
        group.cpu_group = torch_dist.group.WORLD
    places = {
        "vllm": {"__version__": VERSION, **more},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
        "vllm.v1.worker.worker_base": {"WorkerBase": WorkerBase},
        "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner": FirstRunner},
        "vllm.v1.worker.gpu.model_runner": {"GPUModelRunner": SecondRunner},
        "vllm.distributed.eplb.eplb_state": {"EplbState": EplbState},
        "vllm.model_executor.layers.fused_moe.router.base_router": {"BaseRouter": BaseRouter},
        "vllm.distributed.parallel_state": {
            "get_ep_group": lambda: group,
            "get_eplb_group": lambda: group,
            "get_node_count": lambda: 1,
            "get_tensor_model_parallel_rank": lambda: 0,
        },
    }
    for path, names in places.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        sys.modules[path] = module = types.ModuleType(path)
        vars(module).update(names)


def uninstall() -> None:
    """As before `install`; the classes lose their wrappers."""
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]
    for owner, name, value in _ORIGINALS:
        setattr(owner, name, value)
