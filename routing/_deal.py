# mypy: ignore-errors
"""Replica arithmetic of the kernels, the same as `dispatch.py`."""

import triton
import triton.language as tl

ROW_MULTIPLIER = tl.constexpr(0x9E3779B1)
EXPERT_MULTIPLIER = tl.constexpr(0x85EBCA77)
SHARE_TOTAL = tl.constexpr(65535)


@triton.jit
def hash_row(row, expert, salt):
    """32-bit hash of global row and expert: [32, ROWS] uint32."""
    x = row.to(tl.uint32) * ROW_MULTIPLIER + expert.to(tl.uint32) * EXPERT_MULTIPLIER + salt.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def hash_to(hashes, count):
    """hash * count >> 32: uniform in [0, count)."""
    return ((hashes.to(tl.uint64) * count.to(tl.uint64)) >> 32).to(tl.int32)


@triton.jit
def share_by_hash(threshold_ptr, offset, count, uneven, hashes):
    """Number of cumulative shares at or below the draw: replicas in planned shares."""
    draw = hash_to(hashes, tl.full(hashes.shape, SHARE_TOTAL, tl.uint32))
    chosen = tl.zeros(draw.shape, tl.int32)
    for i in tl.static_range(3):
        bound = tl.load(threshold_ptr + offset + i, mask=uneven & (i < count - 1), other=SHARE_TOTAL)
        chosen += (bound <= draw).to(tl.int32)
    i = 3
    longest = tl.max(tl.where(uneven, count, 1))
    while i < longest - 1:
        bound = tl.load(threshold_ptr + offset + i, mask=uneven & (i < count - 1), other=SHARE_TOTAL)
        chosen += (bound <= draw).to(tl.int32)
        i += 1
    return chosen


@triton.jit
def split_turn(ticket, share, total):
    """One node of the tree: (goes left, ticket within that side); see `dispatch.deal_shares`."""
    # All products stay below 2**32: share, ticket <= 65535.
    share = share.to(tl.uint32)
    before = (share * ticket.to(tl.uint32) + (total >> 1)) // total
    after = (share * (ticket + 1).to(tl.uint32) + (total >> 1)) // total
    left = after > before
    before = before.to(tl.int32)
    return left, tl.where(left, before, ticket - before)


@triton.jit
def share_by_ticket(threshold_ptr, offset, count, uneven, ticket, middle, share):
    """Replica of a ticket when replicas take turns in the proportion of their shares (`dispatch.deal_shares`).

    middle, share: split of the tree's root, loaded by the caller; only experts with three replicas or more go on.
    """
    root = tl.full(ticket.shape, SHARE_TOTAL, tl.int32)
    left, ticket = split_turn(ticket, share, SHARE_TOTAL)
    low = tl.where(left, 0, middle)
    high = tl.where(left, middle, count)
    total = tl.where(left, share, root - share)
    below = tl.where(left, 0, share)
    high = tl.where(uneven, high, low + 1)
    while tl.max(high - low) > 1:
        live = high - low > 1
        middle = low + (high - low + 1) // 2
        share = tl.load(threshold_ptr + offset + middle - 1, mask=live, other=0) - below
        left, turn = split_turn(ticket, tl.where(live, share, 0), tl.maximum(total, 1).to(tl.uint32))
        ticket = tl.where(live, turn, ticket)
        high = tl.where(live & left, middle, high)
        low = tl.where(live & (left == 0), middle, low)
        total = tl.where(live, tl.where(left, share, total - share), total)
        below = tl.where(live & (left == 0), below + share, below)
    return low
