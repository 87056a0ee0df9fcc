# ruff: noqa: RUF005
# mypy: ignore-errors
"""Choice by codes: rows of up to 256 experts of which at most 128 can win, four a lane.

A lane keeps four keys sorted and one word beside them: from the top byte down, 255 - expert of each. Among equal
keys the largest word is that of the lowest expert; no two lanes' words are equal; a shift by one byte pops the head.
Grouped rows of twice 128 places are dealt out anew once their groups are chosen, so that no lane idles.
"""

import triton
import triton.language as tl

from evenroute.routing.kernels.groups import group_bits, group_images, kept_groups, kept_lanes
from evenroute.routing.kernels.lists import EXCLUDED, by_lane, replaced, shifted, sort4
from evenroute.routing.kernels.rows import (
    early_loads,
    expert_of,
    gated_images,
    gated_keys,
    payload_of,
    split4,
)
from evenroute.routing.kernels.scores import key_image, larger


@triton.jit
def smaller_or_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lane_top_two(values, TOP2: tl.constexpr):
    """Two largest of eight floats a lane; a NaN is none, and -inf stands for none."""
    first = larger(values[0], values[1])
    second = smaller_or_nan(values[0], values[1])
    for i in tl.static_range(1, 4):
        other = larger(values[2 * i], values[2 * i + 1])
        if TOP2:
            another = smaller_or_nan(values[2 * i], values[2 * i + 1])
            second = larger(smaller_or_nan(first, other), larger(second, another))
        first = larger(first, other)
    return larger(first, float("-inf")), larger(second, float("-inf"))


@triton.jit
def deal_kept(
    values,
    lane,
    G: tl.constexpr,
    TG: tl.constexpr,
    E: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    LANES: tl.constexpr,
    TOP2: tl.constexpr,
):
    """(four images a lane, expert of the first): the kept groups' experts, eight floats a lane, over all 32 lanes."""
    QUADS: tl.constexpr = GROUP_PAD // 4
    BITS: tl.constexpr = group_bits(LANES)
    first, second = lane_top_two(values, TOP2)
    word = kept_groups(group_images(first, second, lane, G, LANES, TOP2), lane, G, TG, LANES)
    seat = lane // QUADS
    quad = lane % QUADS
    group = (word >> (seat * BITS)) & (32 // LANES - 1)
    source = group * LANES + quad // 2
    odd = (lane & 1) != 0
    images = ()
    for i in tl.static_range(4):
        low = tl.gather(values[i], source, axis=0)
        high = tl.gather(values[4 + i], source, axis=0)
        image = key_image(tl.where(odd, high, low))
        if E // G < GROUP_PAD:
            image = tl.where(quad * 4 + i < E // G, image, EXCLUDED)
        if TG * GROUP_PAD < 128:
            image = tl.where(seat < TG, image, EXCLUDED)
        images = images + (image,)
    return images, group * (E // G) + quad * 4


@triton.jit
def take_coded(keys, word, lane, K: tl.constexpr):
    """K rounds over the heads: lane k of the results holds the k-th best key and its word."""
    tops = ()
    heads = ()
    for k in tl.static_range(K):
        top = tl.max(keys[0], axis=0, keep_dims=True)
        head = tl.max(tl.where(keys[0] == top, word, 0), axis=0, keep_dims=True)
        tops = tops + (top,)
        heads = heads + (head,)
        if k + 1 < K:
            won = word == head
            keys = shifted(keys, won, K - 1 - k, EXCLUDED)
            word = tl.where(won, word << 8, word)
    return by_lane(tops, lane), by_lane(heads, lane)


@triton.jit
def choose_by_codes(
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
    TG: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP2: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(image, payload, expert) [32, ROWS]: lane k holds the k-th best of its row."""
    ROWS: tl.constexpr = SHAPE[1]
    E: tl.constexpr = FORM[1]
    loaded = early_loads(logit_row, bias_row, marked_ptr, marked, exists, CHUNKS, EARLY, SHAPE, FORM, SCORE)
    if CHUNKS == 1:
        image = gated_images(
            loaded, logit_row, bias_row, marked_ptr, marked, 0, exists, ready, largest, denominator,
            EARLY, SHAPE, FORM, SCORE,
        )  # fmt: skip
        images = split4(image, ROWS)
        expert = expert_of(0, FORM[0], E, FORM[2], FORM[3])[0]
        expert = split4(tl.broadcast_to(expert, SHAPE), ROWS)[0]
    else:
        values = ()
        for chunk in tl.static_range(2):
            key = gated_keys(
                loaded, logit_row, bias_row, marked_ptr, marked, chunk, exists, ready, largest,
                denominator, EARLY, SHAPE, FORM, SCORE,
            )  # fmt: skip
            if FORM[4]:
                present = expert_of(chunk, FORM[0], E, FORM[2], FORM[3])[1]
                key = tl.where(tl.broadcast_to(present, SHAPE), key, float("nan"))
            values = values + split4(key, ROWS)
        images, expert = deal_kept(values, lane, FORM[2], TG, E, FORM[3], GROUP_LANES, TOP2)
    code = 255 - expert
    keys, codes = sort4(images, (code, code - 1, code - 2, code - 3))
    kept = lane >= 0
    if TG > 0 and CHUNKS == 1:
        kept = kept_lanes(keys[0], keys[1], lane, FORM[2], TG, GROUP_LANES, TOP2, ROWS)
    if not SCORE[2]:
        kept &= ready
    if (TG > 0 and CHUNKS == 1) or not SCORE[2]:
        keys = replaced(keys, 0, tl.where(kept, keys[0], EXCLUDED))
    word = ((codes[0] * 256 + codes[1]) * 256 + codes[2]) * 256 + codes[3]
    best_key, best_word = take_coded(keys, word.to(tl.uint32, bitcast=True), lane, K)
    best = 255 - (best_word >> 24).to(tl.int32)
    if E < 256:
        best = tl.minimum(best, E - 1)  # lanes beyond K, and rows that do not count
    return best_key, payload_of(payload_ptr, best, lane < K, SCORE[5]), best
