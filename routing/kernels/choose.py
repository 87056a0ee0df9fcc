# ruff: noqa: RUF005, SIM102
# mypy: ignore-errors
"""From logits to the K best pairs of each row: by lane lists, by bound, and the exact fallback of both."""

import triton
import triton.language as tl

from evenroute.routing.kernels.bound import choose_by_bound
from evenroute.routing.kernels.codes import choose_by_codes
from evenroute.routing.kernels.groups import kept_lanes
from evenroute.routing.kernels.lists import (
    EXCLUDED,
    EXHAUSTED,
    merge,
    merge_halves,
    replaced,
    sort4,
    take_best,
)
from evenroute.routing.kernels.rows import (
    ID_SHIFT,
    LAST_EXPERT,
    chunk_images,
    chunk_payloads,
    early_loads,
    expert_at,
    gated_images,
    payload_of,
    split4,
)

FARTHEST = tl.constexpr(1 << 20)


@triton.jit
def choose_again(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    exists,
    largest,
    denominator,
    kept,
    lane,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """K rounds over whole rows, held in registers: exact for every input, and slow.

    Places rise with ids; a place is its lane's first one and a constant of the register that holds it.
    """
    ROWS: tl.constexpr = SHAPE[1]
    STEP: tl.constexpr = 128 if FORM[3] == 0 else 4
    first = lane * (4 if FORM[3] == 0 else FORM[0])
    inner = tl.arange(0, 4)[None, None, :]
    images = ()
    for chunk in tl.static_range(CHUNKS):
        image = chunk_images(
            logit_row, bias_row, marked_ptr, marked, chunk, exists, largest, denominator, SHAPE, FORM, SCORE
        )
        images = images + (tl.where(kept[:, :, None], image, EXCLUDED),)
    best_key = tl.full([32, ROWS], EXCLUDED, tl.int32)
    best_place = tl.full([32, ROWS], 0, tl.int32)
    for k in range(K):
        most = images[0]
        for chunk in tl.static_range(1, CHUNKS):
            most = tl.maximum(most, images[chunk])
        top = tl.max(tl.max(most, axis=2), axis=0, keep_dims=True)
        within = tl.full(SHAPE, FARTHEST, tl.int32)
        for i in tl.static_range(CHUNKS):
            within = tl.where(
                images[CHUNKS - 1 - i] == top[:, :, None], (CHUNKS - 1 - i) * STEP + inner, within
            )
        place = tl.min(tl.min(within, axis=2) + first, axis=0, keep_dims=True)
        gone = (place - first)[:, :, None]
        rest = ()
        for chunk in tl.static_range(CHUNKS):
            rest = rest + (tl.where(gone == chunk * STEP + inner, EXCLUDED, images[chunk]),)
        images = rest
        best_key = tl.where(lane == k, top, best_key)
        best_place = tl.where(lane == k, place, best_place)
    expert = tl.minimum(expert_at(best_place, FORM), FORM[1] - 1)
    return best_key, payload_of(payload_ptr, expert, lane < K, SCORE[5])


@triton.jit
def choose_by_lists(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    exists,
    largest,
    denominator,
    lane,
    ready,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    TG: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP2: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(image, payload) [32, ROWS]: lane k holds the k-th best pair of its row; and which rows' lists ran out."""
    ROWS: tl.constexpr = SHAPE[1]
    loaded = early_loads(logit_row, bias_row, marked_ptr, marked, exists, CHUNKS, EARLY, SHAPE, FORM, SCORE)
    payloads = ()
    if EARLY:
        for chunk in tl.static_range(CHUNKS):
            payloads = payloads + (chunk_payloads(payload_ptr, chunk, SHAPE, FORM, SCORE),)
    keys = ()
    pays = ()
    for chunk in tl.static_range(CHUNKS):
        image = gated_images(
            loaded, logit_row, bias_row, marked_ptr, marked, chunk, exists, ready, largest, denominator,
            EARLY, SHAPE, FORM, SCORE,
        )  # fmt: skip
        if EARLY:
            new_pays = split4(payloads[chunk], ROWS)
        else:
            new_pays = split4(chunk_payloads(payload_ptr, chunk, SHAPE, FORM, SCORE), ROWS)
        new_keys, new_pays = sort4(split4(image, ROWS), new_pays)
        if chunk == 0:
            keys = new_keys
            pays = new_pays
        elif len(keys) == 4 and DEPTH >= 8:
            keys, pays = merge_halves(keys, pays, new_keys, new_pays)
        else:
            keys, pays = merge(keys, pays, new_keys, new_pays, DEPTH)
    COMPLETE: tl.constexpr = len(keys) >= CHUNKS * 4 or len(keys) >= K
    kept = lane >= 0
    if TG > 0:
        kept = kept_lanes(keys[0], keys[1], lane, FORM[2], TG, GROUP_LANES, TOP2, ROWS)
    if not SCORE[2]:
        kept &= ready
    if TG > 0 or not SCORE[2]:
        keys = replaced(keys, 0, tl.where(kept, keys[0], EXCLUDED))
    best_key, best_pay = take_best(keys, pays, lane, K, COMPLETE)
    failed = tl.max(tl.where(lane < K, best_pay, -1)) == EXHAUSTED
    return best_key, best_pay, kept, failed


@triton.jit
def choose_best(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    exists,
    largest,
    denominator,
    lane,
    ready,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    CODED: tl.constexpr,
    EARLY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    SORT_BOUND: tl.constexpr,
    SORT_BEST: tl.constexpr,
    TG: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP2: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(image, payload, expert) [32, ROWS]: lane k holds the k-th best of its row. DEPTH 0: by bound; else by lists."""
    if CODED:
        best_key, best_pay, expert = choose_by_codes(
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            payload_ptr,
            exists,
            largest,
            denominator,
            lane,
            ready,
            K,
            CHUNKS,
            EARLY,
            TG,
            GROUP_LANES,
            TOP2,
            SHAPE,
            FORM,
            SCORE,
        )
    elif DEPTH == 0:
        best_key, best_pay, kept, failed = choose_by_bound(
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            payload_ptr,
            exists,
            largest,
            denominator,
            lane,
            ready,
            K,
            CHUNKS,
            EARLY and CHUNKS <= 8,
            SEGMENTS,
            SLOTS,
            SORT_BOUND,
            SORT_BEST,
            TG,
            GROUP_LANES,
            TOP2,
            SHAPE,
            FORM,
            SCORE,
        )
    else:
        best_key, best_pay, kept, failed = choose_by_lists(
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            payload_ptr,
            exists,
            largest,
            denominator,
            lane,
            ready,
            K,
            CHUNKS,
            DEPTH,
            EARLY,
            TG,
            GROUP_LANES,
            TOP2,
            SHAPE,
            FORM,
            SCORE,
        )
    if not CODED and DEPTH < CHUNKS * 4 and DEPTH < K:
        if failed:
            best_key, best_pay = choose_again(
                logit_row,
                bias_row,
                marked_ptr,
                marked,
                payload_ptr,
                exists,
                largest,
                denominator,
                kept,
                lane,
                K,
                CHUNKS,
                SHAPE,
                FORM,
                SCORE,
            )
    if not CODED:
        expert = LAST_EXPERT - (best_pay >> ID_SHIFT)
    return best_key, best_pay, expert
