# mypy: ignore-errors
"""Which expert groups a row keeps, over the lanes of its warp."""

import triton
import triton.language as tl

from evenroute.routing.kernels.lists import EXCLUDED
from evenroute.routing.kernels.scores import NAN_KEY, inverse_key, key_image


@triton.jit
def top_two(a_first, a_second, b_first, b_second):
    return tl.maximum(a_first, b_first), tl.maximum(
        tl.minimum(a_first, b_first), tl.maximum(a_second, b_second)
    )


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def group_images(first, second, lane, LAYOUT: tl.constexpr):
    """[32, ROWS] int32: image of the own group's score, from the lanes' two largest fp32 keys (-inf for none)."""
    # Butterflies over the lanes of a group: every lane ends with its group's two largest.
    for step in tl.static_range(5):
        if (1 << step) < LAYOUT.group_lanes:
            other = tl.gather(first, lane ^ (1 << step), axis=0)
            if LAYOUT.top2:
                another = tl.gather(second, lane ^ (1 << step), axis=0)
                second = tl.maximum(tl.minimum(first, other), tl.maximum(second, another))
            first = tl.maximum(first, other)
    score = first
    if LAYOUT.top2:
        score = first + second
    image = key_image(score)
    used: tl.constexpr = LAYOUT.groups * LAYOUT.group_lanes
    if used < 32:
        image = tl.where(lane < used, image, EXCLUDED)
    return image


@triton.jit
def group_ranks(image, lane, LANES: tl.constexpr):
    """[32, ROWS] int32: how many groups are larger than the own one, or equal and earlier. LANES >= 2.

    Lane j of a group compares it with groups j, j + LANES, ...; absent groups never count, and have no rank.
    """
    GROUPS: tl.constexpr = 32 // LANES
    WIDTH: tl.constexpr = LANES if LANES < GROUPS else GROUPS
    group = lane // LANES
    rank = tl.zeros(lane.shape, tl.int32)
    for step in tl.static_range(GROUPS // WIDTH):
        other = (lane & (WIDTH - 1)) + step * WIDTH
        rival = tl.gather(image, other * LANES, axis=0)
        rank += (rival > image - (other < group).to(tl.int32)).to(tl.int32)
    for step in tl.static_range(5):
        if (1 << step) < WIDTH:
            rank += tl.gather(rank, lane ^ (1 << step), axis=0)
    return rank


@triton.constexpr_function
def group_bits(lanes):
    """Bits of a group's number, of 32 / lanes groups."""
    return (32 // lanes - 1).bit_length()


@triton.jit
def kept_groups(image, lane, LAYOUT: tl.constexpr):
    """[1, ROWS] int32: the kept groups in one word, best lowest. At least two lanes a group, 32 bits for all."""
    bits: tl.constexpr = group_bits(LAYOUT.group_lanes)
    rank = group_ranks(image, lane, LAYOUT.group_lanes)
    group = lane // LAYOUT.group_lanes
    held = tl.where((rank < LAYOUT.kept) & (group < LAYOUT.groups), group << (rank * bits), 0)
    return tl.reduce(held, 0, either, keep_dims=True)


@triton.jit
def kept_lanes(first, second, lane, LAYOUT: tl.constexpr):
    """[32, ROWS] bool: lanes of the kept groups, from the lanes' two largest images."""
    first = tl.where(first <= NAN_KEY, float("-inf"), inverse_key(first))
    second = tl.where(second <= NAN_KEY, float("-inf"), inverse_key(second))
    image = group_images(first, second, lane, LAYOUT)
    group = lane // LAYOUT.group_lanes
    if LAYOUT.group_lanes >= 2:
        return (group_ranks(image, lane, LAYOUT.group_lanes) < LAYOUT.kept) & (group < LAYOUT.groups)
    kept = lane < 0
    for _ in tl.static_range(tl.constexpr(LAYOUT.kept)):
        top = tl.max(image, axis=0, keep_dims=True)
        lowest = tl.max(tl.where(image == top, 31 - group, -1), axis=0, keep_dims=True)
        won = (31 - group) == lowest
        kept = kept | won
        image = tl.where(won, EXCLUDED, image)
    return kept
