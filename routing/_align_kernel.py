"""Kernels of `moe_align_block_size`.

Buckets: id + 1 for ids in [0, num_experts), else 0; bin `num_buckets` collects what lies behind the batch. Order
inside a bucket comes from scans and sorts over the flat index, never from atomics, so it is the same in every run.

`align_once_kernel` (small batches, one launch): a program owns NB buckets. Each recounts the whole batch, which is
cheaper than agreeing with the others, and places the elements of its own buckets.
`count_kernel`, `scan_kernel`, `place_kernel` (large batches): counts per chunk of the batch, their prefix over
chunks, then every chunk sorts its elements by bucket and writes them out.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def _buckets(ids, num_experts, inside):
    valid = (ids >= 0) & (ids < num_experts)
    bucket = tl.where(valid, ids + 1, 0).to(tl.int32)
    return tl.where(inside, bucket, num_experts + 1)


@triton.jit
def _padded_counts(counts, bins, num_experts, BLOCK_SIZE: tl.constexpr, DROP: tl.constexpr):
    padded = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE * BLOCK_SIZE
    padded = tl.where(bins <= num_experts, padded, 0)
    if DROP:
        padded = tl.where(bins == 0, 0, padded)
    return padded


@triton.jit
def _store_expert_ids(
    expert_ids, ends, total, num_blocks, first, step, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr
):
    """Expert of blocks first.. (every `step`): its bucket is the first that ends behind the block's start."""
    for begin in range(first, num_blocks, step):
        block = begin + tl.arange(0, BLOCKS)
        start = block * BLOCK_SIZE
        bucket = tl.sum((ends[None, :] <= start[:, None]).to(tl.int32), axis=1)
        tl.store(expert_ids + block, tl.where(start < total, bucket - 1, -1), mask=block < num_blocks)


@triton.jit
def _store_totals(total_ptr, cumsum_ptr, starts, total, bins, num_experts, HAS_CUMSUM: tl.constexpr):
    tl.store(total_ptr, total)
    if HAS_CUMSUM:
        # Bins behind the last bucket start at the total: cumsum[num_experts + 1] is one of them.
        tl.store(cumsum_ptr + bins, starts, mask=bins <= num_experts + 1)


@triton.jit(do_not_specialize=["numel", "capacity", "num_blocks"])
def align_once_kernel(
    sorted_ids,
    expert_ids,
    total_ptr,
    cumsum_ptr,
    inverse_ptr,
    ids_ptr,
    histogram_ptr,
    numel,
    num_experts,
    capacity,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_PAD: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    NB: tl.constexpr,
    BLOCKS: tl.constexpr,
    FILL: tl.constexpr,
    DROP: tl.constexpr,
    HAS_HISTOGRAM: tl.constexpr,
    HAS_CUMSUM: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
):
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    index = tl.arange(0, N)
    inside = index < numel
    ids = tl.load(ids_ptr + index, mask=inside, other=-1)
    bins = tl.arange(0, BINS)
    bucket = _buckets(ids, num_experts, inside)
    if HAS_HISTOGRAM:
        counts = tl.load(histogram_ptr + bins - 1, mask=(bins > 0) & (bins <= num_experts), other=0)
        counts = tl.where(bins == 0, numel - tl.sum(counts, axis=0), counts)
    else:
        counts = tl.histogram(bucket, BINS)
    padded = _padded_counts(counts, bins, num_experts, BLOCK_SIZE, DROP)
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    total = tl.sum(padded, axis=0)

    own = program * NB + tl.arange(0, NB)
    own_bin = tl.minimum(own, BINS - 1)
    # Bins of the last program that are no buckets place nothing: their padded count is 0.
    own_start = tl.gather(starts, own_bin, 0)
    own_end = own_start + tl.gather(padded, own_bin, 0)
    mine = (bucket[None, :] == own[:, None]) & (own_end > own_start)[:, None]
    rank = tl.cumsum(mine.to(tl.int32), axis=1)
    own_count = tl.sum(mine.to(tl.int32), axis=1)
    place = own_start[:, None] + rank - 1
    tl.store(sorted_ids + place, tl.broadcast_to(index[None, :], [NB, N]), mask=mine)
    if HAS_INVERSE:
        tl.store(tl.broadcast_to((inverse_ptr + index)[None, :], [NB, N]), place, mask=mine)
        if DROP:
            dropped = inside & (bucket == 0) & (program == 0)
            tl.store(inverse_ptr + index, tl.full([N], -1, tl.int32), mask=dropped)
    pad = (own_start + own_count)[:, None] + tl.arange(0, BLOCK_SIZE_PAD)[None, :]
    tl.store(sorted_ids + pad, tl.zeros([NB, BLOCK_SIZE_PAD], tl.int32) + numel, mask=pad < own_end[:, None])

    _store_expert_ids(
        expert_ids, ends, total, num_blocks, program * BLOCKS, programs * BLOCKS, BLOCK_SIZE, BLOCKS
    )
    for begin in range(total + program * FILL, capacity, programs * FILL):
        tail = begin + tl.arange(0, FILL)
        tl.store(sorted_ids + tail, tl.zeros([FILL], tl.int32) + numel, mask=tail < capacity)
    if program == 0:
        _store_totals(total_ptr, cumsum_ptr, starts, total, bins, num_experts, HAS_CUMSUM)


@triton.jit(do_not_specialize=["numel", "capacity"])
def count_kernel(
    chunk_counts,
    sorted_ids,
    ids_ptr,
    numel,
    num_experts,
    capacity,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    FILL: tl.constexpr,
):
    """Counts per bucket of one chunk -> chunk_counts [chunks, num_experts + 1]; fills sorted_ids with `numel`."""
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < numel
    bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
    counts = tl.histogram(bucket, BINS)
    bins = tl.arange(0, BINS)
    row = chunk_counts + chunk.to(tl.int64) * (num_experts + 1)
    tl.store(row + bins, counts, mask=bins <= num_experts)
    for begin in range(chunk * FILL, capacity, tl.num_programs(0) * FILL):
        place = begin + tl.arange(0, FILL)
        tl.store(sorted_ids + place, tl.zeros([FILL], tl.int32) + numel, mask=place < capacity)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_kernel(chunk_counts, totals, num_chunks, num_experts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Totals per bucket, and counts in the chunks before each chunk, stored behind the chunk counts themselves."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    width = num_experts + 1
    carry = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_chunks, ROWS):
        row = first + tl.arange(0, ROWS)
        live = (row < num_chunks)[:, None] & (column < width)[None, :]
        offset = row.to(tl.int64)[:, None] * width + column[None, :]
        counts = tl.load(chunk_counts + offset, mask=live, other=0)
        before = tl.cumsum(counts, axis=0) - counts + carry[None, :]
        tl.store(chunk_counts + num_chunks.to(tl.int64) * width + offset, before, mask=live)
        carry += tl.sum(counts, axis=0)
    tl.store(totals + column, carry, mask=column < width)


@triton.jit(do_not_specialize=["numel", "num_blocks", "num_chunks"])
def place_kernel(
    sorted_ids,
    expert_ids,
    total_ptr,
    cumsum_ptr,
    inverse_ptr,
    chunk_counts,
    totals,
    ids_ptr,
    numel,
    num_experts,
    num_blocks,
    num_chunks,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROP: tl.constexpr,
    SCANNED: tl.constexpr,
    HAS_CUMSUM: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
):
    """Writes one chunk's elements. SCANNED: `scan_kernel` ran, else the counts of all chunks are summed here."""
    chunk = tl.program_id(0)
    width = num_experts + 1
    bins = tl.arange(0, BINS)
    live = bins < width
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    own = tl.load(chunk_counts + chunk.to(tl.int64) * width + bins, mask=live, other=0)
    if SCANNED:
        before = tl.load(chunk_counts + (num_chunks + chunk).to(tl.int64) * width + bins, mask=live, other=0)
        counts = tl.load(totals + bins, mask=live, other=0)
    else:
        before = tl.zeros([BINS], tl.int32)
        counts = tl.zeros([BINS], tl.int32)
        for first in range(0, num_chunks, ROWS):
            row = first + tl.arange(0, ROWS)
            mask = (row < num_chunks)[:, None] & live[None, :]
            tile = tl.load(chunk_counts + row[:, None] * width + bins[None, :], mask=mask, other=0)
            counts += tl.sum(tile, axis=0)
            before += tl.sum(tl.where((row < chunk)[:, None], tile, 0), axis=0)
    padded = _padded_counts(counts, bins, num_experts, BLOCK_SIZE, DROP)
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    total = tl.sum(padded, axis=0)

    bucket = _buckets(ids, num_experts, index < numel)
    local = tl.arange(0, CHUNK)
    ordered = tl.sort(bucket * CHUNK + local)
    bucket = ordered // CHUNK
    # Place of the bucket's first element here, less its place among the chunk's sorted elements.
    shift = starts + before - (tl.cumsum(own, axis=0) - own)
    place = tl.gather(shift, bucket, 0) + local
    written = bucket < width
    if DROP:
        written = written & (bucket > 0)
    source = chunk * CHUNK + ordered % CHUNK
    tl.store(sorted_ids + place, source, mask=written)
    if HAS_INVERSE:
        tl.store(inverse_ptr + source, tl.where(written, place, -1), mask=bucket < width)

    _store_expert_ids(
        expert_ids, ends, total, num_blocks, chunk * BLOCKS, tl.num_programs(0) * BLOCKS, BLOCK_SIZE, BLOCKS
    )
    if chunk == 0:
        _store_totals(total_ptr, cumsum_ptr, starts, total, bins, num_experts, HAS_CUMSUM)
