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
    """Two largest of eight floats a lane; NaN is left out, and -inf stands for a missing one."""
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
def deal_kept(values, lane, LAYOUT: tl.constexpr):
    """(four images a lane, expert of the first): the kept groups' experts, eight floats a lane, over all 32 lanes."""
    quads: tl.constexpr = LAYOUT.group_pad // 4
    size: tl.constexpr = LAYOUT.experts // LAYOUT.groups
    first, second = lane_top_two(values, LAYOUT.top2)
    word = kept_groups(group_images(first, second, lane, LAYOUT), lane, LAYOUT)
    seat = lane // quads
    quad = lane % quads
    group = (word >> (seat * group_bits(LAYOUT.group_lanes))) & (32 // LAYOUT.group_lanes - 1)
    source = group * LAYOUT.group_lanes + quad // 2
    odd = (lane & 1) != 0
    images = ()
    for i in tl.static_range(4):
        low = tl.gather(values[i], source, axis=0)
        high = tl.gather(values[4 + i], source, axis=0)
        image = key_image(tl.where(odd, high, low))
        if size < LAYOUT.group_pad:
            image = tl.where(quad * 4 + i < size, image, EXCLUDED)
        if LAYOUT.kept * LAYOUT.group_pad < 128:
            image = tl.where(seat < LAYOUT.kept, image, EXCLUDED)
        images = images + (image,)
    return images, group * size + quad * 4


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
def choose_by_codes(row, PLAN: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(image, payload, expert) [32, ROWS]: lane k holds the k-th best of its row."""
    lane = row.lane
    loaded = early_loads(row, PLAN.early, LAYOUT, SCORE)
    if LAYOUT.chunks == 1:
        images = split4(gated_images(row, loaded, 0, LAYOUT, SCORE), LAYOUT.rows)
        expert = tl.broadcast_to(expert_of(0, LAYOUT)[0], [32, LAYOUT.rows, 4])
        expert = split4(expert, LAYOUT.rows)[0]
    else:
        values = ()
        for chunk in tl.static_range(2):
            key = gated_keys(row, loaded, chunk, LAYOUT, SCORE)
            if LAYOUT.ragged:
                present = expert_of(chunk, LAYOUT)[1]
                key = tl.where(tl.broadcast_to(present, [32, LAYOUT.rows, 4]), key, float("nan"))
            values = values + split4(key, LAYOUT.rows)
        images, expert = deal_kept(values, lane, LAYOUT)
    code = 255 - expert
    keys, codes = sort4(images, (code, code - 1, code - 2, code - 3))
    keeps: tl.constexpr = LAYOUT.kept > 0 and LAYOUT.chunks == 1
    kept = lane >= 0
    if keeps:
        kept = kept_lanes(keys[0], keys[1], lane, LAYOUT)
    if not SCORE.any_bias:
        kept &= row.ready
    if keeps or not SCORE.any_bias:
        keys = replaced(keys, 0, tl.where(kept, keys[0], EXCLUDED))
    word = ((codes[0] * 256 + codes[1]) * 256 + codes[2]) * 256 + codes[3]
    best_key, best_word = take_coded(keys, word.to(tl.uint32, bitcast=True), lane, PLAN.top_k)
    best = 255 - (best_word >> 24).to(tl.int32)
    if LAYOUT.experts < 256:
        best = tl.minimum(best, LAYOUT.experts - 1)  # lanes beyond K, and rows that do not count
    return best_key, payload_of(row.payloads, best, lane < PLAN.top_k, SCORE), best
