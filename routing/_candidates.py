# ruff: noqa: RUF005
# mypy: ignore-errors
"""Pieces of the choice by bound: sorted segment maxima, bit masks, and the n-th candidate of a row."""

import triton
import triton.language as tl

from evenroute.routing._lists import EXCLUDED, replaced
from evenroute.routing._scores import INTERPRETED


@triton.jit
def exchange_values(values, A: tl.constexpr, B: tl.constexpr):
    """Order entries A < B of a tuple of int32 tensors, the larger first."""
    high = tl.maximum(values[A], values[B])
    low = tl.minimum(values[A], values[B])
    return replaced(replaced(values, A, high), B, low)


@triton.jit
def segment_maxima(images, kept, CHUNKS: tl.constexpr, SEGMENTS: tl.constexpr):
    """Largest images of each lane's SEGMENTS parts, sorted; EXCLUDED in lanes that are not kept."""
    maxima = ()
    for segment in tl.static_range(SEGMENTS):
        FIRST: tl.constexpr = segment * CHUNKS // SEGMENTS
        LAST: tl.constexpr = (segment + 1) * CHUNKS // SEGMENTS
        part = images[FIRST]
        for chunk in tl.static_range(FIRST + 1, LAST):
            part = tl.maximum(part, images[chunk])
        maxima = maxima + (tl.where(kept, tl.max(part, axis=2), EXCLUDED),)
    # Odd-even merge sort of 2, 4 or 8 entries.
    for size in tl.static_range(3):
        if (2 << size) <= SEGMENTS:
            for step in tl.static_range(3):
                if step <= size:
                    for a in tl.static_range(SEGMENTS):
                        DISTANCE: tl.constexpr = (1 << size) >> step
                        WITHIN: tl.constexpr = a % (2 << size)
                        # First step pairs the halves, later ones skip the first DISTANCE entries.
                        LOWER: tl.constexpr = (
                            WITHIN < (1 << size)
                            if step == 0
                            else (WITHIN >= DISTANCE and (WITHIN - DISTANCE) // DISTANCE % 2 == 0)
                        )
                        if LOWER and WITHIN + DISTANCE < (2 << size):
                            maxima = exchange_values(maxima, a, a + DISTANCE)
    return maxima


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
def nth_candidate(bits, amount, upto, number, taken):
    """(lane that holds it, its bit there) of the candidates `number` [32, ROWS], counted over lanes and bits.

    bits: the lanes' masks; amount: their set bits; upto: running sum of those over the lanes.
    """
    source = number * 0
    for step in tl.static_range(5):
        reach = tl.gather(upto, source + ((16 >> step) - 1), axis=0)
        source = tl.where(reach <= number, source + (16 >> step), source)
    word = tl.gather(bits, source, axis=0)
    skip = tl.where(taken, number - tl.gather(upto - amount, source, axis=0), 0)
    while tl.max(skip) > 0:
        word = tl.where(skip > 0, word & (word - 1), word)
        skip -= 1
    lowest = word & -word
    if lowest.dtype == tl.int64:
        lowest = lowest.to(tl.uint64, bitcast=True).to(tl.float32)
    else:
        lowest = lowest.to(tl.uint32, bitcast=True).to(tl.float32)
    return source, (lowest.to(tl.int32, bitcast=True) >> 23) - 127
