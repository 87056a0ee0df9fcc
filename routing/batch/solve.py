"""The batch corrected, in plain torch: planned shares of its counts, then flows between replicas on unequal ranks.

All in integers (64 units a token), so that every rank, backend and program comes to the same slots. Of `n` tokens an
expert's replicas get the planned shares; then, in every round at once, each replica and the next of its expert pass
units from the rank with more load of this batch to the one with less: the gap, divided by how many replicated experts
share it. A replica without a share gets nothing. What comes out is rounded along the expert's replicas, from an offset
that differs by expert, count and rank, and the tokens of the expert, in row order, fill the replicas one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.routing.dispatch import SHARE_TOTAL, hash_rows, spans
from evenroute.routing.tables.view import TableView

UNITS = 64  # of a token
ROUNDS = 6


def count_pairs(ids: Tensor, valid: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(counts [E] int64, positions [T, K] int64): rows that name each expert, and how many of them come before.

    An expert that a row names twice counts once: both columns have one position, and go to one slot.
    """
    named = torch.zeros((ids.shape[0], num_experts + 1), dtype=torch.int32, device=ids.device)
    named.scatter_(1, torch.where(valid, ids, num_experts), 1)
    upto = named.cumsum(0, dtype=torch.int32)
    positions = (upto - named).gather(1, ids).long()
    return named[:, :num_experts].sum(0, dtype=torch.int64), positions


def solve_batch(tables: TableView, layer: int, counts: Tensor, salt: int) -> Tensor:
    """Where each replica's tokens end, [P] int64 in the order of `replica_slot`: the last of an expert at its count.

    counts [E] int64: the batch's tokens by logical expert; salt: of the rounding offsets.
    """
    slots = tables.replica_slot[layer].long()
    expert = tables.physical_to_logical[layer].long()[slots]
    offset, number, _ = spans(tables, layer, expert)
    place = torch.arange(len(slots), device=slots.device) - offset
    upper = tables.replica_threshold[layer].long()
    lower = torch.where(place > 0, upper.roll(1), 0)
    tokens = counts[expert]
    units = tokens * UNITS * upper // SHARE_TOTAL - tokens * UNITS * lower // SHARE_TOTAL
    rank, ranks = slots // tables.num_local_slots, tables.topology.ep_size
    following, previous = offset + (place + 1) % number, offset + (place - 1) % number
    counted = (number > 1) & (place < number)  # others are without a share in this batch's class
    used = counted & (upper > lower)
    pair = used & used[following] & ((number > 2) | (place == 0))  # two replicas are one pair

    def by_rank(values: Tensor) -> Tensor:
        return torch.zeros(ranks, dtype=torch.int64, device=slots.device).index_add_(0, rank, values)

    sharers = by_rank((used & (tokens > 0)).long()).clamp(min=1)
    divisor = torch.maximum(sharers[rank], sharers[rank[following]]) * torch.where(number > 2, 3, 2)
    for _ in range(ROUNDS):
        load = by_rank(units)
        gap, half = load[rank] - load[rank[following]], units // 2
        size = torch.minimum(gap.abs() // divisor, torch.where(gap > 0, half, half[following]))
        flow = torch.where(pair, gap.sign() * size, 0)
        units = units - flow + torch.where(counted, flow[previous], 0)
    total = units.cumsum(0)
    before = (total - units)[offset]
    shift = hash_rows(tokens, expert, salt) % UNITS
    return (total - before + shift) // UNITS


def pick_by_position(tables: TableView, layer: int, ids: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
    """Slots [T, K] of the tokens at these positions among their expert's, given where each replica's tokens end."""
    offset, number, _ = spans(tables, layer, ids)
    expert = tables.physical_to_logical[layer].long()[tables.replica_slot[layer].long()]
    width = max(int(ends.max()), int(positions.max()) if positions.numel() else 0) + 1
    entry = torch.searchsorted(expert * width + ends, ids * width + positions, right=True)
    entry = torch.minimum(torch.maximum(entry, offset), offset + number - 1)
    return tables.replica_slot[layer].long()[entry]
