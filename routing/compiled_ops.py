"""The operators `evenroute::route`, `evenroute::gate_route` and `evenroute::align`, with fake kernels.

The first two find their router by a handle and name the counters and tickets as mutated arguments: a compiler keeps
every call, in order, even if its outputs are equal or unused.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evenroute.routing.align.align import align_capacity, moe_align_block_size
from evenroute.routing.gate import GateRouter
from evenroute.routing.output import RoutingOutput
from evenroute.routing.router import Router

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_routers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register(router: Router | GateRouter) -> str:
    # A string: the compiler could make a symbol of a number.
    handle = f"router-{next(_handles)}"
    _routers[handle] = router
    return handle


def _find(handle: str) -> Any:
    router = _routers.get(handle)
    if router is None:
        raise ValueError(f"handle={handle!r}: this router is gone; keep its CompiledRouter alive")
    return router


def _with_counters(router: Router, counts: Tensor, tickets: Tensor | None) -> Router:
    """The router, counting into these tensors: functionalised graphs pass copies and write them back."""
    mine = router.counters
    same = counts.data_ptr() == mine.counts.data_ptr() and (
        tickets is None or mine.tickets is None or tickets.data_ptr() == mine.tickets.data_ptr()
    )
    if same:
        return router
    counters = copy.copy(mine)
    counters.counts, counters.tickets = counts, tickets
    other = copy.copy(router)
    other.counters = counters
    other.form = replace(router.form, counters=counters)
    return other


def _all_outputs(output: RoutingOutput) -> Outputs:
    """The six tensors of an output; a fresh empty one stands for each that was not emitted."""

    def one(tensor: Tensor | None, dtype: torch.dtype = torch.int32) -> Tensor:
        if tensor is None:
            return output.weights.new_empty((0,), dtype=dtype)
        return tensor

    return (
        one(output.weights, torch.float32),
        one(output.physical_ids),
        one(output.logical_ids),
        one(output.local_ids),
        one(output.packed_ids),
        one(output.slot_histogram),
    )


def _fake_outputs(router: Router, num_tokens: int, like: Tensor) -> Outputs:
    def one(name: str, dtype: torch.dtype = torch.int32) -> Tensor:
        shape: tuple[int, ...] = (num_tokens, router.config.num_columns)
        if name == "slot_histogram":
            shape = (router.form.num_buckets,)
        return like.new_empty(shape if name in router.form.emit else (0,), dtype=dtype)

    return (
        one("weights", torch.float32),
        one("physical_ids"),
        one("logical_ids"),
        one("local_ids"),
        one("packed_ids"),
        one("slot_histogram"),
    )


@torch.library.custom_op("evenroute::route", mutates_args=("counts", "tickets"))
def route_op(
    logits: Tensor | None,
    logical_ids: Tensor | None,
    weights: Tensor | None,
    bias: Tensor | None,
    marked_bias: Tensor | None,
    token_marker: Tensor | None,
    expert_ids_by_token: Tensor | None,
    token_ids: Tensor | None,
    num_valid_tokens: Tensor | None,
    waterfill_target: Tensor | None,
    tables: Tensor,
    seed: Tensor,
    counts: Tensor,
    tickets: Tensor | None,
    handle: str,
    layer: int,
    row_offset: int,
    count: bool,
) -> Outputs:
    """All of `output.OUTPUT_NAMES`, in order, empty where the router does not emit them."""
    router: Router = _find(handle)
    output = _with_counters(router, counts, tickets)(
        logits,
        layer,
        num_valid_tokens=num_valid_tokens,
        row_offset=row_offset,
        bias=bias,
        marked_bias=marked_bias,
        token_marker=token_marker,
        logical_ids=logical_ids,
        weights=weights,
        expert_ids_by_token=expert_ids_by_token,
        token_ids=token_ids,
        count=count,
        waterfill_target=waterfill_target,
    )
    return _all_outputs(output)


@route_op.register_fake
def _(
    logits: Tensor | None,
    logical_ids: Tensor | None,
    weights: Tensor | None,
    bias: Tensor | None,
    marked_bias: Tensor | None,
    token_marker: Tensor | None,
    expert_ids_by_token: Tensor | None,
    token_ids: Tensor | None,
    num_valid_tokens: Tensor | None,
    waterfill_target: Tensor | None,
    tables: Tensor,
    seed: Tensor,
    counts: Tensor,
    tickets: Tensor | None,
    handle: str,
    layer: int,
    row_offset: int,
    count: bool,
) -> Outputs:
    rows = logits if logical_ids is None else logical_ids
    if rows is None:
        raise ValueError("logits=None: give logits or logical_ids")
    return _fake_outputs(_find(handle), rows.shape[0], tables)


@torch.library.custom_op("evenroute::gate_route", mutates_args=("counts", "tickets"))
def gate_route_op(
    hidden: Tensor,
    gate_weight: Tensor,
    bias: Tensor | None,
    marked_bias: Tensor | None,
    token_marker: Tensor | None,
    num_valid_tokens: Tensor | None,
    waterfill_target: Tensor | None,
    tables: Tensor,
    seed: Tensor,
    counts: Tensor,
    tickets: Tensor | None,
    handle: str,
    layer: int,
    row_offset: int,
    count: bool,
) -> Outputs:
    """`GateRouter.__call__`; outputs as for `evenroute::route`."""
    gate: GateRouter = _find(handle)
    router = _with_counters(gate.router, counts, tickets)
    if router is not gate.router:
        other = copy.copy(gate)
        other.router = router
        gate = other
    output = gate(
        hidden,
        gate_weight,
        layer,
        num_valid_tokens=num_valid_tokens,
        row_offset=row_offset,
        bias=bias,
        marked_bias=marked_bias,
        token_marker=token_marker,
        count=count,
        waterfill_target=waterfill_target,
    )
    return _all_outputs(output)


@gate_route_op.register_fake
def _(
    hidden: Tensor,
    gate_weight: Tensor,
    bias: Tensor | None,
    marked_bias: Tensor | None,
    token_marker: Tensor | None,
    num_valid_tokens: Tensor | None,
    waterfill_target: Tensor | None,
    tables: Tensor,
    seed: Tensor,
    counts: Tensor,
    tickets: Tensor | None,
    handle: str,
    layer: int,
    row_offset: int,
    count: bool,
) -> Outputs:
    return _fake_outputs(_find(handle).router, hidden.shape[0], tables)


@torch.library.custom_op("evenroute::align", mutates_args=())
def align_op(
    ids: Tensor, block_size: int, num_experts: int, invalid: str, slot_histogram: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_align_block_size` with fresh outputs."""
    return moe_align_block_size(ids, block_size, num_experts, invalid=invalid, slot_histogram=slot_histogram)


@align_op.register_fake
def _(
    ids: Tensor, block_size: int, num_experts: int, invalid: str, slot_histogram: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    capacity = align_capacity(ids.numel(), block_size, num_experts)

    def words(length: int) -> Tensor:
        return ids.new_empty(length, dtype=torch.int32)

    return words(capacity), words(-(-capacity // block_size)), words(1)
