# ruff: noqa: RUF005
# mypy: ignore-errors
"""Choice for rows of more than 1,024 places: by bound, as in `bound.py`, but in loops over chunks.

A row does not fit in registers, so it is read twice, and again for each column where candidates are too many. Nothing
is unrolled over chunks: the compiler's time grows with the square of the operations (16 chunks took it 34 s, now 2).
"""

import triton
import triton.language as tl

from evenroute.routing.kernels.bound import (
    best_candidates,
    candidate_at,
    count_bits,
    lane_of,
    nth_bit,
    reached_bound,
    sorted_maxima,
)
from evenroute.routing.kernels.groups import kept_lanes, top_two
from evenroute.routing.kernels.lists import EXCLUDED, EXHAUSTED
from evenroute.routing.kernels.rows import chunk_images, expert_at, payload_of
from evenroute.routing.kernels.scores import NAN_KEY

FARTHEST = tl.constexpr(1 << 20)


@triton.jit
def row_maxima(row, PLAN: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(largest images of each lane's segments, the lane's two largest): chunk c belongs to segment c * S // chunks."""
    SEGMENTS: tl.constexpr = PLAN.segments
    ROWS: tl.constexpr = LAYOUT.rows
    first = tl.full([32, ROWS, 4], EXCLUDED, tl.int32)
    second = tl.full([32, ROWS, 4], EXCLUDED, tl.int32)
    maxima = ()
    for _ in tl.static_range(SEGMENTS):
        maxima = maxima + (tl.full([32, ROWS], EXCLUDED, tl.int32),)
    for chunk in range(LAYOUT.chunks):
        image = chunk_images(row, chunk, LAYOUT, SCORE)
        if LAYOUT.kept > 0:
            second = tl.maximum(second, tl.minimum(first, image))
            first = tl.maximum(first, image)
        largest = tl.max(image, axis=2)
        here = chunk * SEGMENTS // LAYOUT.chunks
        larger = ()
        for segment in tl.static_range(SEGMENTS):
            reach = tl.where(here == segment, largest, EXCLUDED)
            larger = larger + (tl.maximum(maxima[segment], reach),)
        maxima = larger
    if LAYOUT.kept > 0:
        first, second = tl.reduce((first, second), 2, top_two)
    return maxima, first, second


@triton.jit
def candidate_words(row, bound, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(low, high) [32, ROWS] int64: which of a lane's keys reach the bound, a bit a place, 16 chunks a word."""
    ROWS: tl.constexpr = LAYOUT.rows
    inner = tl.arange(0, 4)[None, None, :]
    low = tl.zeros([32, ROWS], tl.int64)
    high = tl.zeros([32, ROWS], tl.int64)
    for chunk in range(LAYOUT.chunks):
        reached = chunk_images(row, chunk, LAYOUT, SCORE) >= bound[:, :, None]
        place = (inner + 4 * (chunk % 16)).to(tl.int64)
        part = tl.sum(reached.to(tl.int64) << place, axis=2)
        if LAYOUT.chunks <= 16:
            low += part
        else:
            low += tl.where(chunk < 16, part, 0)
            high += tl.where(chunk < 16, 0, part)
    return low, high


@triton.jit
def count_word(word):
    """Set bits of int64."""
    return count_bits((word >> 32).to(tl.int32)) + count_bits(word.to(tl.int32))


@triton.jit
def nth_of_words(low, high, upto, number, taken):
    """(lane that holds it, its place there) of the candidates `number` [32, ROWS]."""
    in_low = count_word(low)
    source = lane_of(upto, number)
    before = upto - in_low - count_word(high)
    skip = tl.where(taken, number - tl.gather(before, source, axis=0), 0)
    below = tl.gather(in_low, source, axis=0)
    above = skip >= below
    word = tl.where(above, tl.gather(high, source, axis=0), tl.gather(low, source, axis=0))
    place = nth_bit(word, tl.where(above, skip - below, skip))
    return source, tl.where(above, place + 64, place)


@triton.jit
def choose_in_order(row, kept, PLAN: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """K rounds over whole rows, each for the largest key behind the last: exact for every input, and slow."""
    lane = row.lane
    ROWS: tl.constexpr = LAYOUT.rows
    STEP: tl.constexpr = 128 if LAYOUT.group_pad == 0 else 4
    begin = lane * (4 if LAYOUT.group_pad == 0 else LAYOUT.per_lane)
    inner = begin[:, :, None] + tl.arange(0, 4)[None, None, :]
    top = tl.full([1, ROWS], EXHAUSTED, tl.int32)
    last = tl.full([1, ROWS], -1, tl.int32)
    best_key = tl.full([32, ROWS], EXCLUDED, tl.int32)
    best_place = tl.full([32, ROWS], 0, tl.int32)
    for k in range(PLAN.top_k):
        most = tl.full([32, ROWS, 4], EXCLUDED, tl.int32)
        where = tl.full([32, ROWS, 4], FARTHEST, tl.int32)
        for chunk in range(LAYOUT.chunks):
            image = chunk_images(row, chunk, LAYOUT, SCORE)
            place = inner + chunk * STEP
            behind = (image < top[:, :, None]) | ((image == top[:, :, None]) & (place > last[:, :, None]))
            # Places rise with chunks: of equal keys the first one stays.
            better = behind & kept[:, :, None] & (image > most)
            most = tl.where(better, image, most)
            where = tl.where(better, place, where)
        top = tl.max(tl.max(most, axis=2), axis=0, keep_dims=True)
        nearest = tl.where(most == top[:, :, None], where, FARTHEST)
        last = tl.min(tl.min(nearest, axis=2), axis=0, keep_dims=True)
        best_key = tl.where(lane == k, top, best_key)
        best_place = tl.where(lane == k, last, best_place)
    expert = tl.minimum(expert_at(best_place, LAYOUT), LAYOUT.experts - 1)
    return best_key, payload_of(row.payloads, expert, lane < PLAN.top_k, SCORE)


@triton.jit
def choose_wide(row, PLAN: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(image, payload) [32, ROWS]: lane k holds the k-th best pair of its row."""
    lane = row.lane
    maxima, first, second = row_maxima(row, PLAN, LAYOUT, SCORE)
    kept = lane >= 0
    if LAYOUT.kept > 0:
        kept = kept_lanes(first, second, lane, LAYOUT)
    in_kept = ()
    for segment in tl.static_range(tl.constexpr(PLAN.segments)):
        in_kept = in_kept + (tl.where(kept, maxima[segment], EXCLUDED),)
    bound = reached_bound(sorted_maxima(in_kept, PLAN.segments), PLAN.top_k)
    bound = tl.where(kept, tl.maximum(bound, NAN_KEY), EXHAUSTED)
    low, high = candidate_words(row, bound, LAYOUT, SCORE)
    upto = tl.cumsum(count_word(low) + count_word(high), axis=0)
    total = tl.max(upto, axis=0, keep_dims=True)
    keys = ()
    pays = ()
    for slot in tl.static_range(tl.constexpr(PLAN.slots)):
        taken = lane + 32 * slot < total
        source, place = nth_of_words(low, high, upto, lane + 32 * slot, taken)
        key, pay = candidate_at(row, source, place, taken, LAYOUT, SCORE)
        keys = keys + (key,)
        pays = pays + (pay,)
    best_key, best_pay = best_candidates(keys, pays, lane, PLAN)
    if tl.max(total) > 32 * PLAN.slots:
        best_key, best_pay = choose_in_order(row, kept, PLAN, LAYOUT, SCORE)
    return best_key, best_pay
