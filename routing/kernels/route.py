# mypy: ignore-errors
"""The routing launch: choice, weights, dispatch, counts and outputs of ROWS rows a program, one row a warp and turn.

Tiles are [32, ROWS] with experts or columns over the 32 lanes of a warp: reductions over axis 0 stay inside a warp.
"""

import triton
import triton.language as tl

from evenroute.routing.kernels.choose import choose_best
from evenroute.routing.kernels.deal import draw_tickets, pick_slots, replicas_of, ticket_of
from evenroute.routing.kernels.outputs import order_by_payload, publish_histogram, store_columns
from evenroute.routing.kernels.rows import ID_SHIFT, LAST_EXPERT, row_bias, softmax_parts
from evenroute.routing.kernels.scores import FLOAT_MAX, clean_logit, inverse_key, reciprocal, score_of

HUGE_WEIGHT = tl.constexpr(2.0**120)
HUGE_SHRINK = tl.constexpr(2.0**-8)
INFINITY_IMAGE = tl.constexpr(-2139095041 + 2)  # key_image(-inf)


@triton.jit
def cached(table_ptr, lane, WIDTH: tl.constexpr):
    """Read a word of every sector of a table without negative entries: true, once it is here."""
    found = lane >= 0
    for part in tl.static_range((WIDTH + 255) // 256):
        word = part * 256 + lane * 8
        found &= tl.load(table_ptr + word, mask=word < WIDTH, other=0) >= 0
    return found


@triton.jit(
    do_not_specialize=["num_tokens", "vocab", "row_offset", "rank_salt", "ep_rank"],
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
    seed_ptr,
    tables_ptr,
    num_tokens,
    row_stride,
    bias_stride,
    vocab,
    row_offset,
    rank_salt,
    ep_rank,
    E: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    G: tl.constexpr,
    TG: tl.constexpr,
    TOP2: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    CODED: tl.constexpr,
    EARLY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SORT_BOUND: tl.constexpr,
    SORT_BEST: tl.constexpr,
    ROWS: tl.constexpr,
    MODE: tl.constexpr,
    SCORING: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BIAS_ON_SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MARKED: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BY_ID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    SHARED_WEIGHT: tl.constexpr,
    SHARED_PAD: tl.constexpr,
    PER_RANK: tl.constexpr,
    LOCAL_SLOTS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    FORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COUNT: tl.constexpr,
    PAYLOAD: tl.constexpr,
    AT: tl.constexpr,
    COPIES: tl.constexpr,
    TICKET_COPIES: tl.constexpr,
    TICKET_STRIDE: tl.constexpr,
    EMIT: tl.constexpr,
    BUCKETS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ANY_BIAS: tl.constexpr = HAS_BIAS or HAS_MARKED
    SHAPE: tl.constexpr = (32, ROWS, 4)
    RAGGED: tl.constexpr = (CHUNKS * 128) != E
    LAYOUT: tl.constexpr = (CHUNKS * 4, E, G, GROUP_PAD, RAGGED, SOFTCAP, SCORING)
    PAYLOAD_AT: tl.constexpr = AT[5] if FORM == "static" else AT[4]
    SCORE: tl.constexpr = (SCORING, BIAS_ON_SCORE, ANY_BIAS, HAS_MARKED, HAS_BIAS, PAYLOAD)
    # The row's denominator, where chosen scores alone do not give the weights.
    NEED_SUM: tl.constexpr = (
        (SCORING == "softmax")
        and (MODE != "given")
        and ((not RENORMALIZE) or EPSILON > 0.0 or ANY_BIAS or MODE == "table")
    )
    # A long batch would pay more for carrying keys along than for fetching the logits again.
    KEY_IS_LOGIT: tl.constexpr = (
        EARLY and MODE == "choose" and (not BY_ID) and SCORING == "softmax" and (not ANY_BIAS)
    )
    pid = tl.program_id(0)
    lane = tl.broadcast_to(tl.arange(0, 32)[:, None], [32, ROWS])
    valid_rows = num_tokens
    if HAS_VALID:
        valid_rows = tl.minimum(tl.load(num_valid_ptr), num_tokens)
    salt = rank_salt.to(tl.uint32)
    started = tl.broadcast_to(tl.arange(0, ROWS)[None, :] >= 0, [32, ROWS])
    if FORM == "hash":
        seed = tl.load(seed_ptr)
        salt = salt + seed.to(tl.uint32) * 0x27D4EB2F
        started &= seed >= 0  # always: seeds are not negative
    # What the dispatch will read comes to the cache while the choice is made.
    if EARLY and FORM != "static":
        started &= cached(tables_ptr + AT[1], lane, NUM_SLOTS)
        if WEIGHTED:
            started &= cached(tables_ptr + AT[2], lane, NUM_SLOTS)
        if not PAYLOAD:
            started &= cached(tables_ptr + AT[0], lane, E)
    if EARLY and CODED and PAYLOAD and MODE == "choose":
        started &= cached(tables_ptr + PAYLOAD_AT, lane, E)
    # Rows are counted in 32 bits and addressed in 64.
    number = pid * ROWS + tl.arange(0, ROWS)[None, :]
    row = number.to(tl.int64)
    exists = number < num_tokens
    live = number < valid_rows
    ready = started & live
    logit_row = logits_ptr + row * row_stride
    bias_row = bias_ptr + row * bias_stride
    marked = exists
    if HAS_MARKED:
        marked = tl.load(marker_ptr + row, mask=exists, other=0) != 0
    largest = tl.zeros([1, ROWS], tl.float32)
    denominator = tl.full([1, ROWS], 1.0, tl.float32)
    if NEED_SUM:
        largest, denominator = softmax_parts(logit_row, exists, CHUNKS, SHAPE, LAYOUT)

    routed = lane < K
    best_key = tl.zeros([32, ROWS], tl.int32)
    if MODE == "choose":
        best_key, pay, expert = choose_best(
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            tables_ptr + PAYLOAD_AT,
            exists,
            largest,
            denominator,
            lane,
            ready,
            K,
            CHUNKS,
            DEPTH,
            CODED,
            EARLY,
            SEGMENTS,
            SLOTS,
            SORT_BOUND,
            SORT_BEST,
            TG,
            GROUP_LANES,
            TOP2,
            SHAPE,
            LAYOUT,
            SCORE,
        )
    else:
        take = routed & exists
        if MODE == "given":
            expert = tl.load(given_ids_ptr + row * K + lane, mask=take, other=-1).to(tl.int64)
        else:
            token = tl.load(token_ids_ptr + row, mask=exists, other=-1).to(tl.int64)
            known = take & (token >= 0) & (token < vocab)
            expert = tl.load(token_table_ptr + token * K + lane, mask=known, other=-1).to(tl.int64)
        inside = take & (expert >= 0) & (expert < E)
        expert = tl.where(inside, expert, 0).to(tl.int32)
        # The column in the payload keeps repeated ids apart and finds given weights again.
        pay = tl.where(inside, ((LAST_EXPERT - expert) << ID_SHIFT) | (63 - lane), -1)
    valid = routed & live
    if BY_ID:
        pay = order_by_payload(tl.where(routed, pay, -1), lane, K)
    if MODE != "choose":
        valid &= pay >= 0  # a choice leaves no column empty
    if BY_ID or MODE != "choose":
        expert = LAST_EXPERT - (pay >> ID_SHIFT)
    expert = tl.where(valid, expert, 0)
    HAS_PAY: tl.constexpr = PAYLOAD and MODE == "choose"
    if FORM != "static":
        replicas = replicas_of(tables_ptr, expert, pay, valid, HAS_PAY, AT)
    if FORM == "exact":
        word, loaded = draw_tickets(
            tables_ptr, tickets_ptr, expert, replicas, valid, WEIGHTED, COUNT, AT, E, TICKET_COPIES, TICKET_STRIDE
        )  # fmt: skip

    if MODE == "given":
        weight = tl.load(given_weights_ptr + row * K + (63 - (pay & 63)), mask=valid, other=0.0).to(
            tl.float32
        )
        weight = tl.where((weight != weight) | (weight < 0.0), 0.0, tl.minimum(weight, FLOAT_MAX))
    else:
        if KEY_IS_LOGIT:
            x = tl.where(valid & (best_key >= INFINITY_IMAGE), inverse_key(best_key), float("-inf"))
        else:
            x = clean_logit(tl.load(logit_row + expert, mask=valid, other=float("-inf")), SCORING, SOFTCAP)
            x = tl.where(valid, x, float("-inf"))
        if SCORING == "softmax" and not NEED_SUM:
            if MODE == "choose" and not BY_ID:
                top = tl.gather(x, lane * 0, axis=0)  # columns fall
            else:
                top = tl.max(tl.where(x == x, x, float("-inf")), axis=0, keep_dims=True)
            largest = tl.where(top > float("-inf"), top, 0.0)
        weight = score_of(x, largest, denominator, SCORING)
        if ANY_BIAS:
            if EARLY and MODE == "choose" and not BY_ID:
                usable = best_key > INFINITY_IMAGE
            else:
                bias = row_bias(bias_row, marked_ptr, marked, expert, valid, HAS_MARKED, HAS_BIAS)
                usable = bias >= -FLOAT_MAX
            weight = tl.where(usable, weight, 0.0)
    weight = tl.where(valid, weight, 0.0)
    if RENORMALIZE:
        if MODE == "given":
            # The sum of weights that large would be infinite: see `reference.finish_weights`.
            shrink = tl.where(tl.max(weight, axis=0, keep_dims=True) >= HUGE_WEIGHT, HUGE_SHRINK, 1.0)
            weight = weight * shrink
        total = tl.sum(weight, axis=0, keep_dims=True)
        if EPSILON > 0.0:
            if MODE == "given":
                total = total + EPSILON * shrink
            else:
                total = total + EPSILON
        else:
            total = tl.where(total > 0.0, total, 1.0)
        if MODE == "given":
            weight = weight / total
        else:
            weight = weight * reciprocal(total)  # no smaller than the smallest normal number
    if SCALE != 1.0:
        weight = tl.minimum(weight * SCALE, FLOAT_MAX)

    if FORM == "static":
        slot = pay & 0xFFFFF
        if not HAS_PAY:
            slot = tl.load(tables_ptr + AT[3] + expert, mask=valid, other=0)
    else:
        ticket = expert
        if FORM == "exact":
            ticket = ticket_of(word, weight)
        else:
            loaded = (0, 0, 0)
        slot = pick_slots(
            tables_ptr,
            row + row_offset,
            expert,
            replicas,
            ticket,
            loaded,
            valid,
            salt,
            ep_rank,
            FORM,
            WEIGHTED,
            AT,
            TICKET_COPIES,
        )
    if COUNT and FORM != "exact":
        counter = counts_ptr + (pid % COPIES) * E + expert
        tl.atomic_add(counter, 1, mask=valid, sem="relaxed")

    rank = slot // LOCAL_SLOTS
    local = slot - rank * LOCAL_SLOTS
    here = tl.where(rank == ep_rank, local, -1)
    physical = slot
    if PER_RANK:
        physical = slot + rank * S
    column = row * (K + S)
    store_columns(
        weights_ptr,
        physical_ptr,
        logical_ptr,
        local_ptr,
        packed_ptr,
        scratch_ptr,
        column + lane,
        routed & exists,
        valid,
        weight,
        physical,
        expert,
        here,
        EMIT,
        MODE == "given" or SCALE > 1e15,
    )
    if S > 0:
        shared = tl.broadcast_to(tl.arange(0, SHARED_PAD)[:, None], [SHARED_PAD, ROWS])
        if PER_RANK:
            shared_slot = ep_rank * (LOCAL_SLOTS + S) + LOCAL_SLOTS + shared
        else:
            shared_slot = NUM_SLOTS + shared
        store_columns(
            weights_ptr,
            physical_ptr,
            logical_ptr,
            local_ptr,
            packed_ptr,
            scratch_ptr,
            column + K + shared,
            (shared < S) & exists,
            (shared < S) & live,
            tl.full([SHARED_PAD, ROWS], SHARED_WEIGHT, tl.float32),
            shared_slot,
            E + shared,
            LOCAL_SLOTS + shared,
            EMIT,
            False,
        )
    if EMIT[5]:
        publish_histogram(histogram_ptr, scratch_ptr, BUCKETS, 128)
