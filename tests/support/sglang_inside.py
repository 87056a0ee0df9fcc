"""A stand-in of what the plug-in hooks inside SGLang, written from its documented behaviour: a registry of hooks, the
targets, a routing configuration and a model of one rank."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    hooks: ClassVar[dict[str, tuple[Any, HookType]]] = {}

    @classmethod
    def register(cls, target: str, hook: Any, kind: HookType) -> None:
        cls.hooks[target] = (hook, kind)


class TopKOutputFormat(IntEnum):
    STANDARD = auto()
    TRITON_KERNEL = auto()
    BYPASSED = auto()
    PACKED = auto()


class StandardTopKOutput(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class StandardTopKOutputPacked(NamedTuple):
    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor
    packed_topk_ids: Tensor


@dataclass
class TopKConfig:
    top_k: int
    use_grouped_topk: bool = False
    topk_group: int | None = None
    num_expert_group: int | None = None
    renormalize: bool = True
    num_fused_shared_experts: int = 0
    custom_routing_function: Callable[..., tuple[Tensor, Tensor]] | None = None
    correction_bias: Tensor | None = None
    torch_native: bool = False
    routed_scaling_factor: float | None = None
    apply_routed_scaling_factor_on_output: bool = False
    fused_shared_experts_scaling_factor: float | None = None
    output_format: TopKOutputFormat | None = None
    scoring_func: str = "softmax"
    fused_gate_packed_ids: bool = False
    layer_id: int | None = None


class TopK(nn.Module):
    def __init__(self, layer_id: int, config: TopKConfig) -> None:
        super().__init__()
        self.layer_id, self.topk_config = layer_id, config


class Experts(nn.Module):
    """A layer's local experts; each slot's rows say which expert they were loaded as."""

    def __init__(self, layer_id: int, experts: list[int], num_slots: int) -> None:
        super().__init__()
        self.layer_id, self.num_local_experts, self.num_experts = layer_id, len(experts), num_slots
        rows = torch.tensor([[100.0 * layer_id + e] * 4 for e in experts])
        self.w13_weight = nn.Parameter(rows.clone(), requires_grad=False)
        self.w2_weight = nn.Parameter(-rows, requires_grad=False)


class Model(nn.Module):
    """Layer 0 is dense, layers 1 and 2 have experts."""

    def __init__(self, config: TopKConfig, rows: Tensor, rank: int, local: int) -> None:
        super().__init__()
        self.topks = nn.ModuleList(TopK(at, config_copy(config)) for at in (1, 2))
        mine = rows[:, rank * local : (rank + 1) * local].tolist()
        self.experts = nn.ModuleList(Experts(at, mine[at], rows.shape[1]) for at in (1, 2))

    @property
    def routed_experts_weights_of_layer(self) -> dict[int, list[Tensor]]:
        return {m.layer_id: [m.w13_weight.data, m.w2_weight.data] for m in self.experts}


def config_copy(config: TopKConfig) -> TopKConfig:
    return TopKConfig(**vars(config))


class Metadata:
    """ExpertLocationMetadata: expert e in slot e, then again from 0 on."""

    def __init__(self, num_layers: int, num_experts: int, num_slots: int, ep_size: int) -> None:
        rows = (torch.arange(num_slots) % num_experts).repeat(num_layers, 1)
        self.num_layers, self.num_logical_experts, self.num_physical_experts = (
            num_layers,
            num_experts,
            num_slots,
        )
        self.num_local_physical_experts = num_slots // ep_size
        self.physical_to_logical_map, self.physical_to_logical_map_cpu = rows, rows.clone()
        every = torch.full((num_layers, num_experts, num_slots - num_experts + 1), -1)
        self.logical_to_all_physical_map, self.logical_to_all_physical_map_cpu = every, every.clone()
        self.logical_to_all_physical_map_num_valid = torch.zeros(num_layers, num_experts, dtype=torch.int64)
        self.logical_to_rank_dispatch_physical_map = torch.zeros(num_layers, num_experts, dtype=torch.int64)


class Runner:
    """ModelRunner: what a rank's process has once its model is loaded."""

    device = "cpu"
    is_draft_worker = False

    def __init__(self, model: Model, **arguments: Any) -> None:
        self.model = model
        known = {"enable_eplb": True, "ep_dispatch_algorithm": "dynamic", "moe_a2a_backend": "none"}
        known |= {"nnodes": 1, "model_path": "/models/tiny", "dp_size": 1, "enable_dp_attention": False}
        self.server_args = types.SimpleNamespace(**{**known, **arguments})


def sglang_select(hidden: Tensor, logits: Tensor, config: TopKConfig, **_: Any) -> StandardTopKOutput:
    """What SGLang would choose by itself: logical ids."""
    width = config.top_k - config.num_fused_shared_experts
    if config.custom_routing_function is not None:
        weights, ids = config.custom_routing_function(hidden, logits, width, config.renormalize)
    else:
        weights, ids = logits.softmax(-1).topk(width)
    return StandardTopKOutput(weights.float(), ids.int(), logits)


def modules(version: str = "0.5.23") -> dict[str, types.ModuleType]:
    """Fresh modules by name, as an unpatched SGLang has them."""
    found: dict[str, types.ModuleType] = {}

    def module(name: str, **content: Any) -> None:
        for end in [i for i, c in enumerate(name) if c == "."] + [len(name)]:
            part = name[:end]
            if part not in found:
                found[part] = types.ModuleType(part)
                found[part].__path__ = []
                above, _, last = part.rpartition(".")
                if above:
                    setattr(found[above], last, found[part])
        vars(found[name]).update(content)

    class EPLBManager:
        def on_forward_pass_end(self) -> None: ...
        def reset_generator(self) -> None: ...
        def rebalance(self) -> None: ...

    class ExpertDistributionRecorder:
        @staticmethod
        def init_new(expert_location_metadata: Any, rank: int) -> str:
            return "SGLang's"

        def with_forward_pass(self) -> None: ...
        def start_record(self) -> None: ...

    class ModelRunner:
        def load_model(self) -> None: ...
        def forward(self, forward_batch: Any) -> None: ...

    class WeightUpdater:
        def update_weights_from_disk(self) -> None: ...
        def update_weights_from_tensor(self) -> None: ...
        def update_weights_from_ipc(self) -> None: ...
        def update_weights_from_distributed(self) -> None: ...

    def select_experts(
        hidden_states: Any,
        router_logits: Any,
        topk_config: Any,
        *,
        layer_id: Any = None,
        num_token_non_padded: Any = None,
        expert_location_dispatch_info: Any = None,
    ) -> Any: ...

    def kill_process_tree(parent_pid: int, include_parent: bool = True) -> None: ...

    exec_bag = types.SimpleNamespace(
        moe=types.SimpleNamespace(enable_eplb=True, expert_distribution_recorder_mode="stat")
    )
    module("sglang", __version__=version)
    module("sglang.srt.managers.scheduler")
    module("sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=HookType)
    module("sglang.srt.eplb.eplb_manager", EPLBManager=EPLBManager)
    module("sglang.srt.eplb.expert_distribution", ExpertDistributionRecorder=ExpertDistributionRecorder)
    module("sglang.srt.eplb.expert_location", get_global_expert_location_metadata=lambda: None)
    module("sglang.srt.model_executor.model_runner", ModelRunner=ModelRunner)
    module("sglang.srt.model_executor.model_runner_components.weight_updater", WeightUpdater=WeightUpdater)
    module("sglang.srt.utils.common", kill_process_tree=kill_process_tree)
    module("sglang.srt.runtime_context", get_exec=lambda: exec_bag, get_parallel=lambda: None)
    module("sglang.srt.state_capturer.routed_experts", get_global_experts_capturer=lambda: None)
    module(
        "sglang.srt.layers.moe.utils",
        has_per_rank_fused_shared_slots=lambda shared: False,
        should_use_flashinfer_cutlass_moe_fp4_allgather=lambda: False,
    )
    module(
        "sglang.srt.layers.moe.topk",
        select_experts=select_experts,
        TopK=TopK,
        TopKOutputFormat=TopKOutputFormat,
        StandardTopKOutput=StandardTopKOutput,
        StandardTopKOutputPacked=StandardTopKOutputPacked,
        capture_routed_experts_if_allowed=lambda config, layer_id, ids: None,
    )
    return found


@contextlib.contextmanager
def sglang_inside(version: str = "0.5.23") -> Iterator[dict[str, types.ModuleType]]:
    """The stand-in in the place of SGLang; what is importable as `sglang` otherwise stays out of reach."""
    before = {name: found for name, found in sys.modules.items() if name.partition(".")[0] == "sglang"}
    for name in before:
        del sys.modules[name]
    HookRegistry.hooks = {}
    found = modules(version)
    sys.modules.update(found)
    try:
        yield found
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
            del sys.modules[name]
        sys.modules.update(before)
