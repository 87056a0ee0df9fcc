"""The routing launch on the device: `route_kernel(form, call, out)`, signature and results of `route_reference`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenroute.routing.dispatch import hash_salt
from evenroute.routing.kernels.plan import plan_launch, supports_groups
from evenroute.routing.kernels.route import route
from evenroute.routing.output import OUTPUT_NAMES, RouteCall, RouteForm, RoutingOutput
from evenroute.routing.reference import gather_scores, score_experts, select_experts
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import fits_payload

# From this many rows on tickets use several copies of their words: exact up to here, within 2 % above.
EXACT_ROWS = 256
INTERPRETED_ROWS = 8
_TABLE_COLUMNS = (
    "replica_span",
    "replica_slot",
    "replica_threshold",
    "static_slot",
    "replica_payload",
    "static_payload",
    "replica_sequence",
    "replica_depth",
)


def route_kernel(form: RouteForm, call: RouteCall, out: RoutingOutput, *, pdl: bool = False) -> RoutingOutput:
    """Route one batch into `out` with one launch (none for an empty batch)."""
    if call.num_tokens == 0:
        if "slot_histogram" in form.emit:
            assert out.slot_histogram is not None
            out.slot_histogram.zero_()
        return out
    if call.given_ids is None and call.expert_ids_by_token is None and not supports_groups(form.config):
        call = choose_on_host_path(form.config, call)
    grid, arguments, constants, options = launch_arguments(form, call, out, pdl)
    route[grid](*arguments, **constants, **options)
    return out


@torch.no_grad()
def choose_on_host_path(config: RouterConfig, call: RouteCall) -> RouteCall:
    """More than 32 groups: the choice in torch operations on the device, the rest in the kernel."""
    assert call.logits is not None
    scores = score_experts(call.logits, config, call.bias, call.marked_bias, call.token_marker)
    ids = select_experts(scores.keys, config)
    weights = gather_scores(scores, ids)
    return RouteCall(
        num_tokens=call.num_tokens,
        layer=call.layer,
        given_ids=ids.to(torch.int32),
        given_weights=weights,
        num_valid_tokens=call.num_valid_tokens,
        row_offset=call.row_offset,
        count=call.count,
    )


def _bias(tensor: Tensor) -> Tensor:
    """A bias as kernels take it: rows contiguous, and of 16 bits at least (no bits are lost)."""
    return _rows_contiguous(tensor if tensor.element_size() > 1 else tensor.float())


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def launch_arguments(
    form: RouteForm, call: RouteCall, out: RoutingOutput, pdl: bool = False
) -> tuple[tuple[int], list[Any], dict[str, Any], dict[str, Any]]:
    """(grid, positional arguments, constants, compiler and launch options) of one launch."""
    config, tables, counters = form.config, form.tables, form.counters
    plan = plan_launch(config, call.num_tokens)
    mode = "choose"
    if call.given_ids is not None:
        mode = "given"
    elif call.expert_ids_by_token is not None:
        mode = "table"
    unused = form.seed
    logits = unused if call.logits is None else _rows_contiguous(call.logits)
    bias = unused if call.bias is None else _bias(call.bias)
    marker = call.token_marker
    if marker is not None and marker.dtype == torch.bool:
        marker = marker.view(torch.uint8)
    exact = form.form == "exact"
    counted = call.count
    tickets = counters.tickets[call.layer] if exact and counters.tickets is not None else unused
    ticket_copies = counters.ticket_copies if call.num_tokens > EXACT_ROWS and not form.weighted else 1
    buckets = form.num_buckets
    scratch = unused
    if "slot_histogram" in form.emit:
        scratch = form.histogram_scratch()

    def given(tensor: Tensor | None) -> Tensor:
        return unused if tensor is None else tensor.contiguous()

    arguments: list[Any] = [
        out.weights,
        out.physical_ids,
        given(out.logical_ids),
        given(out.local_ids),
        given(out.packed_ids),
        given(out.slot_histogram),
        scratch,
        counters.counts[call.layer],
        tickets,
        logits,
        bias,
        unused if call.marked_bias is None else _bias(call.marked_bias),
        given(marker),
        given(call.given_ids),
        given(call.given_weights),
        given(call.expert_ids_by_token),
        given(call.token_ids),
        given(call.num_valid_tokens),
        form.seed,
        tables.layer_rows[call.layer],
        call.num_tokens,
        0 if call.logits is None else logits.stride(0),
        bias.stride(0) if call.bias is not None and call.bias.dim() == 2 else 0,
        0 if call.expert_ids_by_token is None else call.expert_ids_by_token.shape[0],
        _signed32(call.row_offset & 0xFFFFFFFF),  # the hash takes rows modulo 2**32
        _signed32(hash_salt(form.form, tables.ep_rank)),
        tables.ep_rank,
    ]
    constants: dict[str, Any] = {
        "MODE": mode,
        "HAS_BIAS": call.bias is not None and mode != "given",
        "HAS_MARKED": call.marked_bias is not None and mode != "given",
        "HAS_VALID": call.num_valid_tokens is not None,
        "FORM": form.form,
        "WEIGHTED": form.weighted and form.form != "static",
        "COUNT": counted,
        "PAYLOAD": fits_payload(tables.num_slots, tables.topology.ep_size) or form.form == "static",
        "AT": tuple(tables.columns[name].start for name in _TABLE_COLUMNS),
        "LOCAL_SLOTS": tables.num_local_slots,
        "NUM_SLOTS": tables.num_slots,
        "COPIES": counters.copies,
        "TICKET_COPIES": ticket_copies,
        "TICKET_STRIDE": counters.ticket_stride,
        "EMIT": tuple(name in form.emit for name in OUTPUT_NAMES),
        "BUCKETS": buckets,
        "PDL": pdl,
        "ROWS": plan.rows,
        "CHUNKS": plan.chunks,
        "DEPTH": plan.depth,
        "CODED": plan.coded,
        "SORT_BOUND": plan.sort_bound,
        "SORT_BEST": plan.sort_best,
        "EARLY": plan.early,
        "SEGMENTS": plan.segments,
        "SLOTS": plan.slots,
        "GROUP_PAD": plan.group_pad,
        "GROUP_LANES": plan.group_lanes,
        **config_constants(config),
        "BIAS_ON_SCORE": config.bias_domain == "score"
        and (call.bias is not None or call.marked_bias is not None),
    }
    if not out.weights.is_cuda:
        # The interpreter runs programs one after the other: wide ones cost it no more than narrow ones.
        constants["ROWS"] = INTERPRETED_ROWS
    grid = (-(-call.num_tokens // constants["ROWS"]),)
    options: dict[str, Any] = {"num_warps": plan.warps}
    if plan.registers is not None and out.weights.is_cuda:
        options["maxnreg"] = plan.registers
    if pdl:
        options["launch_pdl"] = True
    return grid, arguments, constants, options


def config_constants(config: RouterConfig) -> dict[str, Any]:
    """Constants that depend on the configuration alone."""
    shared = config.num_shared_experts
    return {
        "E": config.num_experts,
        "K": config.top_k,
        "S": shared,
        "G": config.num_groups if config.grouped else 1,
        "TG": config.topk_group if config.grouped else 0,
        "TOP2": config.topk_method == "noaux_tc",
        "SCORING": config.scoring,
        "SOFTCAP": float(config.softcap or 0.0),
        "BY_ID": config.column_order == "expert_id",
        "RENORMALIZE": config.renormalize,
        "EPSILON": float(config.renormalize_epsilon),
        "SCALE": float(config.routed_scaling_factor) if config.apply_routed_scaling_factor else 1.0,
        "SHARED_WEIGHT": float(config.shared_weight),
        "SHARED_PAD": 1 << max(shared - 1, 0).bit_length(),
        "PER_RANK": config.shared_mode != "global" and shared > 0,
    }


def _signed32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
