# mypy: ignore-errors
"""Which expert groups a row keeps, over the lanes of its warp."""

import triton
import triton.language as tl

from evenroute.routing._lists import EXCLUDED
from evenroute.routing._scores import NAN_KEY, inverse_key, key_image


@triton.jit
def top_two(a_first, a_second, b_first, b_second):
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
    first = tl.where(first <= NAN_KEY, float("-inf"), inverse_key(first))
    second = tl.where(second <= NAN_KEY, float("-inf"), inverse_key(second))
    # Butterflies over the lanes of a group: every lane ends with its group's two largest.
    for step in tl.static_range(5):
        if (1 << step) < LANES:
            other = tl.gather(first, lane ^ (1 << step), axis=0)
            if TOP2:
                another = tl.gather(second, lane ^ (1 << step), axis=0)
                second = tl.maximum(tl.minimum(first, other), tl.maximum(second, another))
            first = tl.maximum(first, other)
    score = first
    if TOP2:
        score = first + second
    group = lane // LANES
    image = tl.where(group < G, key_image(score), EXCLUDED)
    if G <= 16:
        # Rank of the own group: how many others are larger, or equal and earlier.
        # A pair's order is that of the highest bit in which the two groups differ.
        rank = tl.zeros([32, ROWS], tl.int32)
        for step in tl.static_range(1, 32 // LANES):
            other = tl.gather(image, lane ^ (step * LANES), axis=0)
            rank += (
                other
                > image
                - (
                    (
                        group
                        >> (
                            0
                            if step < 2
                            else (1 if step < 4 else (2 if step < 8 else (3 if step < 16 else 4)))
                        )
                    )
                    & 1
                )
            ).to(tl.int32)
        return (rank < TG) & (group < G)
    kept = lane < 0
    for _ in tl.static_range(TG):
        top = tl.max(image, axis=0, keep_dims=True)
        lowest = tl.max(tl.where(image == top, 31 - group, -1), axis=0, keep_dims=True)
        won = (31 - group) == lowest
        kept = kept | won
        image = tl.where(won, EXCLUDED, image)
    return kept
