# ruff: noqa: SIM102
# mypy: ignore-errors
"""From logits to the K best pairs of each row: loads, keys, groups, lists, and the exact fallback."""

import triton
import triton.language as tl

from evenroute.routing._lists import EXCLUDED, EXHAUSTED, merge, replaced, sort4, take_best
from evenroute.routing._scores import (
    NAN_KEY,
    base_key,
    choice_image,
    clean_logit,
    exp_close,
    inverse_image,
    order_image,
)

ID_SHIFT = tl.constexpr(20)  # payload: (2047 - expert) << 20 | what the dispatch tables say of it
LAST_EXPERT = tl.constexpr(2047)


@triton.jit
def expert_of(chunk, PER_LANE: tl.constexpr, E: tl.constexpr, G: tl.constexpr, GROUP_PAD: tl.constexpr):
    """Expert and presence at [32, 1, 4] of a chunk. Ungrouped: lanes interleave; grouped: a lane stays in a group."""
    lane = tl.arange(0, 32)[:, None, None]
    inner = tl.arange(0, 4)[None, None, :]
    if GROUP_PAD == 0:
        expert = chunk * 128 + lane * 4 + inner
        present = expert < E
    else:
        place = lane * PER_LANE + chunk * 4 + inner
        if GROUP_PAD * G == E:
            expert = place
            present = expert < E
        else:
            within = place % GROUP_PAD
            group = place // GROUP_PAD
            expert = group * (E // G) + within
            present = (within < E // G) & (group < G)
    return expert, present


@triton.jit
def load_chunk(logit_row, chunk, exists, SHAPE: tl.constexpr, FORM: tl.constexpr):
    """Clean logits [32, ROWS, 4] of a chunk; absent experts are -inf."""
    expert, present = expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])
    mask = tl.broadcast_to(exists[:, :, None], SHAPE)
    if FORM[4]:
        mask = mask & present
    pointer = logit_row[:, :, None] + expert
    return clean_logit(tl.load(pointer, mask=mask, other=float("-inf")), FORM[5])


@triton.jit
def softmax_parts(logit_row, exists, CHUNKS: tl.constexpr, SHAPE: tl.constexpr, FORM: tl.constexpr):
    """Largest logit and sum of exps of each row, [1, ROWS]; NaN is left out."""
    part = load_chunk(logit_row, 0, exists, SHAPE, FORM)
    largest = tl.where(part != part, float("-inf"), part)
    for chunk in tl.static_range(1, CHUNKS):
        part = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
        largest = tl.maximum(largest, tl.where(part != part, float("-inf"), part))
    top = tl.max(tl.max(order_image(largest), axis=2), axis=0, keep_dims=True)
    top = inverse_image(top)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros(SHAPE, tl.float32)
    for chunk in tl.static_range(CHUNKS):
        part = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
        total += tl.where(part != part, 0.0, exp_close(part - top[:, :, None]))
    total = tl.sum(tl.sum(total, axis=2), axis=0, keep_dims=True)
    return top, tl.where(total > 0, total, 1.0)


@triton.jit
def row_bias(bias_row, marked_ptr, marked, expert, mask, HAS_MARKED: tl.constexpr, HAS_PLAIN: tl.constexpr):
    """fp32 bias at `expert`, from the plain or the marked one."""
    if HAS_PLAIN:
        bias = tl.load(bias_row + expert, mask=mask, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(mask.shape, tl.float32)
    if HAS_MARKED:
        other = tl.load(marked_ptr + expert, mask=mask & marked, other=0.0).to(tl.float32)
        bias = tl.where(marked, other, bias)
    return bias


@triton.jit
def chunk_pairs(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    chunk,
    exists,
    largest,
    denominator,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(image, payload) [32, ROWS, 4] of one chunk; absent experts are (EXCLUDED, -1)."""
    expert, present = expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])
    mask = tl.broadcast_to(present, SHAPE)
    x = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
    wide = tl.broadcast_to(expert, SHAPE)
    bias = x
    if SCORE[2]:
        bias = row_bias(bias_row[:, :, None], marked_ptr, marked[:, :, None], wide, mask, SCORE[3], SCORE[4])
    base = base_key(x, largest[:, :, None], denominator[:, :, None], SCORE[0], SCORE[1])
    image = choice_image(x, base, bias, SCORE[2])
    if SCORE[5]:
        payload = tl.load(payload_ptr + wide, mask=mask, other=-1)
    else:
        payload = (LAST_EXPERT - wide) << ID_SHIFT
    if FORM[4]:
        image = tl.where(mask, image, EXCLUDED)
        payload = tl.where(mask, payload, -1)
    return image, payload


@triton.jit
def split4(x, ROWS: tl.constexpr):
    """[32, ROWS, 4] -> four [32, ROWS], in order."""
    even, odd = tl.split(tl.reshape(x, [32, ROWS, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _top_two(a_first, a_second, b_first, b_second):
    return tl.maximum(a_first, b_first), tl.maximum(
        tl.minimum(a_first, b_first), tl.maximum(a_second, b_second)
    )


@triton.jit
def kept_lanes(
    first,
    second,
    lane,
    G: tl.constexpr,
    TG: tl.constexpr,
    LANES: tl.constexpr,
    TOP2: tl.constexpr,
    ROWS: tl.constexpr,
):
    """[32, ROWS] bool: lanes of the TG best groups, from the lanes' two largest images. LANES lanes make a group."""
    first = tl.where(first <= NAN_KEY, float("-inf"), inverse_image(first))
    second = tl.where(second <= NAN_KEY, float("-inf"), inverse_image(second))
    if LANES > 1:
        shape: tl.constexpr = [32 // LANES, LANES, ROWS]
        first = tl.reshape(first, shape)
        if TOP2:
            first, second = tl.reduce((first, tl.reshape(second, shape)), 1, _top_two)
            score = first + second
        else:
            score = tl.max(first, axis=1)
        score = tl.reshape(tl.broadcast_to(tl.expand_dims(score, 1), shape), [32, ROWS])
    elif TOP2:
        score = first + second
    else:
        score = first
    group = lane // LANES
    image = tl.where(group < G, order_image(score), EXCLUDED)
    kept = lane < 0
    for _ in tl.static_range(TG):
        top = tl.max(image, axis=0, keep_dims=True)
        lowest = tl.max(tl.where(image == top, 31 - group, -1), axis=0, keep_dims=True)
        won = (31 - group) == lowest
        kept = kept | won
        image = tl.where(won, EXCLUDED, image)
    return kept


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
    """K rounds over whole rows, each for the largest pair below the last one: exact for every input, slow."""
    best_key = tl.full(lane.shape, EXCLUDED, tl.int32)
    best_pay = tl.full(lane.shape, -1, tl.int32)
    last_key = tl.full([1, SHAPE[1]], EXHAUSTED, tl.int32)
    last_pay = tl.full([1, SHAPE[1]], EXHAUSTED, tl.int32)
    for k in range(K):
        lane_key = tl.full([32, SHAPE[1]], EXCLUDED, tl.int32)
        lane_pay = tl.full([32, SHAPE[1]], -1, tl.int32)
        for chunk in range(CHUNKS):
            image, payload = chunk_pairs(
                logit_row,
                bias_row,
                marked_ptr,
                marked,
                payload_ptr,
                chunk,
                exists,
                largest,
                denominator,
                SHAPE,
                FORM,
                SCORE,
            )
            last = last_key[:, :, None]
            below = (image < last) | ((image == last) & (payload < last_pay[:, :, None]))
            image = tl.where(below & kept[:, :, None], image, EXCLUDED)
            top = tl.max(image, axis=2)
            pay = tl.max(tl.where(image == top[:, :, None], payload, -1), axis=2)
            better = (top > lane_key) | ((top == lane_key) & (pay > lane_pay))
            lane_key = tl.where(better, top, lane_key)
            lane_pay = tl.where(better, pay, lane_pay)
        last_key = tl.max(lane_key, axis=0, keep_dims=True)
        last_pay = tl.max(tl.where(lane_key == last_key, lane_pay, -1), axis=0, keep_dims=True)
        best_key = tl.where(lane == k, last_key, best_key)
        best_pay = tl.where(lane == k, last_pay, best_pay)
    return best_key, best_pay


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
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    TG: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP2: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(image, payload) [32, ROWS]: lane k holds the k-th best pair of its row."""
    ROWS: tl.constexpr = SHAPE[1]
    image, payload = chunk_pairs(
        logit_row,
        bias_row,
        marked_ptr,
        marked,
        payload_ptr,
        0,
        exists,
        largest,
        denominator,
        SHAPE,
        FORM,
        SCORE,
    )
    keys, pays = sort4(split4(image, ROWS), split4(payload, ROWS))
    for chunk in tl.static_range(1, CHUNKS):
        image, payload = chunk_pairs(
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            payload_ptr,
            chunk,
            exists,
            largest,
            denominator,
            SHAPE,
            FORM,
            SCORE,
        )
        new_keys, new_pays = sort4(split4(image, ROWS), split4(payload, ROWS))
        keys, pays = merge(keys, pays, new_keys, new_pays, DEPTH)
    COMPLETE: tl.constexpr = len(keys) >= CHUNKS * 4 or len(keys) >= K
    kept = lane >= 0
    if TG > 0:
        kept = kept_lanes(keys[0], keys[1], lane, FORM[2], TG, GROUP_LANES, TOP2, ROWS)
        keys = replaced(keys, 0, tl.where(kept, keys[0], EXCLUDED))
    best_key, best_pay = take_best(keys, pays, lane, K, COMPLETE)
    if not COMPLETE:
        if tl.max(tl.where(lane < K, best_key, EXCLUDED)) == EXHAUSTED:
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
    return best_key, best_pay
