"""Choosing the slot for a (token, logical expert): the arithmetic that reference and kernels share.

`static`          one slot per (rank, expert)
`dynamic`         exact: ticket + start, modulo the replicas; hash: of (row, expert, rank, seed)
`rank_invariant`  hash of (global row, expert)
`weighted`        the same three forms, replicas in planned shares (exact: within 1 of share x n after any n tickets)
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.eplb._checks import require_choice, require_int
from evenroute.routing.output import RouteCall, RouteForm, RoutingOutput
from evenroute.routing.settings.checks import require_tensor
from evenroute.routing.tables.tables import SPAN_COUNT_BITS, DispatchTables
from evenroute.routing.tables.tickets import TREE_REPLICAS

DISPATCH_MODES = ("static", "dynamic", "rank_invariant", "weighted")
DEALS = ("exact", "hash")
TOKEN_MODES = ("own", "shared")
SHARE_TOTAL = 65535
_LOAD_DTYPES = (torch.int64, torch.int32, torch.float32, torch.float64)
_MASK32 = 0xFFFFFFFF
# Odd multipliers of the hash's inputs; the finaliser is the published lowbias32.
ROW_MULTIPLIER = 0x9E3779B1
EXPERT_MULTIPLIER = 0x85EBCA77
RANK_MULTIPLIER = 0xC2B2AE3D
SEED_MULTIPLIER = 0x27D4EB2F
INVARIANT_SALT = 0x165667B1


def resolve_dispatch(dispatch: str, deal: str, tokens: str) -> tuple[str, str]:
    """(dispatch, form) with form "exact", "hash", "invariant" or "static".

    `auto` is the weighted form that the token mode allows (even experts fall back to the even deal by themselves).

    Raises:
        ValueError: an unknown name, or a mode by which ranks with shared tokens could disagree.
    """
    require_choice("tokens", tokens, TOKEN_MODES)
    require_choice("deal", deal, DEALS)
    require_choice("dispatch", dispatch, ("auto", *DISPATCH_MODES))
    if dispatch == "auto":
        dispatch = "weighted"
    if tokens == "shared" and dispatch not in ("rank_invariant", "weighted"):
        raise ValueError(
            f"dispatch={dispatch!r} with tokens='shared': ranks would serve a token twice or never; "
            "allowed: rank_invariant, weighted"
        )
    if dispatch == "static":
        return dispatch, "static"
    if dispatch == "rank_invariant" or tokens == "shared":
        return dispatch, "invariant"
    return dispatch, deal


def hash_salt(form: str, ep_rank: int, seed: int = 0) -> int:
    """32-bit salt of the hash: rank and seed, or one constant for the rank-invariant form."""
    if form == "invariant":
        return INVARIANT_SALT
    return ((ep_rank + 1) * RANK_MULTIPLIER + seed * SEED_MULTIPLIER) & _MASK32


def hash_rows(rows: Tensor, experts: Tensor, salt: int) -> Tensor:
    """32-bit hash (in int64) of global row and expert; the tensors broadcast."""
    x = (rows * ROW_MULTIPLIER + experts * EXPERT_MULTIPLIER + salt) & _MASK32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def deal_tickets(ids: Tensor, valid: Tensor, tickets: Tensor) -> Tensor:
    """Tickets of `ids [T, K]` in row order, and their words advanced.

    tickets [E] int64, words of the counters, updated in place in their low half; entries with `valid` false take none.
    """
    flat = torch.where(valid, ids, tickets.numel()).reshape(-1)
    order = torch.sort(flat, stable=True).indices
    amount = torch.bincount(flat, minlength=tickets.numel() + 1)
    start = torch.cumsum(amount, 0) - amount
    place = torch.empty_like(flat)
    place[order] = torch.arange(flat.numel(), device=flat.device) - start[flat[order]]
    now = (tickets & 0xFFFFFFFF)[flat.clamp(max=tickets.numel() - 1)] + place
    amount = amount[: tickets.numel()]
    tickets += amount
    return now.reshape(ids.shape)


def pick_by_ticket(
    tables: DispatchTables, layer: int, ids: Tensor, tickets: Tensor, weighted: bool
) -> Tensor:
    """Replica index `[T, K]`: tickets in turn, ranks from different starts; uneven experts in planned shares.

    Shares: after n tickets from the start of the count (ticket 0) every replica has its share x n within 1, whatever
    n and the number of replicas: `split_shares` up to four, the order in the tables above (`ticket_sequence.py`).
    Both repeat after 65535 tickets with nothing left over. Tickets go on when shares change, so for the tokens since
    then the bound is 2, as for those between any two tickets: the difference of two prefixes.
    """
    offset, count, uneven = spans(tables, layer, ids)
    replica = (tickets + tables.ep_rank + ids) % count
    if weighted and bool(uneven.any()):
        threshold, turn = tables.replica_threshold[layer].long(), tickets % SHARE_TOTAL
        few, many = uneven & (count <= TREE_REPLICAS), uneven & (count > TREE_REPLICAS)
        replica[few] = split_shares(threshold, offset[few], count[few], turn[few])
        replica[many] = tables.tickets_in_order(layer, ids[many], count[many], turn[many])
    return replica


def split_shares(threshold: Tensor, offset: Tensor, count: Tensor, tickets: Tensor) -> Tensor:
    """Replica of ticket t in [0, 65535) when two to four replicas take turns in the proportion of their shares.

    A binary tree over the expert's replicas: a node with share w of `total` passes the nearest integer to w * t / total
    of its first t tickets to its left half. So the halves are off their shares by at most 1/2, and a replica that has
    the part p of its half by at most p / 2 + 1/2 <= 1. A deeper tree would not keep to 1.
    """
    middle = (count + 1) // 2
    share = threshold[offset + middle - 1]

    def split(share: Tensor, total: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        before = (share * t + total // 2) // total
        left = (share * (t + 1) + total // 2) // total > before
        return left, torch.where(left, before, t - before)

    left, turn = split(share, torch.full_like(share, SHARE_TOTAL), tickets)
    replica = torch.where(left, 0, middle)
    # A half that has two replicas.
    live = (count > 2) & (left | (count > 3))
    inner = threshold[torch.where(live, offset + replica, offset)] - torch.where(left, 0, share)
    total = torch.where(left, share, SHARE_TOTAL - share).clamp(min=1)
    return replica + (live & ~split(inner, total, turn)[0])


def pick_by_hash(tables: DispatchTables, layer: int, ids: Tensor, hashes: Tensor, weighted: bool) -> Tensor:
    """Replica index `[T, K]` from 32-bit hashes; with `weighted` in the planned shares."""
    offset, count, uneven = spans(tables, layer, ids)
    replica = (hashes * count) >> 32
    if weighted and bool(uneven.any()):
        threshold = tables.replica_threshold[layer].long()
        place = uneven.nonzero(as_tuple=True)
        draw = (hashes[place] * SHARE_TOTAL) >> 32
        first, number = offset[place], count[place]
        chosen = torch.zeros_like(draw)
        for i in range(int(number.max()) - 1):
            chosen += (i < number - 1) & (threshold[first + torch.where(i < number, i, 0)] <= draw)
        replica[place] = chosen
    return replica


def spans(tables: DispatchTables, layer: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(offset, replicas, shares are uneven) of every id; ids must lie in [0, E)."""
    span = tables.replica_span[layer].long()[ids]
    return span >> (SPAN_COUNT_BITS + 1), (span >> 1) & ((1 << SPAN_COUNT_BITS) - 1), (span & 1).bool()


def waterfill_ranks(load: Tensor, target: Tensor, num_tokens: int, ep_rank: int) -> Tensor:
    """Rank of each token's shared column, `[num_tokens] int64`: the largest deficit first, this rank on ties.

    load, target [R]: routed slots a rank has and the number it should have. Each token takes one unit from the rank
    whose target - load is largest at that moment; ties go to this rank, then to the lowest.

    Worked example: deficits [2, 0, 1] and 3 tokens on rank 2 -> [0, 2, 0] (after one token ranks 0 and 2 are level).
    """
    require_tensor("load", load, ("R",), dtypes=_LOAD_DTYPES)
    require_tensor("target", target, tuple(load.shape), dtypes=_LOAD_DTYPES, device=load.device)
    require_int("num_tokens", num_tokens, 0)
    require_int("ep_rank", ep_rank, 0, load.numel() - 1)
    deficit = (target - load).to(torch.int64)
    # Token j of rank r is taken at level deficit[r] - j: a merge of the ranks' descending levels.
    ranks = torch.arange(deficit.numel(), device=load.device)
    steps = torch.arange(num_tokens, device=load.device)
    level = (deficit[:, None] - steps[None, :]).reshape(-1)
    preference = torch.where(ranks == ep_rank, -1, ranks)[:, None].expand(-1, num_tokens).reshape(-1)
    by_rank = torch.sort(preference, stable=True).indices
    order = by_rank[torch.sort(level[by_rank], descending=True, stable=True).indices][:num_tokens]
    return ranks[:, None].expand(-1, num_tokens).reshape(-1)[order]


@torch.no_grad()
def waterfill_columns(form: RouteForm, call: RouteCall, out: RoutingOutput, target: Tensor | None) -> None:
    """Move the shared columns of `out` to the ranks that `waterfill_ranks` names, in place and without a host sync.

    A few torch operations behind the launch: the ranks' loads exist only once the whole batch is routed.
    target [R]: slots that each rank should have from this batch; default the mean, shared columns included.
    """
    config, tables = form.config, form.tables
    top_k, shared, ep_size = config.top_k, config.num_shared_experts, tables.topology.ep_size
    if call.num_tokens == 0:
        return
    per_rank = form.slots_per_rank
    routed = out.physical_ids[:, :top_k].long()
    rank_of = torch.where(routed >= 0, routed // per_rank, ep_size).reshape(-1)
    load = torch.zeros(ep_size + 1, dtype=torch.int64, device=routed.device)
    load.scatter_add_(0, rank_of, torch.ones_like(rank_of))
    load = load[:ep_size]
    live = out.physical_ids[:, top_k] >= 0
    if target is None:
        target = ((load.sum() + live.sum() * shared + ep_size - 1) // ep_size).expand(ep_size)
    ranks = waterfill_ranks(load, target, call.num_tokens, tables.ep_rank)
    columns = torch.arange(shared, device=routed.device)
    slots = ranks[:, None] * per_rank + tables.num_local_slots + columns
    slots = torch.where(live[:, None], slots, -1)
    if "slot_histogram" in form.emit:
        assert out.slot_histogram is not None
        moved = (out.physical_ids[:, top_k:].long(), slots)
        for ids, sign in zip(moved, (-1, 1), strict=True):
            bins = torch.where(ids >= 0, ids, 0).reshape(-1)
            amount = torch.where(ids >= 0, sign, 0).reshape(-1).to(torch.int32)
            out.slot_histogram.scatter_add_(0, bins, amount)
    out.physical_ids[:, top_k:] = slots
    if "local_ids" in form.emit:
        assert out.local_ids is not None
        local = slots - tables.ep_rank * per_rank
        out.local_ids[:, top_k:] = torch.where((local >= 0) & (local < per_rank), local, -1)
