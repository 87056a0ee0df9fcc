# ruff: noqa: RUF005, SIM102
# mypy: ignore-errors
"""Choice by bound, for wide rows: a value that K keys reach, then the few keys above it.

The pieces come first: sorted segment maxima, bit masks, and the n-th candidate of a row.
"""

import triton
import triton.language as tl

from evenroute.routing.kernels.groups import kept_lanes, top_two
from evenroute.routing.kernels.lists import (
    EXCLUDED,
    EXHAUSTED,
    exchange,
    pair_less,
    replaced,
    take_best,
    take_best_looped,
)
from evenroute.routing.kernels.rows import bias_at, early_loads, expert_at, gated_images, payload_of
from evenroute.routing.kernels.scores import INTERPRETED, NAN_KEY, base_key, clean_logit, key_image


@triton.jit
def exchange_values(values, A: tl.constexpr, B: tl.constexpr):
    """Order entries A < B of a tuple of int32 tensors, the larger first."""
    high = tl.maximum(values[A], values[B])
    low = tl.minimum(values[A], values[B])
    return replaced(replaced(values, A, high), B, low)


@triton.jit
def part_maximum(images, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Largest image of each lane in chunks [FIRST, LAST)."""
    part = images[FIRST]
    for chunk in tl.static_range(FIRST + 1, LAST):
        part = tl.maximum(part, images[chunk])
    return tl.max(part, axis=2)


@triton.jit
def sort_step(values, SIZE: tl.constexpr, DISTANCE: tl.constexpr):
    """One step of Batcher's odd-even merge sort on blocks of SIZE: the first pairs halves, later ones inner entries."""
    for a in tl.static_range(len(values)):
        if (a % SIZE) + DISTANCE < SIZE:
            if DISTANCE * 2 == SIZE:
                values = exchange_values(values, a, a + DISTANCE)
            elif (a % SIZE) >= DISTANCE:
                if ((a % SIZE) - DISTANCE) // DISTANCE % 2 == 0:
                    values = exchange_values(values, a, a + DISTANCE)
    return values


@triton.jit
def segment_maxima(images, kept, CHUNKS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Largest images of each lane's SEGMENTS parts, sorted; EXCLUDED in lanes that are not kept."""
    maxima = ()
    for segment in tl.static_range(SEGMENTS):
        part = part_maximum(images, segment * CHUNKS // SEGMENTS, (segment + 1) * CHUNKS // SEGMENTS)
        maxima = maxima + (tl.where(kept, part, EXCLUDED),)
    return sorted_maxima(maxima, SEGMENTS)


@triton.jit
def sorted_maxima(maxima, SEGMENTS: tl.constexpr):
    """A tuple of 2, 4 or 8 tensors, the largest first."""
    maxima = sort_step(maxima, 2, 1)
    if SEGMENTS >= 4:
        maxima = sort_step(sort_step(maxima, 4, 2), 4, 1)
    if SEGMENTS >= 8:
        maxima = sort_step(sort_step(sort_step(maxima, 8, 4), 8, 2), 8, 1)
    return maxima


@triton.jit
def drop_best(maxima, bound):
    """The lists without their heads where those equal the bound."""
    won = maxima[0] == bound
    rest = ()
    for i in tl.static_range(len(maxima)):
        if i + 1 < len(maxima):
            rest = rest + (tl.where(won, maxima[i + 1], maxima[i]),)
        else:
            rest = rest + (tl.where(won, EXCLUDED, maxima[i]),)
    return rest


@triton.jit
def reached_bound(maxima, K: tl.constexpr):
    """[1, ROWS]: a value that at least K of the row's maxima reach. Many rounds stay a loop: compile time."""
    bound = tl.max(maxima[0], axis=0, keep_dims=True)
    if K <= 16:
        for _ in tl.static_range(K - 1):
            maxima = drop_best(maxima, bound)
            bound = tl.max(maxima[0], axis=0, keep_dims=True)
    else:
        for _ in range(K - 1):
            maxima = drop_best(maxima, bound)
            bound = tl.max(maxima[0], axis=0, keep_dims=True)
    return bound


@triton.jit
def sorted_bound(maxima, lane):
    """The same for two maxima a lane and K = 16, by sorting both over the lanes."""
    high = maxima[0]
    low = maxima[1]
    for size in tl.static_range(1, 6):
        for step in tl.static_range(size):
            place = size - 1 - step
            take_larger = ((lane >> place) & 1) == ((lane >> size) & 1)
            other = tl.gather(high, lane ^ (1 << place), axis=0)
            high = tl.where(take_larger, tl.maximum(high, other), tl.minimum(high, other))
            # The second maxima rise, so that the larger ones of both are the 32 largest, in bitonic order.
            other = tl.gather(low, lane ^ (1 << place), axis=0)
            low = tl.where(take_larger, tl.minimum(low, other), tl.maximum(low, other))
    best = tl.maximum(high, low)
    best = tl.maximum(best, tl.gather(best, lane ^ 16, axis=0))
    return tl.min(best, axis=0, keep_dims=True)


@triton.jit
def sort_lanes(key, pay, lane):
    """Pairs over the 32 lanes of a row by key, then payload, the largest in lane 0: a bitonic sort, 15 exchanges."""
    for size in tl.static_range(1, 6):
        for step in tl.static_range(size):
            other_key = tl.gather(key, lane ^ (1 << (size - 1 - step)), axis=0)
            other_pay = tl.gather(pay, lane ^ (1 << (size - 1 - step)), axis=0)
            # Lower ends of exchanges take the larger pair, in every other block of 2**size the smaller.
            take_larger = (((lane >> (size - 1 - step)) & 1) == 0) == (((lane >> size) & 1) == 0)
            swap = pair_less(key, pay, other_key, other_pay) == take_larger
            key = tl.where(swap, other_key, key)
            pay = tl.where(swap, other_pay, pay)
    return key, pay


@triton.jit
def count_bits(x):
    """Set bits of int32; the interpreter's twin adds them up in halves."""
    if INTERPRETED:
        x = x.to(tl.uint32, bitcast=True)
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def lane_of(upto, number):
    """Lane that holds candidate `number`; upto: running sum of the lanes' candidates."""
    source = number * 0
    for step in tl.static_range(5):
        reach = tl.gather(upto, source + ((16 >> step) - 1), axis=0)
        source = tl.where(reach <= number, source + (16 >> step), source)
    return source


@triton.jit
def nth_bit(word, skip):
    """Place of the lowest set bit of int32 or int64 after `skip` lower ones."""
    for _ in tl.static_range(2):  # usually enough
        word = tl.where(skip > 0, word & (word - 1), word)
        skip -= 1
    while tl.max(skip) > 0:
        word = tl.where(skip > 0, word & (word - 1), word)
        skip -= 1
    lowest = word & -word
    if lowest.dtype == tl.int64:
        lowest = lowest.to(tl.uint64, bitcast=True).to(tl.float32)
    else:
        lowest = lowest.to(tl.uint32, bitcast=True).to(tl.float32)
    return (lowest.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def nth_candidate(bits, amount, upto, number, taken):
    """(lane that holds it, its bit there) of the candidates `number` [32, ROWS], counted over lanes and bits.

    bits: the lanes' masks; amount: their set bits; upto: running sum of those over the lanes.
    """
    source = lane_of(upto, number)
    word = tl.gather(bits, source, axis=0)
    skip = tl.where(taken, number - tl.gather(upto - amount, source, axis=0), 0)
    return source, nth_bit(word, skip)


@triton.jit
def candidate_bits(images, bound, LAYOUT: tl.constexpr):
    """[32, ROWS] int32: which of a lane's keys reach the bound, a bit a place (at most 8 chunks)."""
    ROWS: tl.constexpr = LAYOUT.rows
    inner = tl.arange(0, 4)[None, None, :]
    bits = tl.zeros([32, ROWS], tl.int32)
    for chunk in tl.static_range(tl.constexpr(LAYOUT.chunks)):
        reached = images[chunk] >= bound[:, :, None]
        bits += tl.sum(tl.where(reached, 1 << (inner + 4 * chunk), 0), axis=2)
    return bits


@triton.jit
def candidate_at(row, source, place, taken, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(key image, payload) of the candidate at a lane's place, scored anew."""
    if LAYOUT.group_pad == 0:
        place = (place >> 2) * 128 + source * 4 + (place & 3)
    else:
        place = source * LAYOUT.per_lane + place
    expert = tl.where(taken, expert_at(place, LAYOUT), 0)
    x = clean_logit(
        tl.load(tl.max_contiguous(row.logits + expert, [2, 1]), mask=taken & row.exists, other=float("-inf")),
        SCORE,
    )
    key = base_key(x, row.largest, row.denominator, SCORE)
    if SCORE.any_bias:
        key += bias_at(row.bias, row.marked_bias, row.marked, expert, taken, SCORE)
    return tl.where(taken, key_image(key), EXCLUDED), payload_of(row.payloads, expert, taken, SCORE)


@triton.jit
def best_candidates(keys, pays, lane, PLAN: tl.constexpr):
    """Lane k holds the k-th best of one or two candidates a lane."""
    if PLAN.slots == 2:
        keys, pays = exchange(keys, pays, 0, 1)
    if PLAN.sort_best:
        best_key, best_pay = sort_lanes(keys[0], pays[0], lane)
    elif PLAN.top_k <= 16:
        best_key, best_pay = take_best(keys, pays, lane, PLAN.top_k, True)
    else:
        best_key, best_pay = take_best_looped(keys, pays, lane, PLAN.top_k)
    return best_key, best_pay


@triton.jit
def choose_by_bound(row, PLAN: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """The same as `choose_by_lists` for wide rows: a bound that K keys reach, then the few above it, SLOTS a lane.

    The K-th largest of 32 * SEGMENTS maxima bounds the K-th key from below. The keys that reach it (18 of 896 for
    K = 16 as a rule) are dealt out by a prefix sum over the lanes' bit masks; more than 32 * SLOTS of them: failed.
    """
    lane = row.lane
    loaded = early_loads(row, PLAN.early, LAYOUT, SCORE)
    images = ()
    first = tl.full([32, LAYOUT.rows, 4], EXCLUDED, tl.int32)
    second = tl.full([32, LAYOUT.rows, 4], EXCLUDED, tl.int32)
    for chunk in tl.static_range(tl.constexpr(LAYOUT.chunks)):
        image = gated_images(row, loaded, chunk, LAYOUT, SCORE)
        images = images + (image,)
        if LAYOUT.kept > 0:
            second = tl.maximum(second, tl.minimum(first, image))
            first = tl.maximum(first, image)
    kept = lane >= 0
    if LAYOUT.kept > 0:
        first, second = tl.reduce((first, second), 2, top_two)
        kept = kept_lanes(first, second, lane, LAYOUT)
    maxima = segment_maxima(images, kept, LAYOUT.chunks, PLAN.segments)
    if PLAN.sort_bound:
        bound = sorted_bound(maxima, lane)
    else:
        bound = reached_bound(maxima, PLAN.top_k)
    bound = tl.where(kept, tl.maximum(bound, NAN_KEY), EXHAUSTED)
    bits = candidate_bits(images, bound, LAYOUT)
    amount = count_bits(bits)
    upto = tl.cumsum(amount, axis=0)
    total = tl.max(upto, axis=0, keep_dims=True)
    keys = ()
    pays = ()
    for slot in tl.static_range(tl.constexpr(PLAN.slots)):
        taken = lane + 32 * slot < total
        source, place = nth_candidate(bits, amount, upto, lane + 32 * slot, taken)
        key, pay = candidate_at(row, source, place, taken, LAYOUT, SCORE)
        keys = keys + (key,)
        pays = pays + (pay,)
    best_key, best_pay = best_candidates(keys, pays, lane, PLAN)
    return best_key, best_pay, kept, tl.max(total) > 32 * PLAN.slots
