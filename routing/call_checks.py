"""What a router and its calls are handed, against the plan: quick where all is well, and exact words where not.

A call's checks are part of the launch's host time: each argument that is there costs one pass over its attributes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenroute.eplb._checks import describe, require_bool, require_choice, require_int
from evenroute.routing.output import OUTPUT_NAMES, RouteCall, RouterPlan, RoutingOutput
from evenroute.routing.settings.checks import (
    BIAS_DTYPES,
    ID_DTYPES,
    MARKER_DTYPES,
    WEIGHT_DTYPES,
    fits,
    require_output,
    require_tensor,
)
from evenroute.routing.settings.config import RouterConfig

LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TARGET_DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64)
MAX_ROW_OFFSET = 1 << 62

_INT32 = (torch.int32,)


def checked_emit(emit: Any, config: RouterConfig) -> tuple[str, ...]:
    """A router's `emit` in the order of `OUTPUT_NAMES`; ValueError where it names what there is not."""
    if not isinstance(emit, tuple | list):
        raise ValueError(f"emit must be a tuple of names ({', '.join(OUTPUT_NAMES)}), found {describe(emit)}")
    for name in emit:
        require_choice("emit", name, OUTPUT_NAMES)
    rewrites = config.shared_mode == "waterfill" and config.num_shared_experts > 0
    if rewrites and (not {"weights", "physical_ids"} <= set(emit) or "packed_ids" in emit):
        raise ValueError(
            f"emit={tuple(emit)}: shared_mode='waterfill' rewrites weights and physical_ids: emit both, and no "
            "packed_ids"
        )
    return tuple(name for name in OUTPUT_NAMES if name in emit)


def require_interpreter(device: torch.device) -> None:
    """ValueError unless the kernels can run under Triton's interpreter on this device."""
    import triton

    if device.type != "cpu":
        raise ValueError(f"backend='interpret' needs CPU tensors, the tables lie on {device}")
    if not triton.knobs.runtime.interpret:
        raise ValueError(
            "backend='interpret' needs TRITON_INTERPRET=1 in the environment before triton's import"
        )


def require_layer(layer: Any, num_layers: int) -> None:
    """ValueError unless ``layer`` is an int in [0, L)."""
    require_int("layer", layer, -(1 << 63))
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer={layer} is outside [0, num_layers={num_layers})")


def num_rows(logits: Any, logical_ids: Any) -> int:
    """T of a call; ValueError where neither input is a tensor of two dimensions."""
    name, rows = ("logits", logits) if logical_ids is None else ("logical_ids", logical_ids)
    if rows is None:
        raise ValueError("logits=None: give logits or logical_ids")
    if not isinstance(rows, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, found {describe(rows)}")
    shape = rows.shape
    if len(shape) != 2:
        wanted = "[T, E]" if name == "logits" else "[T, K]"
        raise ValueError(f"{name} must have shape {wanted}, found {list(shape)}")
    return shape[0]


def require_logits(plan: RouterPlan, logits: Any) -> None:
    """ValueError unless these are logits [T, E] for the plan."""
    require_tensor(
        "logits", logits, ("T", plan.config.num_experts), dtypes=LOGIT_DTYPES, device=plan.seed.device
    )


def check_call(
    plan: RouterPlan, call: RouteCall, waterfill_target: Any = None, out: RoutingOutput | None = None
) -> None:
    """ValueError where an input does not fit the router, or inputs contradict each other."""
    rows, config, device = call.num_tokens, plan.config, plan.seed.device
    layer, offset = call.layer, call.row_offset
    if type(layer) is not int or not 0 <= layer < plan.tables.num_layers:
        require_layer(layer, plan.tables.num_layers)
    if type(offset) is not int or not 0 <= offset < MAX_ROW_OFFSET:
        require_int("row_offset", offset, 0, MAX_ROW_OFFSET - 1)
    if call.count is not True and call.count is not False:
        _check_count(call.count, device)
    if type(call.route_padding) is not bool or type(call.keep_weights) is not bool:
        require_bool("route_padding", call.route_padding)
        require_bool("keep_weights", call.keep_weights)
    if call.keep_weights and call.given_ids is None:
        raise ValueError("keep_weights=True needs given logical_ids and weights")
    if call.given_ids is not None:
        _check_given(plan, call)
    else:
        logits = call.logits
        if not fits(logits, (rows, config.num_experts), LOGIT_DTYPES, device):
            require_logits(plan, logits)
        if call.given_weights is not None:
            raise ValueError("weights come with logical_ids, found weights alone")
    bias = call.bias
    if bias is not None:
        one, each = (config.num_experts,), (rows, config.num_experts)
        if not fits(bias, one, BIAS_DTYPES, device) and not fits(bias, each, BIAS_DTYPES, device):
            require_tensor("bias", bias, one, each, dtypes=BIAS_DTYPES, device=device)
    valid = call.num_valid_tokens
    if valid is not None and not fits(valid, (1,), _INT32, device) and not fits(valid, (), _INT32, device):
        require_tensor("num_valid_tokens", valid, dtypes=_INT32, device=device)
        if valid.numel() != 1:
            raise ValueError(f"num_valid_tokens must be one int32, found {valid.dtype} {list(valid.shape)}")
    if call.marked_bias is not None or call.token_marker is not None:
        _check_marked(plan, call)
    if call.expert_ids_by_token is not None or call.token_ids is not None:
        _check_table(plan, call)
    if waterfill_target is not None:
        _check_target(plan, waterfill_target)
    if out is not None:
        _check_out(plan, rows, out)


def _check_count(count: Any, device: Any) -> None:
    """One flag on the router's device, read there."""
    if not isinstance(count, Tensor):
        require_bool("count", count)
    require_tensor("count", count, dtypes=MARKER_DTYPES, device=device)
    if count.numel() != 1:
        raise ValueError(f"count must be one flag, found {count.dtype} {list(count.shape)}")


def _check_given(plan: RouterPlan, call: RouteCall) -> None:
    config, device = plan.config, plan.seed.device
    shape: tuple[int, int] = (call.num_tokens, config.top_k)
    whole = (call.num_tokens, config.num_columns)
    if isinstance(call.given_ids, Tensor) and tuple(call.given_ids.shape) == whole:
        shape = whole
        if config.num_shared_experts and config.shared_mode == "waterfill":
            raise ValueError("logical_ids with shared columns: shared_mode='waterfill' fills these itself")
    if not fits(call.given_ids, shape, ID_DTYPES, device):
        require_tensor("logical_ids", call.given_ids, shape, dtypes=ID_DTYPES, device=device)
    if call.given_weights is None:
        raise ValueError("weights=None: given logical_ids need them")
    if not fits(call.given_weights, shape, WEIGHT_DTYPES, device):
        require_tensor("weights", call.given_weights, shape, dtypes=WEIGHT_DTYPES, device=device)


def _check_marked(plan: RouterPlan, call: RouteCall) -> None:
    if call.marked_bias is None or call.token_marker is None:
        raise ValueError("marked_bias and token_marker come together, found one of them")
    device = plan.seed.device
    require_tensor(
        "marked_bias", call.marked_bias, (plan.config.num_experts,), dtypes=BIAS_DTYPES, device=device
    )
    require_tensor("token_marker", call.token_marker, (call.num_tokens,), dtypes=MARKER_DTYPES, device=device)


def _check_table(plan: RouterPlan, call: RouteCall) -> None:
    if call.expert_ids_by_token is None or call.token_ids is None:
        raise ValueError("expert_ids_by_token and token_ids come together, found one of them")
    if call.given_ids is not None:
        raise ValueError("expert_ids_by_token and logical_ids both name the experts, expected one of them")
    device, shape = plan.seed.device, ("vocab", plan.config.top_k)
    require_tensor("expert_ids_by_token", call.expert_ids_by_token, shape, dtypes=ID_DTYPES, device=device)
    require_tensor("token_ids", call.token_ids, (call.num_tokens,), dtypes=ID_DTYPES, device=device)


def _check_target(plan: RouterPlan, target: Any) -> None:
    if plan.config.shared_mode != "waterfill" or not plan.config.num_shared_experts:
        raise ValueError("waterfill_target needs shared experts and shared_mode='waterfill', expected None")
    ranks = plan.tables.topology.ep_size
    require_tensor("waterfill_target", target, (ranks,), dtypes=TARGET_DTYPES, device=plan.seed.device)


def _check_out(plan: RouterPlan, rows: int, out: Any) -> None:
    if not isinstance(out, RoutingOutput):
        raise ValueError(f"out must be a RoutingOutput from `allocate`, found {describe(out)}")
    shape, device, emit = (rows, plan.config.num_columns), plan.seed.device, plan.emit
    if out.emitted != emit:
        raise ValueError(
            f"out holds {', '.join(out.emitted) or 'nothing'}; this router emits {', '.join(emit)}"
        )
    for name in emit:
        tensor = getattr(out, name)
        if name == "slot_histogram":
            require_output("out.slot_histogram", tensor, (plan.num_buckets,), torch.int32, device)
        else:
            dtype = torch.float32 if name == "weights" else torch.int32
            require_output(f"out.{name}", tensor, shape, dtype, device)
