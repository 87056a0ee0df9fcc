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
    out, index, mask, valid, weight, physical, logical, local, EMIT: tl.constexpr, HUGE: tl.constexpr
):
    """Write one tile of columns in every wanted form. HUGE: weights may pass bf16."""
    weight = tl.where(valid, weight, 0.0)
    physical = tl.where(valid, physical, -1)
    if EMIT.weights:
        tl.store(out.weights + index, weight, mask=mask)
    if EMIT.physical_ids:
        tl.store(out.physical_ids + index, physical, mask=mask)
    if EMIT.logical_ids:
        tl.store(out.logical_ids + index, tl.where(valid, logical, -1), mask=mask)
    if EMIT.local_ids:
        tl.store(out.local_ids + index, tl.where(valid, local, -1), mask=mask)
    if EMIT.packed_ids:
        # Round to nearest even by hand: weights are finite and not negative.
        bits = weight.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        if HUGE:
            bits = tl.minimum(bits, 0x7F7F)
        tl.store(out.packed_ids + index, (physical << 16) | bits, mask=mask)
    if EMIT.slot_histogram:
        tl.atomic_add(out.scratch + 1 + physical, 1, mask=mask & valid, sem="relaxed")


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
