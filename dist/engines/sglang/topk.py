"""SGLang's routing forms as routers, and the routing of one batch: logits to physical ids in one launch.

A form that a `RouterConfig` says is routed from the logits. Any other (a routing function of the model's own, simulated
routing, `sqrtsoftplus_log1p`) is chosen by SGLang and used unchanged: logical ids and weights in, physical ids out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evenroute.dist.engines.plugin import refuse
from evenroute.dist.engines.sglang.seams import ENGINE
from evenroute.dist.rank.agent import RankAgent
from evenroute.routing.compiled import CompiledRouter
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

# SGLang divides by sum + this (its `_RENORMALIZE_SUM_EPSILON`).
SUM_EPSILON = 1e-20
DISPATCH = {None: "auto", "dynamic": "auto", "fake": "auto", "static": "static"}
_SIMULATED = ("SGLANG_SIMULATE_UNIFORM_EXPERTS", "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS")


def shared_columns(config: Any) -> int:
    """Columns of fused shared experts behind the routed ones; 0.5.23 has another name for them than 0.5.17."""
    return int(getattr(config, "num_shared_topk_slots", getattr(config, "num_fused_shared_experts", 0)))


def is_given(config: Any, *, simulated: bool) -> bool:
    """Whether SGLang chooses, and its choice is taken."""
    log1p = getattr(config, "sqrtsoftplus_log1p", False)
    return simulated or log1p or config.custom_routing_function is not None


def is_simulated(environ: Any) -> bool:
    """Whether SGLang rewrites what was chosen, for benches."""
    return any(str(environ.get(name, "")).lower() in ("1", "true", "yes", "y") for name in _SIMULATED)


def router_config(config: Any, num_experts: int, *, per_rank_shared: bool) -> RouterConfig:
    """A layer's `TopKConfig` as routing form. ValueError where no router computes it.

    As in SGLang: grouped with a bias is DeepSeek's noaux_tc, whatever `scoring_func` says; grouped without takes the
    largest score of a group; a softmax's bias is added to the probability.
    """
    shared, grouped = shared_columns(config), config.use_grouped_topk
    biased_groups = grouped and config.correction_bias is not None
    factor = config.routed_scaling_factor
    return RouterConfig(
        num_experts,
        config.top_k - shared,
        scoring="sigmoid" if biased_groups else config.scoring_func,
        num_groups=config.num_expert_group if grouped else 1,
        topk_group=config.topk_group if grouped else 1,
        topk_method="noaux_tc" if biased_groups else "greedy",
        renormalize=config.renormalize,
        renormalize_epsilon=SUM_EPSILON if config.renormalize else 0.0,
        routed_scaling_factor=float(factor) if factor else 1.0,
        apply_routed_scaling_factor=bool(config.apply_routed_scaling_factor_on_output),
        bias_domain="score" if config.scoring_func == "softmax" and not biased_groups else "logit",
        num_shared_experts=shared,
        shared_mode="per_rank" if shared and per_rank_shared else "global",
    )


@dataclass
class LayerRouting:
    """What a layer's TopKConfig carries: `config.evenroute`. Attributes alone, so that a compiler can follow.

    row          the layer's row in tables and counters
    given        SGLang chooses, and its choice is taken
    shadow       SGLang chooses and places; what it chose is counted
    fake         `--ep-dispatch-algorithm fake`: random logits, no bias
    valid        int32 [1] on the device: rows of this pass, for passes whose padding SGLang does not give; or None
    shared_scale factor of the shared columns' weights (outputs of all ranks are summed), or None
    """

    row: int
    router: Router
    compiled: CompiledRouter
    given: bool
    shadow: bool
    fake: bool
    valid: Tensor | None
    shared_scale: float | None
    ids: Tensor | None = None  # [rows, K] int32, for recordings of tokens: filled inside captured graphs too
    capture: Any = None  # SGLang's capture of chosen ids, where it is switched on
    packed_output: Any = None  # StandardTopKOutputPacked, where the experts' kernel reads packed ids
    agent: RankAgent | None = None

    def route(self, logits: Tensor | None, **inputs: Any) -> Any:
        """The router, as one opaque operator under a compiler."""
        if torch.compiler.is_compiling():
            return self.compiled(logits, self.row, **inputs)
        return self.router(logits, self.row, **inputs)

    def record(self, routed: Any) -> None:
        """For recordings of tokens: keep the pass's ids for its end, or hand them over."""
        if self.ids is not None:
            rows = min(len(self.ids), len(routed.logical_ids))
            self.ids[:rows].copy_(routed.logical_ids[:rows, : self.ids.shape[1]])
        elif self.agent is not None and not torch.compiler.is_compiling():
            self.agent.record(self.row, routed)


def make_router(
    config: Any,
    tables: DispatchTables,
    counters: ExpertCounters,
    *,
    shared_tokens: bool,
    per_rank_shared: bool,
    algorithm: str | None,
    given: bool,
    emit: tuple[str, ...],
) -> Router:
    """The router of a layer's form; ends the process by name for a form or a mode that can't be."""
    if given and per_rank_shared and shared_columns(config):
        refuse(
            ENGINE,
            "a routing function of the model's own with shared experts in slots of each rank is not served; add "
            "--disable-shared-experts-fusion",
        )
    if algorithm not in DISPATCH:
        refuse(ENGINE, f"--ep-dispatch-algorithm {algorithm} is not known; take dynamic or static")
    form = router_config(config, tables.num_logical_experts, per_rank_shared=per_rank_shared)
    tokens = "shared" if shared_tokens else "own"
    return Router(form, tables, counters, dispatch=DISPATCH[algorithm], tokens=tokens, emit=emit)


def select_experts(
    original: Any,
    hidden_states: Tensor,
    router_logits: Tensor,
    topk_config: Any,
    *,
    layer_id: int | None = None,
    num_token_non_padded: Tensor | None = None,
    expert_location_dispatch_info: Any = None,
    **others: Any,
) -> Any:
    """Around SGLang's function of this name. Layers are known by their TopKConfig: a draft model's have the same
    numbers, and up to 0.5.22 some models give no dispatch information."""
    layer: LayerRouting | None = getattr(topk_config, "evenroute", None)
    if layer is None or layer.shadow:
        output = original(
            hidden_states,
            router_logits,
            topk_config,
            layer_id=layer_id,
            num_token_non_padded=num_token_non_padded,
            expert_location_dispatch_info=expert_location_dispatch_info,
            **others,
        )
        if layer is not None:
            count_only(layer, output, num_token_non_padded)
        return output
    bias = others.pop("dynamic_expert_bias", None)
    if bias is None:
        bias = topk_config.correction_bias
    # Where SGLang does not give the padding, its rows are routed like any other and not counted.
    padding = padding_inputs(layer, num_token_non_padded)
    given = layer.given or any(value is not None for value in others.values())
    if given:
        output = original(hidden_states, router_logits, topk_config, layer_id=layer_id, **others)
        routed = layer.route(
            None, logical_ids=output.topk_ids, weights=output.topk_weights, keep_weights=True, **padding
        )
    else:
        if layer.fake:
            router_logits.uniform_(5, 10)
            bias = None
        routed = layer.route(router_logits, bias=bias, **padding)
        if layer.capture is not None:
            layer.capture(topk_config, layer_id, routed.logical_ids)
    layer.record(routed)
    return make_output(layer, routed, router_logits, scale=not given)


def padding_inputs(layer: LayerRouting, given: Tensor | None) -> dict[str, Any]:
    """The router's arguments about padding rows."""
    if given is not None:
        return {"num_valid_tokens": given.reshape(1).to(torch.int32)}
    return {} if layer.valid is None else {"num_valid_tokens": layer.valid, "route_padding": True}


def count_only(layer: LayerRouting, output: Any, num_token_non_padded: Tensor | None) -> None:
    """Shadow: count what SGLang chose; its output holds slots."""
    width = layer.router.config.top_k
    slots, per_rank = output.topk_ids[:, :width].long(), layer.router.plan.slots_per_rank
    shared = per_rank - layer.router.tables.num_local_slots
    slots = torch.where(slots < 0, slots, slots - slots // per_rank * shared)
    experts = layer.router.tables.physical_to_logical[layer.row][slots.clamp_min(0)]
    ids = torch.where(slots < 0, -1, experts)
    weights = output.topk_weights[:, :width].float()
    routed = layer.route(
        None,
        logical_ids=ids,
        weights=weights,
        keep_weights=True,
        **padding_inputs(layer, num_token_non_padded),
    )
    layer.record(routed)


def make_output(layer: LayerRouting, routed: Any, logits: Tensor, *, scale: bool) -> Any:
    """What SGLang's function returns."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    if scale and layer.shared_scale is not None:
        routed.weights[:, -layer.router.config.num_shared_experts :] *= layer.shared_scale
    if layer.packed_output is not None:
        return layer.packed_output(routed.weights, routed.physical_ids, logits, routed.packed_ids)
    return StandardTopKOutput(routed.weights, routed.physical_ids, logits)
