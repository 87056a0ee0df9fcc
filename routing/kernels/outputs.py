# mypy: ignore-errors
"""Columns of a tile in every output form, their order, and the batch's slot histogram."""

import triton
import triton.language as tl


@triton.jit
def order_by_payload(pay, lane, K: tl.constexpr):
    """Columns by descending payload, that is by rising expert id; absent ones (-1) last."""
    out = tl.full(lane.shape, -1, tl.int32)
    rest = pay
    for k in tl.static_range(K):
        top = tl.max(rest, axis=0, keep_dims=True)
        out = tl.where(lane == k, top, out)
        rest = tl.where(rest == top, -1, rest)
    return out


@triton.jit
def store_columns(
    weights_ptr,
    physical_ptr,
    logical_ptr,
    local_ptr,
    packed_ptr,
    scratch_ptr,
    index,
    mask,
    valid,
    weight,
    physical,
    logical,
    local,
    EMIT: tl.constexpr,
    HUGE: tl.constexpr,
):
    """Write one tile of columns in every wanted form; EMIT follows `OUTPUT_NAMES`. HUGE: weights may pass bf16."""
    weight = tl.where(valid, weight, 0.0)
    physical = tl.where(valid, physical, -1)
    if EMIT[0]:
        tl.store(weights_ptr + index, weight, mask=mask)
    if EMIT[1]:
        tl.store(physical_ptr + index, physical, mask=mask)
    if EMIT[2]:
        tl.store(logical_ptr + index, tl.where(valid, logical, -1), mask=mask)
    if EMIT[3]:
        tl.store(local_ptr + index, tl.where(valid, local, -1), mask=mask)
    if EMIT[4]:
        # Round to nearest even by hand: weights are finite and not negative.
        bits = weight.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        if HUGE:
            bits = tl.minimum(bits, 0x7F7F)
        tl.store(packed_ptr + index, (physical << 16) | bits, mask=mask)
    if EMIT[5]:
        tl.atomic_add(scratch_ptr + 1 + physical, 1, mask=mask & valid, sem="relaxed")


@triton.jit
def publish_histogram(histogram_ptr, scratch_ptr, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):
    """The last program to get here moves the histogram from scratch to its place and clears scratch for the next."""
    tl.debug_barrier()
    done = tl.atomic_add(scratch_ptr, 1, sem="acq_rel")
    if done == tl.num_programs(0) - 1:
        for start in range(0, BUCKETS, BLOCK):
            bucket = start + tl.arange(0, BLOCK)
            inside = bucket < BUCKETS
            amount = tl.atomic_xchg(
                scratch_ptr + 1 + bucket, tl.zeros([BLOCK], tl.int32), mask=inside, sem="relaxed"
            )
            tl.store(histogram_ptr + bucket, amount, mask=inside)
        tl.atomic_xchg(scratch_ptr, 0, sem="relaxed")
