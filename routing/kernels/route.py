# mypy: ignore-errors
"""The routing launch: choice, weights, dispatch, counts and outputs of a program's rows, one row a warp and turn.

Tiles are [32, ROWS] with experts or columns over the 32 lanes of a warp: reductions over axis 0 stay inside a warp.
"""

import triton
import triton.language as tl

from evenroute.routing.kernels.choose import choose_best
from evenroute.routing.kernels.deal import draw_tickets, mark_batch, pick_slots, replicas_of, ticket_of
from evenroute.routing.kernels.outputs import order_by_payload, publish_histogram, store_columns
from evenroute.routing.kernels.rows import ID_SHIFT, LAST_EXPERT, bias_at, softmax_parts
from evenroute.routing.kernels.scores import FLOAT_MAX, clean_logit, inverse_key, reciprocal, score_of
from evenroute.routing.kernels.types import Given, OutputPointers, RowTile

HUGE_WEIGHT = tl.constexpr(2.0**120)
HUGE_SHRINK = tl.constexpr(2.0**-8)
INFINITY_IMAGE = tl.constexpr(-2139095041 + 2)  # key_image(-inf)


@triton.jit
def cached(table_ptr, lane, WIDTH: tl.constexpr):
    """Read a word of every sector of a table without negative entries: true, once it is here."""
    found = lane >= 0
    for part in tl.static_range((WIDTH + 255) // 256):
        word = part * 256 + lane * 8
        found &= tl.load(tl.max_contiguous(table_ptr + word, [2, 1]), mask=word < WIDTH, other=0) >= 0
    return found


@triton.jit
def start(tables_ptr, seed_ptr, rank_salt, lane, CONSTANTS: tl.constexpr):
    """(salt of the hash, true once what the dispatch will read has come to the cache) while the choice is made."""
    MODE: tl.constexpr = CONSTANTS.mode
    TABLE: tl.constexpr = CONSTANTS.table
    experts: tl.constexpr = CONSTANTS.plan.layout.experts
    slots: tl.constexpr = CONSTANTS.columns.num_slots
    salt = rank_salt.to(tl.uint32)
    started = tl.broadcast_to(tl.arange(0, CONSTANTS.plan.layout.rows)[None, :] >= 0, lane.shape)
    if MODE.pick != "slot" and MODE.pick != "ticket" and MODE.by_rank:
        seed = tl.load(seed_ptr)
        salt = salt + seed.to(tl.uint32) * 0x27D4EB2F
        started &= seed >= 0  # always: seeds are not negative
    if CONSTANTS.plan.early and MODE.pick != "slot" and MODE.pick != "batch":
        started &= cached(tables_ptr + TABLE.replica_slot, lane, slots)
        if MODE.weighted:
            started &= cached(tables_ptr + TABLE.replica_threshold, lane, slots)
        if not CONSTANTS.score.payload:
            started &= cached(tables_ptr + TABLE.replica_span, lane, experts)
    if CONSTANTS.plan.early and CONSTANTS.plan.coded and CONSTANTS.carries_payload:
        started &= cached(tables_ptr + CONSTANTS.payload_column, lane, experts)
    return salt, started


@triton.jit
def given_payloads(row, given, routed, CONSTANTS: tl.constexpr):
    """Payloads of the experts that a caller or a table by token id names; -1 for invalid ids.

    The column in the payload keeps repeated ids apart and finds given weights again.
    """
    K: tl.constexpr = CONSTANTS.plan.top_k
    take = routed & row.exists
    if CONSTANTS.source == "given":
        place = row.number * CONSTANTS.given_width + row.lane
        expert = tl.load(tl.max_contiguous(given.ids + place, [2, 1]), mask=take, other=-1).to(tl.int64)
    else:
        token = tl.load(given.token_ids + row.number, mask=row.exists, other=-1).to(tl.int64)
        known = take & (token >= 0) & (token < given.vocab)
        expert = tl.load(
            tl.max_contiguous(given.table + token * K + row.lane, [2, 1]), mask=known, other=-1
        ).to(tl.int64)
    inside = take & (expert >= 0) & (expert < CONSTANTS.plan.layout.experts)
    expert = tl.where(inside, expert, 0).to(tl.int32)
    return tl.where(inside, ((LAST_EXPERT - expert) << ID_SHIFT) | (63 - row.lane), -1)


@triton.jit
def given_weights(row, given, pay, valid, CONSTANTS: tl.constexpr):
    """Weights that the caller gave, NaN and negative ones as 0."""
    place = row.number * CONSTANTS.given_width + (63 - (pay & 63))
    weight = tl.load(tl.max_contiguous(given.weights + place, [2, 1]), mask=valid, other=0.0).to(tl.float32)
    return tl.where((weight != weight) | (weight < 0.0), 0.0, tl.minimum(weight, FLOAT_MAX))


@triton.jit
def weigh(row, best_key, expert, valid, CONSTANTS: tl.constexpr):
    """Scores of the chosen experts; 0 for those with a key of NaN or -inf."""
    SCORE: tl.constexpr = CONSTANTS.score
    in_order: tl.constexpr = CONSTANTS.source == "logits" and not CONSTANTS.weighing.by_id
    # A long batch would pay more for carrying keys along than for fetching the logits again.
    keys_here: tl.constexpr = CONSTANTS.plan.early and in_order
    if keys_here and SCORE.scoring == "softmax" and not SCORE.any_bias:
        x = tl.where(valid & (best_key >= INFINITY_IMAGE), inverse_key(best_key), float("-inf"))
    else:
        x = clean_logit(
            tl.load(tl.max_contiguous(row.logits + expert, [2, 1]), mask=valid, other=float("-inf")), SCORE
        )
        x = tl.where(valid, x, float("-inf"))
    largest = row.largest
    if SCORE.scoring == "softmax" and not CONSTANTS.needs_sum:
        if in_order:
            top = tl.gather(x, row.lane * 0, axis=0)  # columns fall
        else:
            top = tl.max(tl.where(x == x, x, float("-inf")), axis=0, keep_dims=True)
        largest = tl.where(top > float("-inf"), top, 0.0)
    weight = score_of(x, largest, row.denominator, SCORE)
    if SCORE.any_bias:
        if keys_here:
            usable = best_key > INFINITY_IMAGE
        else:
            bias = bias_at(row.bias, row.marked_bias, row.marked, expert, valid, SCORE)
            usable = bias >= -FLOAT_MAX
        weight = tl.where(usable, weight, 0.0)
    return weight


@triton.jit
def finished(weight, CONSTANTS: tl.constexpr):
    """Weights renormalised over the routed columns and scaled."""
    WEIGHING: tl.constexpr = CONSTANTS.weighing
    given: tl.constexpr = CONSTANTS.source == "given"
    if WEIGHING.renormalize:
        if given:
            # The sum of weights that large would be infinite: see `reference.finish_weights`.
            shrink = tl.where(tl.max(weight, axis=0, keep_dims=True) >= HUGE_WEIGHT, HUGE_SHRINK, 1.0)
            weight = weight * shrink
        total = tl.sum(weight, axis=0, keep_dims=True)
        if WEIGHING.epsilon > 0.0:
            if given:
                total = total + WEIGHING.epsilon * shrink
            else:
                total = total + WEIGHING.epsilon
        else:
            total = tl.where(total > 0.0, total, 1.0)
        if given:
            weight = weight / total
        else:
            weight = weight * reciprocal(total)  # no smaller than the smallest normal number
    if WEIGHING.scale != 1.0:
        weight = tl.minimum(weight * WEIGHING.scale, FLOAT_MAX)
    return weight


@triton.jit
def store_routed(out, row, slot, weight, expert, routed, valid, ep_rank, CONSTANTS: tl.constexpr):
    """Write the K routed columns."""
    COLUMNS: tl.constexpr = CONSTANTS.columns
    EMIT: tl.constexpr = COLUMNS.routed
    physical = slot
    here = slot
    if CONSTANTS.mode.pick != "batch":
        rank = slot // COLUMNS.local_slots
        local = slot - rank * COLUMNS.local_slots
        here = tl.where(rank == ep_rank, local, -1)
        if COLUMNS.shared_per_rank:
            physical = slot + rank * COLUMNS.shared
    index = row.number * (CONSTANTS.plan.top_k + COLUMNS.shared) + row.lane
    huge: tl.constexpr = CONSTANTS.source == "given" or CONSTANTS.weighing.scale > 1e15
    store_columns(out, index, routed & row.exists, valid, weight, physical, expert, here, EMIT, huge)


@triton.jit
def store_shared(out, row, given, ep_rank, CONSTANTS: tl.constexpr):
    """Write the S shared columns behind the routed ones, as fixed or as the caller gives them."""
    COLUMNS: tl.constexpr = CONSTANTS.columns
    EMIT: tl.constexpr = COLUMNS.emit
    S: tl.constexpr = COLUMNS.shared
    SHAPE: tl.constexpr = (COLUMNS.shared_pad, CONSTANTS.plan.layout.rows)
    shared = tl.broadcast_to(tl.arange(0, COLUMNS.shared_pad)[:, None], SHAPE)
    index = row.number * (CONSTANTS.plan.top_k + S) + CONSTANTS.plan.top_k + shared
    weight = tl.full(SHAPE, COLUMNS.shared_weight, tl.float32)
    mask, valid = (shared < S) & row.exists, (shared < S) & row.live
    whole: tl.constexpr = CONSTANTS.source == "given" and CONSTANTS.given_width > CONSTANTS.plan.top_k
    if whole:
        chosen = (
            tl.load(tl.max_contiguous(given.ids + index, [2, 1]), mask=valid, other=-1).to(tl.int64)
            - CONSTANTS.plan.layout.experts
        )
        valid &= (chosen >= 0) & (chosen < S)
        shared = tl.where(valid, chosen, 0).to(tl.int32)
        weight = tl.load(tl.max_contiguous(given.weights + index, [2, 1]), mask=valid, other=0.0).to(
            tl.float32
        )
        weight = tl.where((weight != weight) | (weight < 0.0), 0.0, tl.minimum(weight, FLOAT_MAX))
    if COLUMNS.shared_per_rank:
        slot = ep_rank * (COLUMNS.local_slots + S) + COLUMNS.local_slots + shared
    else:
        slot = COLUMNS.num_slots + shared
    logical, local = CONSTANTS.plan.layout.experts + shared, COLUMNS.local_slots + shared
    store_columns(out, index, mask, valid, weight, slot, logical, local, EMIT, whole)


@triton.jit(
    do_not_specialize=["num_tokens", "vocab", "row_offset", "rank_salt", "ep_rank", "batch_chunks"],
    do_not_specialize_on_alignment=["num_valid_ptr", "count_ptr"],  # one word, anywhere
)
def route(
    weights_ptr,
    physical_ptr,
    logical_ptr,
    local_ptr,
    packed_ptr,
    histogram_ptr,
    scratch_ptr,
    counts_ptr,
    tickets_ptr,
    logits_ptr,
    bias_ptr,
    marked_ptr,
    marker_ptr,
    given_ids_ptr,
    given_weights_ptr,
    token_table_ptr,
    token_ids_ptr,
    num_valid_ptr,
    count_ptr,
    seed_ptr,
    tables_ptr,
    batch_ptr,
    num_tokens,
    row_stride,
    bias_stride,
    vocab,
    row_offset,
    rank_salt,
    ep_rank,
    batch_chunks,
    CONSTANTS: tl.constexpr,
):
    """CONSTANTS: `RouteConstants`. Experts, weights, tickets, slots, then everything is stored."""
    if CONSTANTS.pdl:
        tl.extra.cuda.gdc_wait()
    if CONSTANTS.pdl or CONSTANTS.overlap:
        tl.extra.cuda.gdc_launch_dependents()
    PLAN: tl.constexpr = CONSTANTS.plan
    LAYOUT: tl.constexpr = PLAN.layout
    ROWS: tl.constexpr = PLAN.layout.rows
    SCORE: tl.constexpr = CONSTANTS.score
    COLUMNS: tl.constexpr = CONSTANTS.columns
    MODE: tl.constexpr = CONSTANTS.mode
    out = OutputPointers(weights_ptr, physical_ptr, logical_ptr, local_ptr, packed_ptr, scratch_ptr)
    given = Given(given_ids_ptr, given_weights_ptr, token_table_ptr, token_ids_ptr, vocab)
    pid = tl.program_id(0)
    lane = tl.broadcast_to(tl.arange(0, 32)[:, None], [32, ROWS])
    valid_rows = num_tokens
    if CONSTANTS.padding:
        valid_rows = tl.minimum(tl.load(num_valid_ptr), num_tokens)
    salt, started = start(tables_ptr, seed_ptr, rank_salt, lane, CONSTANTS)
    # RowTile are counted in 32 bits and addressed in 64.
    number = pid * ROWS + tl.arange(0, ROWS)[None, :]
    place = number.to(tl.int64)
    exists = number < num_tokens
    live = number < valid_rows
    counted = live
    if CONSTANTS.counting.by_row:
        live = exists
    if CONSTANTS.counting.by_flag:
        counted &= tl.load(count_ptr) != 0
    logits = logits_ptr + place * row_stride
    bias = bias_ptr + place * bias_stride
    marked = exists
    if SCORE.marked_bias:
        marked = tl.load(marker_ptr + place, mask=exists, other=0) != 0
    largest = tl.zeros([1, ROWS], tl.float32)
    denominator = tl.full([1, ROWS], 1.0, tl.float32)
    if CONSTANTS.needs_sum:
        largest, denominator = softmax_parts(logits, exists, LAYOUT, SCORE)
    payloads = tables_ptr + CONSTANTS.payload_column
    ready = started & live
    row = RowTile(
        place, logits, bias, marked_ptr, payloads, marked, exists, live, ready, lane, largest, denominator
    )

    routed = lane < PLAN.top_k
    best_key = tl.zeros([32, ROWS], tl.int32)
    if CONSTANTS.source == "logits":
        best_key, pay, expert = choose_best(row, PLAN, SCORE)
    else:
        pay = given_payloads(row, given, routed, CONSTANTS)
    valid = routed & live
    if CONSTANTS.weighing.by_id:
        pay = order_by_payload(tl.where(routed, pay, -1), lane, PLAN.top_k)
    if CONSTANTS.source != "logits":
        valid &= pay >= 0  # a choice leaves no column empty
    if CONSTANTS.weighing.by_id or CONSTANTS.source != "logits":
        expert = LAST_EXPERT - (pay >> ID_SHIFT)
    expert = tl.where(valid, expert, 0)

    if MODE.pick == "batch":
        mark_batch(batch_ptr, batch_chunks, row.number, expert, valid, num_tokens, CONSTANTS)
    elif MODE.pick != "slot":
        replicas = replicas_of(tables_ptr, expert, pay, valid, CONSTANTS)
    if MODE.pick == "ticket":
        word, loaded = draw_tickets(tables_ptr, tickets_ptr, expert, replicas, valid, counted, CONSTANTS)
    if CONSTANTS.source == "given":
        weight = given_weights(row, given, pay, valid, CONSTANTS)
    else:
        weight = weigh(row, best_key, expert, valid, CONSTANTS)
    weight = finished(tl.where(valid, weight, 0.0), CONSTANTS)

    if MODE.pick == "slot":
        slot = pay & 0xFFFFF
        if not CONSTANTS.carries_payload:
            slot = tl.load(
                tl.max_contiguous(tables_ptr + CONSTANTS.table.static_slot + expert, [2, 1]),
                mask=valid,
                other=0,
            )
    elif MODE.pick == "batch":
        slot = expert  # the second launch finds it
    else:
        ticket = expert
        if MODE.pick == "ticket":
            ticket = ticket_of(word, weight)
        else:
            loaded = (0, 0, 0)
        slot = pick_slots(
            tables_ptr, place + row_offset, expert, replicas, ticket, loaded, valid, salt, ep_rank, CONSTANTS
        )
    if CONSTANTS.counting.counts and MODE.pick != "ticket":  # tickets count by themselves
        counter = counts_ptr + (pid % CONSTANTS.counting.copies) * LAYOUT.experts + expert
        tl.atomic_add(tl.max_contiguous(counter, [2, 1]), 1, mask=valid & counted, sem="relaxed")

    store_routed(out, row, slot, weight, expert, routed, valid, ep_rank, CONSTANTS)
    if COLUMNS.shared > 0:
        store_shared(out, row, given, ep_rank, CONSTANTS)
    if COLUMNS.routed.slot_histogram:
        publish_histogram(histogram_ptr, scratch_ptr, COLUMNS.buckets, 128)
