"""What the plug-in does not do inside vLLM: each configuration or layer is refused by name, with the remedy."""

from __future__ import annotations

from typing import Any

import torch

from evenroute.dist.engines.plugin import refuse
from evenroute.dist.engines.vllm.seams import ENGINE

_ROUTERS_REFUSED = ("ZeroExpertRouter",)  # routes to columns that no slot holds


def _offloads(config: Any) -> bool:
    offload = getattr(config, "offload_config", None)
    parts = (config.cache_config, offload, getattr(offload, "uva", None), getattr(offload, "prefetch", None))
    names = ("cpu_offload_gb", "offload_group_size")
    return any(getattr(part, name, 0) for part in parts for name in names)


def config_problem(config: Any) -> str:
    """What of a `VllmConfig` is refused, with the remedy; empty where nothing is."""
    parallel, model = config.parallel_config, config.model_config
    if not (parallel.enable_expert_parallel and parallel.enable_eplb):
        return "vLLM runs without EPLB: give --enable-expert-parallel --enable-eplb, or take evenroute's settings away"
    refused = {
        "pipeline parallelism": (parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size 1"),
        "prefill context parallelism": (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "--prefill-context-parallel-size 1",
        ),
        "elastic expert parallelism": (
            getattr(parallel, "enable_elastic_ep", False),
            "no --enable-elastic-ep",
        ),
        "dual batch overlap": (
            getattr(parallel, "use_ubatching", False),
            "no --enable-dbo, no micro-batches",
        ),
        "sleep mode": (getattr(model, "enable_sleep_mode", False), "no --enable-sleep-mode"),
        "weight transfer": (getattr(config, "weight_transfer_config", None), "no --weight-transfer-config"),
        "LoRA": (getattr(config, "lora_config", None), "no --enable-lora"),
        "CPU offload of weights": (_offloads(config), "no --cpu-offload-gb and no other offload of weights"),
    }
    for name, (found, remedy) in refused.items():
        if found:
            return f"{name} is not supported with evenroute: {remedy}"
    return ""


def check_config(config: Any) -> None:
    """End the process where `config_problem` finds one."""
    problem = config_problem(config)
    if problem:
        refuse(ENGINE, problem)


def device_problem(device: torch.device) -> str:
    """Devices other than NVIDIA's GPUs (and CPUs, for tests)."""
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and torch.version.hip):
        return f"device {device}{' (ROCm)' if torch.version.hip else ''} is not supported: NVIDIA GPUs are"
    return ""


def layer_problem(layer: Any, base_router: Any, rank: int, num_local: int) -> str:
    """What of an MoE layer is refused; empty where nothing is.

    rank, num_local   of the EP group, and its slots on this rank
    """
    router: Any = getattr(layer, "router", None)
    if not isinstance(router, base_router):
        return f"its router is a {type(router).__name__}, not one of vLLM's BaseRouter: such layers route by themselves"
    if type(router).__name__ in _ROUTERS_REFUSED or getattr(router, "num_fused_shared_experts", 0) > 0:
        return f"{type(router).__name__} with zero or fused shared experts is not supported: fuse none"
    if router.eplb_state is None:
        return "EPLB is off in it"
    if layer.routed_experts.quant_method.is_monolithic:
        return "its kernel routes by itself (monolithic): choose another --moe-backend"
    if layer.do_naive_dispatch_combine:
        return "it gathers all ranks' tokens before it routes: choose another --moe-backend or quantisation"
    if router.global_num_experts < num_local or layer.routed_experts.local_num_experts != num_local:
        return f"{layer.routed_experts.local_num_experts} local slots found, expected {num_local}"
    table = layer.expert_map
    if table is not None:
        local = (table >= 0).nonzero().flatten().cpu()
        if local.tolist() != list(range(rank * num_local, (rank + 1) * num_local)):
            return "slots lie round robin over the ranks: --expert-placement-strategy linear"
    return ""
