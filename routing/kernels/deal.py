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
def share_by_hash(threshold_ptr, offset, count, uneven, hashes, depth):
    """Number of cumulative shares at or below the draw: replicas in planned shares. depth: `replica_depth`."""
    draw = hash_to(hashes, tl.full(hashes.shape, SHARE_TOTAL, tl.uint32))
    bound = tl.load(
        tl.max_contiguous(threshold_ptr + offset, [2, 1]), mask=uneven & (count > 1), other=SHARE_TOTAL
    )
    chosen = (bound <= draw).to(tl.int32)
    if depth > 0:
        for i in tl.static_range(1, 3):
            bound = tl.load(
                tl.max_contiguous(threshold_ptr + offset + i, [2, 1]),
                mask=uneven & (i < count - 1),
                other=SHARE_TOTAL,
            )
            chosen += (bound <= draw).to(tl.int32)
    if depth > 1:
        i = 3
        longest = tl.max(tl.where(uneven, count, 1))
        while i < longest - 1:
            bound = tl.load(
                tl.max_contiguous(threshold_ptr + offset + i, [2, 1]),
                mask=uneven & (i < count - 1),
                other=SHARE_TOTAL,
            )
            chosen += (bound <= draw).to(tl.int32)
            i += 1
    return chosen


@triton.jit
def split_turn(ticket, share, total):
    """One node of the tree: (goes left, ticket within that side); see `dispatch.split_shares`."""
    # All products stay below 2**32: share, ticket <= 65535.
    share = share.to(tl.uint32)
    before = (share * ticket.to(tl.uint32) + (total >> 1)) // total
    after = (share * (ticket + 1).to(tl.uint32) + (total >> 1)) // total
    left = after > before
    before = before.to(tl.int32)
    return left, tl.where(left, before, ticket - before)


@triton.jit
def share_by_ticket(tables_ptr, threshold_ptr, offset, count, uneven, ticket, share, depth, begin):
    """Replica of a ticket when replicas take turns in the proportion of their shares; see `dispatch.pick_by_ticket`.

    share: of the tree's left half, begin: of the order in the tables, both loaded before the ticket; depth: the layer's
    `replica_depth`, one number for all programs, so that shallow layers skip the rest.
    """
    middle = (count + 1) // 2
    left, turn = split_turn(ticket, share, SHARE_TOTAL)
    replica = tl.where(left, 0, middle)
    if depth > 0:
        # Three or four replicas: a half that has two.
        live = uneven & (count <= 4) & (count > 2) & (left | (count > 3))
        inner = tl.load(
            tl.max_contiguous(threshold_ptr + offset + replica, [2, 1]), mask=live, other=0
        ) - tl.where(left, 0, share)
        total = tl.where(left, share, SHARE_TOTAL - share)
        inner_left, _ = split_turn(turn, tl.where(live, inner, 0), tl.maximum(total, 1).to(tl.uint32))
        replica += (live & (inner_left == 0)).to(tl.int32)
        if depth > 1:
            live = uneven & (count > 4)
            bits = tl.where(count <= 16, 2, tl.where(count <= 256, 3, 4))  # log2 of an entry's
            word = tl.load(
                tl.max_contiguous(tables_ptr + begin + (ticket >> (5 - bits)), [2, 1]), mask=live, other=0
            )
            shift = (ticket & ((32 >> bits) - 1)) << bits
            entry = (word >> shift) & ((1 << (1 << bits)) - 1)
            replica = tl.where(live, entry, replica)
    return replica


@triton.jit
def replicas_of(tables_ptr, expert, pay, valid, CONSTANTS: tl.constexpr):
    """(first place in the layer's slot list, replicas, whether their shares differ) of every (row, expert)."""
    if CONSTANTS.carries_payload:
        offset = (pay >> 8) & 0xFFF
        count = (pay >> 1) & 0x7F
        uneven = (pay & 1) != 0
    else:
        span = tl.load(
            tl.max_contiguous(tables_ptr + CONSTANTS.table.replica_span + expert, [2, 1]), mask=valid, other=2
        )
        offset = span >> 11
        count = (span >> 1) & 0x3FF
        uneven = (span & 1) != 0
    return offset, tl.where(valid, count, 1), uneven & valid


@triton.jit
def draw_tickets(tables_ptr, tickets_ptr, expert, replicas, valid, counted, CONSTANTS: tl.constexpr):
    """(word, (depth, share, begin)): each pair's ticket word before this draw, and what `share_by_ticket` will read.

    The trip to L2 and back is the longest wait of a short batch: the weights are computed meanwhile.
    """
    COUNTING: tl.constexpr = CONSTANTS.counting
    copy = tl.program_id(0) % COUNTING.ticket_copies
    place = copy * CONSTANTS.plan.layout.experts + expert
    address = tickets_ptr + place.to(tl.int64) * COUNTING.ticket_stride
    step = tl.full(expert.shape, 4294967297 if COUNTING.counts else 1, tl.int64)
    if COUNTING.by_row or COUNTING.by_flag:
        step = tl.where(counted, step, 1)
    word = tl.atomic_add(tl.max_contiguous(address, [2, 1]), step, mask=valid, sem="relaxed")
    loaded = (0, 0, 0)
    if CONSTANTS.mode.weighted:
        offset, count, uneven = replicas
        depth = tl.load(tables_ptr + CONSTANTS.table.replica_depth)
        place = offset + (count + 1) // 2 - 1
        thresholds = tables_ptr + CONSTANTS.table.replica_threshold
        share = tl.load(tl.max_contiguous(thresholds + place, [2, 1]), mask=uneven & (count <= 4), other=0)
        sequences = tables_ptr + CONSTANTS.table.replica_sequence
        begin = tl.load(tl.max_contiguous(sequences + expert, [2, 1]), mask=uneven & (count > 4), other=0)
        loaded = (depth, share, begin)
    return word, loaded


@triton.jit
def ticket_of(word, weight):
    """Tickets, the low halves of the words, uint32; weights are never negative.

    What looks like a use of weight and high half is there for ptxas: it would wait for the words first and compute the
    weights afterwards, and would wait inside the atomic's own branch if only one half were live.
    """
    return word.to(tl.uint32) + tl.where(weight < 0.0, (word >> 32).to(tl.uint32), 0)


@triton.jit
def pick_slots(
    tables_ptr, row, expert, replicas, ticket, loaded, valid, salt, ep_rank, CONSTANTS: tl.constexpr
):
    """Slot of every (row, expert) [32, ROWS]; row: its global number.

    ticket, loaded: from `ticket_of` and `draw_tickets`, of modes that pick by ticket only.
    """
    MODE: tl.constexpr = CONSTANTS.mode
    TABLE: tl.constexpr = CONSTANTS.table
    offset, count, uneven = replicas
    thresholds = tables_ptr + TABLE.replica_threshold
    if MODE.pick == "ticket":
        start = (expert + ep_rank + tl.program_id(0) % CONSTANTS.counting.ticket_copies).to(tl.uint32)
        replica = ((ticket + start) % count.to(tl.uint32)).to(tl.int32)
        if MODE.weighted:
            depth, share, begin = loaded
            turn = (ticket % 65535).to(tl.int32)
            shared = share_by_ticket(tables_ptr, thresholds, offset, count, uneven, turn, share, depth, begin)
            replica = tl.where(uneven, shared, replica)
    else:
        hashes = hash_row(row, expert, salt)
        replica = hash_to(hashes, count)
        if MODE.weighted:
            depth = tl.load(tables_ptr + TABLE.replica_depth)
            shared = share_by_hash(thresholds, offset, count, uneven, hashes, depth)
            replica = tl.where(uneven, shared, replica)
    return tl.load(
        tl.max_contiguous(tables_ptr + TABLE.replica_slot + offset + replica, [2, 1]), mask=valid, other=0
    )


@triton.jit
def mark_batch(batch_ptr, chunks, row, expert, valid, num_tokens, CONSTANTS: tl.constexpr):
    """Note which rows name which experts, for the launch that deals this batch; see `batch.state.BatchState`."""
    E: tl.constexpr = CONSTANTS.plan.layout.experts
    buffer = tl.load(batch_ptr)
    counts = batch_ptr + 32 + buffer * (chunks // 8) * E
    bits = batch_ptr + 32 + (2 * (chunks // 8) + buffer * chunks) * E
    row = row.to(tl.int32)
    bit = tl.full(expert.shape, 1, tl.int32) << (row % 32)
    address = tl.max_contiguous(bits + (row // 32) * E + expert, [2, 1])
    if CONSTANTS.source == "logits":
        tl.atomic_or(address, bit, mask=valid, sem="relaxed")
    else:  # a row may name an expert twice
        valid &= (tl.atomic_or(address, bit, mask=valid, sem="relaxed") & bit) == 0
    address = tl.max_contiguous(counts + (row // 256) * E + expert, [2, 1])
    tl.atomic_add(address, 1, mask=valid, sem="relaxed")
    if tl.program_id(0) == 0:
        tl.store(batch_ptr + 1, buffer)
        tl.store(batch_ptr + 2 + buffer, num_tokens)
