"""The routing launch on the device: `route_kernel(plan, call, out)`, signature and results of `route_reference`."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenroute.routing.batch.kernel import DealConstants, deal_batch
from evenroute.routing.batch.settings import pad
from evenroute.routing.batch.solve import ROUNDS, UNITS
from evenroute.routing.batch.state import CHUNK
from evenroute.routing.dispatch import as_signed32
from evenroute.routing.kernels.plan import plan_launch, supports_groups
from evenroute.routing.kernels.route import route
from evenroute.routing.kernels.types import Counting, RouteConstants, Score, Weighing, needs_sum
from evenroute.routing.output import RouteCall, RouterPlan, RoutingOutput
from evenroute.routing.reference import gather_scores, score_experts, select_experts
from evenroute.routing.settings.config import RouterConfig

# From this many rows on tickets use several copies of their words: exact up to here, within 2 % above.
EXACT_ROWS = 256
INTERPRETED_ROWS = 8


class Launched(NamedTuple):
    """Triton's compiled kernel of a launch and what it was compiled for; behind it the launch that deals its batch."""

    kernel: Any
    constants: Any
    deal: Launched | None = None


def route_kernel(
    plan: RouterPlan, call: RouteCall, out: RoutingOutput, *, pdl: bool = False
) -> Launched | None:
    """Route one batch into `out` with one launch (none for an empty batch)."""
    if call.num_tokens == 0:
        if "slot_histogram" in plan.emit:
            assert out.slot_histogram is not None
            out.slot_histogram.zero_()
        if plan.batch is not None and plan.batch.node is not None:
            plan.batch.node.gather(plan.batch.node.mine.zero_())
        return None
    if call.given_ids is None and call.expert_ids_by_token is None and not supports_groups(plan.config):
        call = choose_on_host_path(plan.config, call)
    device = plan.seed.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(plan, call, out, pdl)
    return _launch(plan, call, out, pdl)


def _launch(plan: RouterPlan, call: RouteCall, out: RoutingOutput, pdl: bool) -> Launched:
    grid, arguments, constants, options = launch_arguments(plan, call, out, pdl)
    kernel = route[grid](*arguments, constants, **options)
    if constants.mode.pick == "batch":
        return Launched(kernel, constants, Launched(*launch_deal(plan, call, out)))
    return Launched(kernel, constants)


def compile_kernel(plan: RouterPlan, call: RouteCall, out: RoutingOutput, *, pdl: bool = False) -> Launched:
    """Compile what this call would launch, and launch nothing."""
    with torch.cuda.device(plan.seed.device):
        grid, arguments, constants, options = launch_arguments(plan, call, out, pdl)
        kernel = route.warmup(*arguments, constants, grid=grid, **options)
        kernel._init_handles()  # loads it onto the device
        if constants.mode.pick != "batch":
            return Launched(kernel, constants)
        deal = Launched(*launch_deal(plan, call, out, compile_only=True))
        deal.kernel._init_handles()
        return Launched(kernel, constants, deal)


@torch.no_grad()
def choose_on_host_path(config: RouterConfig, call: RouteCall) -> RouteCall:
    """More than 32 groups: the choice in torch operations on the device, the rest in the kernel."""
    assert call.logits is not None
    scores = score_experts(call.logits, config, call.bias, call.marked_bias, call.token_marker)
    ids = select_experts(scores.keys, config)
    weights = gather_scores(scores, ids)
    return replace(
        call,
        logits=None,
        bias=None,
        marked_bias=None,
        token_marker=None,
        given_ids=ids.to(torch.int32),
        given_weights=weights,
    )


def _bias(tensor: Tensor) -> Tensor:
    """A bias as kernels take it: rows contiguous, and of 16 bits at least (no bits are lost)."""
    return _rows_contiguous(tensor if tensor.element_size() > 1 else tensor.float())


def _rows_contiguous(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def as_bytes(flags: Tensor) -> Tensor:
    """Booleans as kernels take them."""
    return flags.view(torch.uint8) if flags.dtype == torch.bool else flags


def launch_arguments(
    plan: RouterPlan, call: RouteCall, out: RoutingOutput, pdl: bool = False
) -> tuple[tuple[int], list[Any], RouteConstants, dict[str, Any]]:
    """(grid, arguments, constants, compiler and launch options) of one launch."""
    tables, counters, mode = plan.tables, plan.counters, plan.mode_of(call.num_tokens)
    constants = launch_constants(plan, call, pdl)
    if not out.weights.is_cuda:
        # The interpreter runs programs one after the other: wide ones cost it no more than narrow ones.
        constants = with_rows(constants, INTERPRETED_ROWS)
    unused = plan.seed
    logits = unused if call.logits is None else _rows_contiguous(call.logits)
    bias = unused if call.bias is None else _bias(call.bias)
    marker = None if call.token_marker is None else as_bytes(call.token_marker)
    by_ticket = mode.pick == "ticket" and counters.tickets is not None

    state = plan.batch.state if mode.pick == "batch" and plan.batch is not None else None
    if state is not None:
        state.hold(call.num_tokens)

    def given(tensor: Tensor | None) -> Tensor:
        return unused if tensor is None else tensor.contiguous()

    arguments: list[Any] = [
        out.weights,
        out.physical_ids,
        given(out.logical_ids),
        given(out.local_ids),
        given(out.packed_ids),
        given(out.slot_histogram),
        plan.histogram_scratch() if "slot_histogram" in plan.emit else unused,
        counters.counts[call.layer],
        counters.tickets[call.layer] if by_ticket else unused,  # type: ignore[index]
        logits,
        bias,
        unused if call.marked_bias is None else _bias(call.marked_bias),
        given(marker),
        given(call.given_ids),
        given(call.given_weights),
        given(call.expert_ids_by_token),
        given(call.token_ids),
        given(call.num_valid_tokens),
        as_bytes(call.count) if isinstance(call.count, Tensor) else unused,
        plan.seed,
        plan.view_of(call.num_tokens).layer_rows[call.layer],
        unused if state is None else state.words,
        call.num_tokens,
        0 if call.logits is None else logits.stride(0),
        bias.stride(0) if call.bias is not None and call.bias.dim() == 2 else 0,
        0 if call.expert_ids_by_token is None else call.expert_ids_by_token.shape[0],
        as_signed32(call.row_offset & 0xFFFFFFFF),  # the hash takes rows modulo 2**32
        as_signed32(plan.salt),
        tables.ep_rank,
        0 if state is None else state.chunks,
    ]
    grid = (-(-call.num_tokens // constants.plan.layout.rows),)
    options: dict[str, Any] = {"num_warps": constants.plan.warps}
    if constants.plan.registers is not None and out.weights.is_cuda:
        options["maxnreg"] = constants.plan.registers
    if pdl:
        options["launch_pdl"] = True
    return grid, arguments, constants, options


def with_rows(constants: RouteConstants, rows: int) -> RouteConstants:
    """The same with another number of rows a program."""
    plan = constants.plan
    return constants._replace(plan=plan._replace(layout=plan.layout._replace(rows=rows)))


def launch_constants(plan: RouterPlan, call: RouteCall, pdl: bool) -> RouteConstants:
    """What the kernel is compiled for, of one launch."""
    config, counters, mode = plan.config, plan.counters, plan.mode_of(call.num_tokens)
    source = "logits"
    if call.given_ids is not None:
        source = "given"
    elif call.expert_ids_by_token is not None:
        source = "table"
    several_copies = call.num_tokens > EXACT_ROWS and not mode.weighted
    scaled = config.apply_routed_scaling_factor and not call.keep_weights
    biased = source != "given"
    plain, marked = call.bias is not None, call.marked_bias is not None
    score = Score(
        scoring=config.scoring,
        softcap=float(config.softcap or 0.0),
        plain_bias=plain and biased,
        marked_bias=marked and biased,
        bias_on_score=config.bias_domain == "score" and (plain or marked),
        payload=plan.payload,
        any_bias=(plain or marked) and biased,
    )
    weighing = Weighing(
        by_id=config.column_order == "expert_id",
        renormalize=config.renormalize and not call.keep_weights,
        epsilon=float(config.renormalize_epsilon),
        scale=float(config.routed_scaling_factor) if scaled else 1.0,
    )
    table, launch = plan.table_columns, plan_launch(config, call.num_tokens)
    return RouteConstants(
        source=source,
        plan=launch,
        score=score,
        weighing=weighing,
        mode=mode,
        table=table,
        counting=Counting(
            counts=call.count is not False,
            by_flag=isinstance(call.count, Tensor),
            by_row=call.route_padding and call.num_valid_tokens is not None and call.count is not False,
            copies=counters.copies,
            ticket_copies=counters.ticket_copies if several_copies else 1,
            ticket_stride=counters.ticket_stride,
        ),
        columns=plan.batch_columns if mode.pick == "batch" else plan.columns,
        padding=call.num_valid_tokens is not None and not (call.route_padding and call.count is False),
        given_width=config.top_k if call.given_ids is None else call.given_ids.shape[1],
        pdl=pdl,
        overlap=mode.pick == "batch" and overlaps(plan.seed.device),
        needs_sum=needs_sum(source, launch.layout, score, weighing),
        carries_payload=score.payload and source == "logits",
        payload_column=table.static_payload if mode.pick == "slot" else table.replica_payload,
    )


@lru_cache(maxsize=64)
def overlaps(device: torch.device) -> bool:
    """Whether the second launch may start while the first one ends (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def deal_constants(plan: RouterPlan) -> DealConstants:
    """What the launch is compiled for."""
    config, topology = plan.config, plan.tables.topology
    node = None if plan.batch is None else plan.batch.node
    return DealConstants(
        experts=config.num_experts,
        experts_pad=pad(config.num_experts),
        top_k=config.top_k,
        top_k_pad=pad(config.top_k),
        ranks=topology.ep_size,
        ranks_pad=pad(topology.ep_size),
        local_pad=pad(plan.tables.num_local_slots),
        columns=plan.columns,
        table=plan.table_columns,
        choice=plan.choice,
        rounds=ROUNDS,
        units=UNITS,
        node=0 if node is None else node.size,
        place=0 if node is None else node.place,
        overlap=node is None and overlaps(plan.seed.device),
    )


def launch_deal(
    plan: RouterPlan, call: RouteCall, out: RoutingOutput, *, compile_only: bool = False
) -> tuple[Any, DealConstants]:
    """Deal the batch that the routing launch before has marked; returns Triton's compiled kernel and its constants."""
    assert plan.batch is not None
    assert plan.batch.state is not None
    tables, state, unused = plan.tables, plan.batch.state, plan.seed
    node = plan.batch.node

    def given(tensor: Tensor | None) -> Tensor:
        return unused if tensor is None else tensor

    constants = deal_constants(plan)
    options: dict[str, Any] = {"num_warps": 4 if constants.ranks_pad * constants.local_pad <= 512 else 8}
    if constants.overlap:
        options["launch_pdl"] = True
    arguments = (
        out.physical_ids,
        given(out.logical_ids),
        given(out.local_ids),
        given(out.packed_ids),
        given(out.slot_histogram),
        plan.histogram_scratch() if "slot_histogram" in plan.emit else unused,
        state.words,
        unused if node is None else node.all if compile_only else node.gather(state.counts()),
        plan.view_of(call.num_tokens).layer_rows[call.layer],
        call.num_tokens,
        state.chunks,
        as_signed32(plan.salt),
        tables.ep_rank,
        constants,
    )
    grid = (-(-call.num_tokens // CHUNK),)
    if compile_only:
        return deal_batch.warmup(*arguments, grid=grid, **options), constants
    return deal_batch[grid](*arguments, **options), constants
