"""The whole launch in plain torch: `route_reference(form, call, out)`, signature and results of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.routing.dispatch import (
    deal_tickets,
    hash_rows,
    hash_salt,
    pick_by_hash,
    pick_by_ticket,
    spans,
)
from evenroute.routing.output import RouteCall, RouteForm, RoutingOutput
from evenroute.routing.reference import (
    bf16_bits,
    finish_weights,
    gather_scores,
    score_experts,
    select_experts,
    sort_columns,
)


@torch.no_grad()
def route_reference(form: RouteForm, call: RouteCall, out: RoutingOutput) -> RoutingOutput:
    """Route one batch into `out`; counts and tickets go on as the kernel's do, but counts are never kept in tickets."""
    config = form.config
    ids, weights = choose(form, call)
    weights = finish_weights(weights, config)
    if config.column_order == "expert_id":
        ids, weights = sort_columns(ids, weights)
    valid = (ids >= 0) & (ids < config.num_experts)
    if call.num_valid_tokens is not None:
        rows = torch.arange(call.num_tokens, device=ids.device)
        valid = valid & (rows < call.num_valid_tokens.reshape(()))[:, None]
    safe = torch.where(valid, ids, 0)
    slots = dispatch_slots(form, call, safe, valid)
    if call.count:
        counted = torch.bincount(ids[valid], minlength=config.num_experts)
        form.counters.counts[call.layer, 0] += counted
    _store(form, call, out, safe, slots, weights, valid)
    return out


def choose(form: RouteForm, call: RouteCall) -> tuple[Tensor, Tensor]:
    """Chosen ids [T, K] int64 and their raw weights [T, K] fp32 (not yet renormalised)."""
    if call.given_ids is not None:
        assert call.given_weights is not None
        ids = call.given_ids.long()
        inside = (ids >= 0) & (ids < form.config.num_experts)
        return ids, torch.where(inside, call.given_weights.float().clamp(min=0.0), 0.0)
    assert call.logits is not None
    scores = score_experts(call.logits, form.config, call.bias, call.marked_bias, call.token_marker)
    if call.expert_ids_by_token is not None:
        assert call.token_ids is not None
        tokens = call.token_ids.long()
        known = (tokens >= 0) & (tokens < call.expert_ids_by_token.shape[0])
        ids = call.expert_ids_by_token[torch.where(known, tokens, 0)].long()
        ids = torch.where(known[:, None], ids, -1)
    else:
        ids = select_experts(scores.keys, form.config)
    return ids, gather_scores(scores, ids)


def dispatch_slots(form: RouteForm, call: RouteCall, safe: Tensor, valid: Tensor) -> Tensor:
    """Slot of every (token, expert) `[T, K]`; entries with `valid` false are arbitrary but in range."""
    tables, layer = form.tables, call.layer
    if form.form == "static":
        return tables.static_slot[layer].long()[safe]
    if form.form == "exact":
        assert form.counters.tickets is not None
        words = form.counters.tickets[layer, 0, :, 0]
        tickets = deal_tickets(safe, valid, words)
        replica = pick_by_ticket(tables, layer, safe, tickets, form.weighted)
    else:
        rows = torch.arange(call.num_tokens, device=safe.device) + call.row_offset
        salt = hash_salt(form.form, tables.ep_rank, int(form.seed))
        replica = pick_by_hash(tables, layer, safe, hash_rows(rows[:, None], safe, salt), form.weighted)
    offset, _, _ = spans(tables, layer, safe)
    return tables.replica_slot[layer].long()[offset + replica]


def _store(
    form: RouteForm,
    call: RouteCall,
    out: RoutingOutput,
    ids: Tensor,
    slots: Tensor,
    weights: Tensor,
    valid: Tensor,
) -> None:
    config, tables = form.config, form.tables
    shared, local_slots, per_rank = config.num_shared_experts, tables.num_local_slots, form.slots_per_rank
    shared_range = torch.arange(shared, device=ids.device)
    if config.shared_mode == "global":
        shared_ids = tables.num_slots + shared_range
    else:
        slots = slots + slots // local_slots * shared
        shared_ids = tables.ep_rank * per_rank + local_slots + shared_range
    live = torch.ones((call.num_tokens, shared), dtype=torch.bool, device=ids.device)
    if call.num_valid_tokens is not None:
        rows = torch.arange(call.num_tokens, device=ids.device)[:, None]
        live = live & (rows < call.num_valid_tokens.reshape(()))
    valid = torch.cat((valid, live), dim=1)
    columns = call.num_tokens, shared
    physical = torch.cat((slots, shared_ids.expand(columns)), dim=1)
    physical = torch.where(valid, physical, -1)
    full = torch.full(columns, config.shared_weight, device=ids.device)
    weights = torch.where(valid, torch.cat((weights, full), dim=1), 0.0)
    if "weights" in form.emit:
        out.weights.copy_(weights)
    if "physical_ids" in form.emit:
        out.physical_ids.copy_(physical)
    if "logical_ids" in form.emit:
        assert out.logical_ids is not None
        logical = torch.cat((ids, (config.num_experts + shared_range).expand(columns)), dim=1)
        out.logical_ids.copy_(torch.where(valid, logical, -1))
    if "local_ids" in form.emit:
        assert out.local_ids is not None
        local = physical - tables.ep_rank * per_rank
        here = valid & (local >= 0) & (local < per_rank)
        if config.shared_mode == "global":
            # Every rank computes the shared experts of its own tokens, after its last slot.
            local[:, config.top_k :] = local_slots + shared_range
            here[:, config.top_k :] = valid[:, config.top_k :]
        out.local_ids.copy_(torch.where(here, local, -1))
    if "packed_ids" in form.emit:
        assert out.packed_ids is not None
        out.packed_ids.copy_((physical << 16) | bf16_bits(weights))
    if "slot_histogram" in form.emit:
        assert out.slot_histogram is not None
        out.slot_histogram.copy_(torch.bincount(physical[physical >= 0], minlength=form.num_buckets))
