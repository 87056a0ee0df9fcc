"""Which of evenroute's routing forms stands for a router of vLLM's: known by its class, then asked the same question.

Where the two answer alike, choice, replica, padding and counts are one launch of ours. Elsewhere (custom functions,
tables by token, another answer) vLLM's router chooses and ours places, counts and masks what it chose. Both are exact.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenroute.eplb._checks import one_line
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

_PROBE_ROWS = 64
_MODULES = "vllm.model_executor.layers.fused_moe.router."


class Choice(NamedTuple):
    """How a layer chooses: by our form ``config`` with ``bias [E]``, or, for a ``reason``, as vLLM's router does."""

    config: RouterConfig
    bias: Tensor | None
    reason: str


def given_choice(num_experts: int, top_k: int, reason: str) -> Choice:
    """vLLM's router chooses and weighs."""
    return Choice(RouterConfig(num_experts, top_k, renormalize=False), None, reason)


def _described(router: Any, num_experts: int) -> tuple[RouterConfig, Tensor | None]:
    """Our form of a router, by its class and attributes; ValueError where none of ours computes it."""
    kind = type(router).__name__
    if not type(router).__module__.startswith(_MODULES):
        raise ValueError(f"{kind} is the model's own")
    for name in ("custom_routing_function", "_hash_indices_table", "bias_vl"):
        if getattr(router, name, None) is not None:
            raise ValueError(f"{kind} with {name.strip('_')}")
    bias = getattr(router, "e_score_correction_bias", None)
    grouped = kind == "GroupedTopKRouter" or getattr(router, "use_grouped_topk", False)
    if kind not in ("FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter", "CPURouter"):
        raise ValueError(f"{kind} is not one of the routers that are known")
    factor = float(getattr(router, "routed_scaling_factor", 1.0))
    if kind == "CPURouter" and not grouped and router.scoring_func == "softmax":
        bias, factor = None, 1.0  # it ignores both there
    scoring = router.scoring_func
    config = RouterConfig(
        num_experts,
        router.top_k,
        scoring=scoring,
        num_groups=router.num_expert_group if grouped else 1,
        topk_group=router.topk_group if grouped else 1,
        renormalize=router.renormalize,
        routed_scaling_factor=factor,
        topk_method="greedy" if bias is None else "noaux_tc",
        bias_domain="score" if scoring == "softmax" and bias is not None else "logit",
    )
    return config, None if bias is None else bias.detach()


def choose(router: Any, num_experts: int, hidden_size: int, device: torch.device) -> Choice:
    """Our form of a router if both answer alike, else vLLM's own with the reason."""
    try:
        config, bias = _described(router, num_experts)
        difference = _difference(router, config, bias, hidden_size, device)
    except (ValueError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
        return given_choice(num_experts, router.top_k, one_line(error) or type(error).__name__)
    if difference:
        return given_choice(num_experts, router.top_k, difference)
    return Choice(config, bias, "")


def _difference(
    router: Any, config: RouterConfig, bias: Tensor | None, hidden_size: int, device: torch.device
) -> str:
    """Both routers asked about the same random logits; empty where they agree."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(_PROBE_ROWS, config.num_experts, generator=generator).to(device)
    hidden = torch.zeros(_PROBE_ROWS, hidden_size, device=device)
    with torch.no_grad():
        weights, ids = router._compute_routing(hidden, logits.clone(), None, input_ids=None)
        placement = Placement.initial(1, config.num_experts, config.num_experts, Topology(1))
        tables = DispatchTables(placement, ep_rank=0, device=device)
        ours = Router(config, tables, emit=("weights", "logical_ids"))(logits, 0, bias=bias)
    assert ours.logical_ids is not None
    dense = torch.zeros(2, _PROBE_ROWS, config.num_experts, device=device)
    dense[0].scatter_(1, ids.long(), weights.float())
    dense[1].scatter_(1, ours.logical_ids.long(), ours.weights)
    apart = float((dense[0] - dense[1]).abs().max())
    if apart > 1e-5 * max(1.0, float(dense[0].abs().max())):
        return f"{type(router).__name__} answers otherwise than its settings say (by {apart:.2g})"
    return ""
