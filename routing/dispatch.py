"""Choosing the slot for a (token, logical expert): the arithmetic that reference and kernels share.

`static`          one slot per (rank, expert)
`dynamic`         exact: ticket + start, modulo the replicas; hash: of (row, expert, rank, seed)
`rank_invariant`  hash of (global row, expert)
`weighted`        the same three forms, replicas in planned shares (exact: within 1 of share x n after any n tickets);
                  batch: in shares corrected for the batch, see `batch.solve`
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.routing.settings.modes import Mode
from evenroute.routing.tables.row import SPAN_COUNT_BITS
from evenroute.routing.tables.tickets import TREE_REPLICAS
from evenroute.routing.tables.view import TableView

SHARE_TOTAL = 65535
_MASK32 = 0xFFFFFFFF
# Odd multipliers of the hash's inputs; the finaliser is the published lowbias32.
ROW_MULTIPLIER = 0x9E3779B1
EXPERT_MULTIPLIER = 0x85EBCA77
RANK_MULTIPLIER = 0xC2B2AE3D
SEED_MULTIPLIER = 0x27D4EB2F
INVARIANT_SALT = 0x165667B1


def hash_salt(mode: Mode, ep_rank: int, seed: int = 0) -> int:
    """32-bit salt of the hash: rank and seed, or one constant for the rank-invariant modes."""
    if not mode.by_rank:
        return INVARIANT_SALT
    return ((ep_rank + 1) * RANK_MULTIPLIER + seed * SEED_MULTIPLIER) & _MASK32


def as_signed32(value: int) -> int:
    """A 32-bit number as kernels take it."""
    return value - (1 << 32) if value >= 1 << 31 else value


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


def pick_by_ticket(tables: TableView, layer: int, ids: Tensor, tickets: Tensor, mode: Mode) -> Tensor:
    """Replica index `[T, K]`: tickets in turn, ranks from different starts; uneven experts in planned shares.

    Shares: after n tickets from the start of the count (ticket 0) every replica has its share x n within 1, whatever
    n and the number of replicas: `split_shares` up to four, the order in the tables above (`ticket_sequence.py`).
    Both repeat after 65535 tickets with nothing left over. Tickets go on when shares change, so for the tokens since
    then the bound is 2, as for those between any two tickets: the difference of two prefixes.
    """
    offset, count, uneven = spans(tables, layer, ids)
    replica = (tickets + tables.ep_rank + ids) % count
    if mode.weighted and bool(uneven.any()):
        threshold, turn = tables.replica_threshold[layer].long(), tickets % SHARE_TOTAL
        few, many = uneven & (count <= TREE_REPLICAS), uneven & (count > TREE_REPLICAS)
        replica[few] = split_shares(threshold, offset[few], count[few], turn[few])
        replica[many] = tables.tickets_in_order(layer, ids[many], count[many], turn[many])
    return replica


def split_shares(threshold: Tensor, offset: Tensor, count: Tensor, tickets: Tensor) -> Tensor:
    """Replica of ticket t in [0, 65535) when two to four replicas take turns in the proportion of their shares.

    A binary tree over the expert's replicas: a node with share w of `total` passes the nearest integer to w * t / total
    of its first t tickets to its left half. So the halves are off their shares by at most 1/2, and a replica that has
    the part p of its half by at most p / 2 + 1/2 <= 1. A deeper tree would exceed 1.
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


def pick_by_hash(tables: TableView, layer: int, ids: Tensor, hashes: Tensor, mode: Mode) -> Tensor:
    """Replica index `[T, K]` from 32-bit hashes; with `mode.weighted` in the planned shares."""
    offset, count, uneven = spans(tables, layer, ids)
    replica = (hashes * count) >> 32
    if mode.weighted and bool(uneven.any()):
        threshold = tables.replica_threshold[layer].long()
        place = uneven.nonzero(as_tuple=True)
        draw = (hashes[place] * SHARE_TOTAL) >> 32
        first, number = offset[place], count[place]
        chosen = torch.zeros_like(draw)
        for i in range(int(number.max()) - 1):
            chosen += (i < number - 1) & (threshold[first + torch.where(i < number, i, 0)] <= draw)
        replica[place] = chosen
    return replica


def spans(tables: TableView, layer: int, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(offset, replicas, shares are uneven) of every id; ids must lie in [0, E)."""
    span = tables.replica_span[layer].long()[ids]
    return span >> (SPAN_COUNT_BITS + 1), (span >> 1) & ((1 << SPAN_COUNT_BITS) - 1), (span & 1).bool()
