"""Plain torch routing: `route_reference(plan, call, out)`, signature and results of the kernel's launch.

Scores, keys, choice, weights, slots and columns. The production path on CPU, the oracle of the kernels.

The order of choice is that of a stable descending sort: by key, ties to the lowest id; experts whose key is NaN come
after all others, -inf included; experts of dropped groups never. Everything is fp32, whatever the logits' dtype; scores
below the smallest normal number, 2**-126, are 0. A row's result depends on the row alone, to the last bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from evenroute.routing.batch.solve import count_pairs, pick_by_position, solve_batch
from evenroute.routing.dispatch import (
    deal_tickets,
    hash_rows,
    hash_salt,
    pick_by_hash,
    pick_by_ticket,
    spans,
)
from evenroute.routing.output import RouteCall, RouterPlan, RoutingOutput
from evenroute.routing.scores import SCORES, row_sum, softcap, softmax
from evenroute.routing.settings.config import MAX_EXPERTS, RouterConfig

FLOAT_MAX = torch.finfo(torch.float32).max
HUGE_WEIGHT, HUGE_SHRINK = (
    2.0**120,
    2.0**-8,
)  # 32 weights below it have a finite sum, and any 32 that were shrunk
BF16_MAX = torch.finfo(torch.bfloat16).max
NAN_KEY = -(2**31) + 1  # below the image of -inf
EXCLUDED_KEY = -(2**31)


class Scores(NamedTuple):
    """`scores [T, E]` fp32 >= 0, NaN as 0; `keys [T, E]` fp32, NaN kept."""

    scores: Tensor
    keys: Tensor


def score_experts(
    logits: Tensor,
    config: RouterConfig,
    bias: Tensor | None = None,
    marked_bias: Tensor | None = None,
    token_marker: Tensor | None = None,
) -> Scores:
    """Scores that weigh and keys that choose.

    logits [T, E] any float dtype; bias [E] or [T, E]; marked_bias [E] replaces bias in rows with token_marker [T].
    """
    values = logits.float().clamp(max=FLOAT_MAX)
    if config.scoring == "softmax":
        if config.softcap is not None:
            values = softcap(values, config.softcap)
        scores = softmax(values)
        base = values
        if config.bias_domain == "score" and (bias is not None or marked_bias is not None):
            base = torch.where(values.isnan(), values, scores)
    else:
        base = SCORES[config.scoring].exact(values)
        scores = base.nan_to_num(nan=0.0)
    row_bias = _row_bias(bias, marked_bias, token_marker)
    keys = base if row_bias is None else base + row_bias
    return Scores(scores, keys)


def _row_bias(bias: Tensor | None, marked: Tensor | None, marker: Tensor | None) -> Tensor | None:
    if bias is not None:
        bias = bias.float()
    if marked is None or marker is None:
        return bias
    plain = torch.zeros_like(marked, dtype=torch.float32) if bias is None else bias
    return torch.where(marker.bool()[:, None], marked.float(), plain)


def order_keys(keys: Tensor) -> Tensor:
    """int32 images of fp32 keys that sort the same way; both zeros alike, NaN below -inf."""
    bits = (keys + 0.0).view(torch.int32)
    image = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return torch.where(keys.isnan(), NAN_KEY, image)


def keep_groups(keys: Tensor, config: RouterConfig) -> Tensor:
    """`[T, E]` bool: experts of the kept groups (a NaN key counts as -inf in its group's score)."""
    rows = torch.where(keys.isnan(), -torch.inf, keys)
    rows = rows.view(keys.shape[0], config.num_groups, config.num_experts // config.num_groups)
    if config.topk_method == "greedy":
        group_scores = rows.amax(dim=-1)
    else:
        largest = rows.max(dim=-1, keepdim=True)
        second = rows.scatter(-1, largest.indices, -torch.inf).amax(dim=-1)
        group_scores = largest.values[..., 0] + second
    chosen = select_largest(order_keys(group_scores), config.topk_group)
    mask = torch.zeros(group_scores.shape, dtype=torch.bool, device=keys.device)
    mask.scatter_(1, chosen, True)
    return mask.repeat_interleave(config.num_experts // config.num_groups, dim=1)


def select_largest(ordered: Tensor, count: int) -> Tensor:
    """Positions of the `count` largest int32 of each row, in the order of a stable descending sort.

    Value and inverted position share one int64, so no two are equal and topk leaves nothing open.
    """
    width = ordered.shape[1]
    pairs = torch.empty((*ordered.shape, 2), dtype=torch.int32, device=ordered.device)
    pairs[..., 0] = width - 1 - torch.arange(width, device=ordered.device)
    pairs[..., 1] = ordered
    # Little-endian: the value is the high half.
    top = torch.topk(pairs.view(torch.int64)[..., 0], count, dim=1, sorted=True).values
    return (width - 1) - (top & 0xFFFFFFFF)


def select_experts(keys: Tensor, config: RouterConfig) -> Tensor:
    """`keys [T, E]` fp32 -> `ids [T, K] int64`, distinct, by descending key."""
    ordered = order_keys(keys)
    if config.grouped:
        ordered = torch.where(keep_groups(keys, config), ordered, EXCLUDED_KEY)
    return select_largest(ordered, config.top_k)


def gather_scores(scores: Scores, ids: Tensor) -> Tensor:
    """Scores of the chosen ids `[T, K]`; 0 where the key is NaN or -inf, or the id is outside [0, E)."""
    inside = (ids >= 0) & (ids < scores.scores.shape[1])
    safe = torch.where(inside, ids, 0)
    keys = scores.keys.gather(1, safe)
    usable = inside & (keys > -torch.inf)
    return torch.where(usable, scores.scores.gather(1, safe), 0.0)


def finish_weights(weights: Tensor, config: RouterConfig) -> Tensor:
    """Renormalise over the routed columns and scale, `[T, K]` fp32; never NaN or Inf.

    Given weights may be so large that their sum is not: such a row (`HUGE_WEIGHT`) is divided by a power of two first.
    """
    weights = weights.float().nan_to_num(nan=0.0, posinf=FLOAT_MAX, neginf=0.0)
    if config.renormalize:
        shrink = torch.where((weights >= HUGE_WEIGHT).any(dim=1, keepdim=True), HUGE_SHRINK, 1.0)
        weights = weights * shrink
        total = row_sum(weights)
        if config.renormalize_epsilon > 0:
            weights = weights / (total + config.renormalize_epsilon * shrink)
        else:
            weights = weights / torch.where(total > 0, total, 1.0)
    if config.apply_routed_scaling_factor:
        weights = (weights * config.routed_scaling_factor).clamp(max=FLOAT_MAX)
    return weights


def bf16_bits(weights: Tensor) -> Tensor:
    """Bits of the nearest bf16, `[...] int64` in [0, 65536), of fp32 weights; larger ones as the largest."""
    return weights.clamp(max=BF16_MAX).to(torch.bfloat16).view(torch.int16).long() & 0xFFFF


def sort_columns(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Columns by rising expert id; ids outside [0, MAX_EXPERTS) last."""
    inside = (ids >= 0) & (ids < MAX_EXPERTS)
    order = torch.sort(torch.where(inside, ids, MAX_EXPERTS), dim=1, stable=True).indices
    return ids.gather(1, order), weights.gather(1, order)


@torch.no_grad()
def route_reference(plan: RouterPlan, call: RouteCall, out: RoutingOutput) -> RoutingOutput:
    """Route one batch into `out`; counts and tickets go on as the kernel's do, but counts are never kept in tickets."""
    config = plan.config
    ids, weights = choose(plan, call)
    if not call.keep_weights:
        weights = finish_weights(weights, config)
    if config.column_order == "expert_id":
        ids, weights = sort_columns(ids, weights)
    valid = (ids >= 0) & (ids < config.num_experts)
    live = torch.ones((call.num_tokens, 1), dtype=torch.bool, device=ids.device)
    if call.num_valid_tokens is not None:
        live = torch.arange(call.num_tokens, device=ids.device)[:, None] < call.num_valid_tokens.reshape(())
    routed = torch.ones_like(live) if call.route_padding else live
    valid = valid & routed
    safe = torch.where(valid, ids, 0)
    slots = dispatch_slots(plan, call, safe, valid)
    if call.count is not False:
        counted = torch.bincount(ids[valid & live], minlength=config.num_experts)
        if isinstance(call.count, Tensor):
            counted = counted * (call.count.reshape(()) != 0)
        plan.counters.counts[call.layer, 0] += counted
    _store(plan, call, out, safe, slots, weights, valid, routed)
    return out


def choose(plan: RouterPlan, call: RouteCall) -> tuple[Tensor, Tensor]:
    """Chosen ids [T, K] int64 and their raw weights [T, K] fp32 (not yet renormalised)."""
    if call.given_ids is not None:
        assert call.given_weights is not None
        ids = call.given_ids[:, : plan.config.top_k].long()
        inside = (ids >= 0) & (ids < plan.config.num_experts)
        return ids, torch.where(inside, _given(call.given_weights[:, : plan.config.top_k]), 0.0)
    assert call.logits is not None
    scores = score_experts(call.logits, plan.config, call.bias, call.marked_bias, call.token_marker)
    if call.expert_ids_by_token is not None:
        assert call.token_ids is not None
        tokens = call.token_ids.long()
        known = (tokens >= 0) & (tokens < call.expert_ids_by_token.shape[0])
        ids = call.expert_ids_by_token[torch.where(known, tokens, 0)].long()
        ids = torch.where(known[:, None], ids, -1)
    else:
        ids = select_experts(scores.keys, plan.config)
    return ids, gather_scores(scores, ids)


def _given(weights: Tensor) -> Tensor:
    """Weights that a caller gave, fp32; NaN and negative ones as 0."""
    return weights.float().nan_to_num(nan=0.0, posinf=FLOAT_MAX).clamp(min=0.0)


def dispatch_slots(plan: RouterPlan, call: RouteCall, safe: Tensor, valid: Tensor) -> Tensor:
    """Slot of every (token, expert) `[T, K]`; entries with `valid` false are arbitrary but in range."""
    tables, layer, mode = plan.view_of(call.num_tokens), call.layer, plan.mode_of(call.num_tokens)
    if mode.pick == "batch":
        counts, positions = count_pairs(safe, valid, plan.config.num_experts)
        if plan.batch is not None and plan.batch.node is not None:
            node = plan.batch.node
            gathered = node.gather(counts).long()
            counts, before = gathered.sum(0), gathered[: node.place].sum(0)
            positions = positions + before[safe]
        ends = solve_batch(tables, layer, counts, plan.salt)
        return pick_by_position(tables, layer, safe, positions, ends)
    if mode.pick == "slot":
        return tables.static_slot[layer].long()[safe]
    if mode.pick == "ticket":
        assert plan.counters.tickets is not None
        words = plan.counters.tickets[layer, 0, :, 0]
        tickets = deal_tickets(safe, valid, words)
        replica = pick_by_ticket(tables, layer, safe, tickets, mode)
    else:
        rows = torch.arange(call.num_tokens, device=safe.device) + call.row_offset
        salt = hash_salt(mode, tables.ep_rank, int(plan.seed))
        replica = pick_by_hash(tables, layer, safe, hash_rows(rows[:, None], safe, salt), mode)
    offset, _, _ = spans(tables, layer, safe)
    return tables.replica_slot[layer].long()[offset + replica]


def _shared_columns(plan: RouterPlan, call: RouteCall, routed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers, weights and presence `[T, S]` of the shared columns: fixed, or as the caller gives them."""
    config, shape = plan.config, (call.num_tokens, plan.config.num_shared_experts)
    numbers = torch.arange(shape[1], device=routed.device).expand(shape)
    full, live = torch.full(shape, config.shared_weight, device=routed.device), routed.expand(shape)
    if call.given_ids is not None and call.given_ids.shape[1] > config.top_k:
        assert call.given_weights is not None
        numbers = call.given_ids[:, config.top_k :].long() - config.num_experts
        live = live & (numbers >= 0) & (numbers < shape[1])
        numbers, full = torch.where(live, numbers, 0), _given(call.given_weights[:, config.top_k :])
    return numbers, full, live


def _store(
    plan: RouterPlan,
    call: RouteCall,
    out: RoutingOutput,
    ids: Tensor,
    slots: Tensor,
    weights: Tensor,
    valid: Tensor,
    routed: Tensor,
) -> None:
    config, tables = plan.config, plan.tables
    shared, local_slots, per_rank = config.num_shared_experts, tables.num_local_slots, plan.slots_per_rank
    numbers, full, live = _shared_columns(plan, call, routed)
    if config.shared_mode == "global":
        shared_ids = tables.num_slots + numbers
    else:
        slots = slots + slots // local_slots * shared
        shared_ids = tables.ep_rank * per_rank + local_slots + numbers
    valid = torch.cat((valid, live), dim=1)
    physical = torch.where(valid, torch.cat((slots, shared_ids), dim=1), -1)
    weights = torch.where(valid, torch.cat((weights, full), dim=1), 0.0)
    if "weights" in plan.emit:
        out.weights.copy_(weights)
    if "physical_ids" in plan.emit:
        out.physical_ids.copy_(physical)
    if "logical_ids" in plan.emit:
        assert out.logical_ids is not None
        logical = torch.cat((ids, config.num_experts + numbers), dim=1)
        out.logical_ids.copy_(torch.where(valid, logical, -1))
    if "local_ids" in plan.emit:
        assert out.local_ids is not None
        local = physical - tables.ep_rank * per_rank
        here = valid & (local >= 0) & (local < per_rank)
        if config.shared_mode == "global":
            # Every rank computes the shared experts of its own tokens, after its last slot.
            local[:, config.top_k :] = local_slots + numbers
            here[:, config.top_k :] = valid[:, config.top_k :]
        out.local_ids.copy_(torch.where(here, local, -1))
    if "packed_ids" in plan.emit:
        assert out.packed_ids is not None
        out.packed_ids.copy_((physical << 16) | bf16_bits(weights))
    if "slot_histogram" in plan.emit:
        assert out.slot_histogram is not None
        out.slot_histogram.copy_(torch.bincount(physical[physical >= 0], minlength=plan.num_buckets))
