# ruff: noqa: RUF005
# mypy: ignore-errors
"""Choice by bound, for wide rows: a value that K keys reach, then the few keys above it."""

import triton
import triton.language as tl

from evenroute.routing.kernels.candidates import (
    count_bits,
    nth_candidate,
    reached_bound,
    segment_maxima,
    sort_lanes,
    sorted_bound,
)
from evenroute.routing.kernels.groups import kept_lanes, top_two
from evenroute.routing.kernels.lists import EXCLUDED, EXHAUSTED, exchange, take_best, take_best_looped
from evenroute.routing.kernels.rows import early_loads, expert_at, gated_images, payload_of, row_bias
from evenroute.routing.kernels.scores import NAN_KEY, base_key, clean_logit, key_image


@triton.jit
def choose_by_bound(
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
    """The same for wide rows: a bound that K keys reach, then the few above it, SLOTS a lane.

    The K-th largest of 32 * SEGMENTS maxima bounds the K-th key from below. The keys that reach it (18 of 896 for
    K = 16 as a rule) are dealt out by a prefix sum over the lanes' bit masks; more than 32 * SLOTS of them: failed.
    """
    ROWS: tl.constexpr = SHAPE[1]
    loaded = early_loads(logit_row, bias_row, marked_ptr, marked, exists, CHUNKS, EARLY, SHAPE, FORM, SCORE)
    images = ()
    first = tl.full(SHAPE, EXCLUDED, tl.int32)
    second = tl.full(SHAPE, EXCLUDED, tl.int32)
    for chunk in tl.static_range(CHUNKS):
        image = gated_images(
            loaded,
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            chunk,
            exists,
            ready,
            largest,
            denominator,
            EARLY,
            SHAPE,
            FORM,
            SCORE,
        )
        images = images + (image,)
        if TG > 0:
            second = tl.maximum(second, tl.minimum(first, image))
            first = tl.maximum(first, image)
    kept = lane >= 0
    if TG > 0:
        first, second = tl.reduce((first, second), 2, top_two)
        kept = kept_lanes(first, second, lane, FORM[2], TG, GROUP_LANES, TOP2, ROWS)
    maxima = segment_maxima(images, kept, CHUNKS, SEGMENTS)
    if SORT_BOUND:
        bound = sorted_bound(maxima, lane)
    else:
        bound = reached_bound(maxima, K)
    bound = tl.where(kept, tl.maximum(bound, NAN_KEY), EXHAUSTED)
    inner = tl.arange(0, 4)[None, None, :]
    low = tl.zeros([32, ROWS], tl.int32)
    high = tl.zeros([32, ROWS], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        reached = images[chunk] >= bound[:, :, None]
        part = tl.sum(tl.where(reached, 1 << (inner + 4 * (chunk % 8)), 0), axis=2)
        if chunk < 8:
            low += part
        else:
            high += part
    if CHUNKS > 8:
        bits = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
        amount = count_bits(low) + count_bits(high)
    else:
        bits = low
        amount = count_bits(low)
    upto = tl.cumsum(amount, axis=0)
    total = tl.max(upto, axis=0, keep_dims=True)
    keys = ()
    pays = ()
    for slot in tl.static_range(SLOTS):
        taken = lane + 32 * slot < total
        source, place = nth_candidate(bits, amount, upto, lane + 32 * slot, taken)
        if FORM[3] == 0:
            place = (place >> 2) * 128 + source * 4 + (place & 3)
        else:
            place = source * FORM[0] + place
        expert = tl.where(taken, expert_at(place, FORM), 0)
        x = clean_logit(
            tl.load(logit_row + expert, mask=taken & exists, other=float("-inf")), FORM[6], FORM[5]
        )
        key = base_key(x, largest, denominator, SCORE[0], SCORE[1])
        if SCORE[2]:
            key += row_bias(bias_row, marked_ptr, marked, expert, taken, SCORE[3], SCORE[4])
        keys = keys + (tl.where(taken, key_image(key), EXCLUDED),)
        pays = pays + (payload_of(payload_ptr, expert, taken, SCORE[5]),)
    if SLOTS == 2:
        keys, pays = exchange(keys, pays, 0, 1)
    if SORT_BEST:
        best_key, best_pay = sort_lanes(keys[0], pays[0], lane)
    elif K <= 16:
        best_key, best_pay = take_best(keys, pays, lane, K, True)
    else:
        best_key, best_pay = take_best_looped(keys, pays, lane, K)
    return best_key, best_pay, kept, tl.max(total) > 32 * SLOTS
