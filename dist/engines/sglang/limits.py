"""Which settings of the engine are refused, each by its name and with what to do about it."""

from __future__ import annotations

import dataclasses
from typing import Any

from evenroute.dist.engines.plugin import refuse
from evenroute.dist.engines.sglang.seams import ENGINE, FIRST, LAST

# What a layer's TopKConfig may hold: a field that is not known could change the choice.
TOPK_FIELDS = frozenset(
    (
        *("top_k", "use_grouped_topk", "topk_group", "num_expert_group", "renormalize", "shared_experts"),
        *("num_fused_shared_experts", "custom_routing_function", "correction_bias", "torch_native"),
        *("routed_scaling_factor", "apply_routed_scaling_factor_on_output", "output_format"),
        *("fused_shared_experts_scaling_factor", "runner_backend", "routing_method_type", "scoring_func"),
        *("sqrtsoftplus_log1p", "fused_gate_packed_ids", "allow_routed_experts_capture", "layer_id"),
        *("_correction_bias_dtype_cache", "_correction_bias_cache_key"),
    )
)


def check_engine(args: Any, parallel: Any, device: Any) -> None:
    """End the process for settings under which routing, counting or moving would not be right."""

    def flag(name: str, otherwise: Any = None) -> Any:
        return getattr(args, name, otherwise)

    a2a = str(flag("moe_a2a_backend", "none"))
    separate = flag("dp_size", 1) > 1 and not flag("enable_dp_attention", False)
    for bad, found, remedy in (
        (parallel.pp_size != 1, f"--pp-size {parallel.pp_size}", "serve with --pp-size 1"),
        (
            parallel.moe_ep_size != parallel.tp_size,
            f"--ep-size {parallel.moe_ep_size} with --tp-size {parallel.tp_size}",
            "make them equal: every rank holds whole experts",
        ),
        (
            separate,
            f"--dp-size {flag('dp_size')} without --enable-dp-attention",
            "each replica is a job of its own: start one server a replica, each with its own rebalancer",
        ),
        (
            flag("elastic_ep_backend") is not None,
            f"--elastic-ep-backend {flag('elastic_ep_backend')}",
            "leave it out",
        ),
        (
            flag("ep_dispatch_algorithm") == "lp",
            "--ep-dispatch-algorithm lp",
            "take dynamic: planned shares of replicas come with the placement",
        ),
        (flag("enable_two_batch_overlap", False), "--enable-two-batch-overlap", "leave it out"),
        (flag("enable_pdmux", False), "--enable-pdmux", "leave it out"),
        (
            flag("enable_memory_saver", False),
            "--enable-memory-saver",
            "leave it out: weights that go away can't move",
        ),
        (flag("enable_waterfill", False), "--enable-waterfill", "leave it out"),
        (
            flag("startup_weight_load_mode") == "overlap",
            "--startup-weight-load-mode overlap",
            "leave it out: experts move as soon as they are loaded",
        ),
        ("megamoe" in a2a, f"--moe-a2a-backend {a2a}", "its gate routes inside: take deepep or none"),
        (
            device.type not in ("cpu", "cuda") or _is_hip(),
            f"device {device.type}{' (ROCm)' if _is_hip() else ''}",
            "evenroute's kernels run on CUDA",
        ),
    ):
        if bad:
            refuse(ENGINE, f"{found} is not served; {remedy}")


def _is_hip() -> bool:
    import torch

    return torch.version.hip is not None


def check_layer(at: int, config: Any, forms: Any) -> None:
    """End the process for a layer's routing that can't be taken: unknown fields, or a form without top-k ids."""
    unknown = sorted({field.name for field in dataclasses.fields(config)} - TOPK_FIELDS)
    if unknown:
        refuse(
            ENGINE, f"TopKConfig has changed: field {', '.join(unknown)}; versions known: {FIRST} to {LAST}"
        )
    if config.output_format not in (None, forms.STANDARD):
        refuse(
            ENGINE,
            f"layer {at}: output format {config.output_format.name}: its kernel chooses among logical experts by "
            "itself and knows no placement; take --moe-runner-backend triton (or another with standard top-k)",
        )
