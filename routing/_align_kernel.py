"""Kernels of `moe_align_block_size`.

Buckets: id + 1 for ids in [0, num_experts), else 0; bin `num_buckets` collects what lies behind the batch. Order
inside a bucket comes from scans and sorts over the flat index, never from atomics, so it is the same in every run.

An element's place is (blocks before its bucket) * block + its rank inside the bucket, and the blocks before a bucket
are the elements of smaller buckets that open a block (rank divisible by the block). So small batches need no bins at
all, only comparisons of all with all:
`align_small_kernel` one launch; `rank_kernel`, `place_ranked_kernel` two, for a few thousand elements;
`align_counted_kernel` one launch where the router has counted.
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


@triton.jit
def _fill(pointer, value, length, first, step, SIZE: tl.constexpr):
    for begin in range(first, length, step):
        place = begin + tl.arange(0, SIZE)
        tl.store(pointer + place, tl.zeros([SIZE], tl.int32) + value, mask=place < length)


@triton.jit
def _ranks(ids_ptr, own_index, own_bucket, numel, num_experts, OWN: tl.constexpr, COLUMNS: tl.constexpr):
    """How many elements of the same bucket come before each own one, by comparison with all."""
    rank = tl.zeros([OWN], tl.int32)
    for begin in range(0, numel, COLUMNS):
        index = begin + tl.arange(0, COLUMNS)
        inside = index < numel
        bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
        same = (bucket[None, :] == own_bucket[:, None]) & (index[None, :] < own_index[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    return rank


@triton.jit
def _openers(bucket, rank, num_experts, BLOCK_SIZE: tl.constexpr, DROP: tl.constexpr):
    """Bucket of an element that opens a block, else a number above all buckets."""
    opens = (rank % BLOCK_SIZE == 0) & (bucket <= num_experts)
    if DROP:
        opens = opens & (bucket > 0)
    return tl.where(opens, bucket, num_experts + 2)


@triton.jit
def _store_starts(cumsum_ptr, opener, num_experts, first, step, BLOCK_SIZE: tl.constexpr, BINS: tl.constexpr):
    """Starts of the buckets first.. (every `step`): a block before them for each smaller opener."""
    for begin in range(first, num_experts + 2, step):
        bins = begin + tl.arange(0, BINS)
        blocks = tl.sum((opener[None, :] < bins[:, None]).to(tl.int32), axis=1)
        tl.store(cumsum_ptr + bins, blocks * BLOCK_SIZE, mask=bins < num_experts + 2)


@triton.jit(do_not_specialize=["numel", "capacity", "num_blocks"])
def align_small_kernel(
    sorted_ids,
    expert_ids,
    total_ptr,
    cumsum_ptr,
    inverse_ptr,
    ids_ptr,
    numel,
    num_experts,
    capacity,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCKS: tl.constexpr,
    DROP: tl.constexpr,
    HAS_CUMSUM: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
):
    """One launch: every program ranks the whole batch and writes its own PLACES and BLOCKS of the outputs."""
    program = tl.program_id(0)
    index = tl.arange(0, N)
    inside = index < numel
    bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
    # Sums over axis 0: a thread adds up its own elements in registers.
    rank = tl.zeros([N], tl.int32)
    for begin in range(0, numel, COLUMNS):
        other = begin + tl.arange(0, COLUMNS)
        known = other < numel
        other_bucket = _buckets(tl.load(ids_ptr + other, mask=known, other=-1), num_experts, known)
        same = (other_bucket[:, None] == bucket[None, :]) & (other[:, None] < index[None, :])
        rank += tl.sum(same.to(tl.int32), axis=0)
    opener = _openers(bucket, rank, num_experts, BLOCK_SIZE, DROP)
    before = tl.zeros([N], tl.int32)
    for begin in range(0, numel, COLUMNS):
        other_opener = tl.gather(opener, begin + tl.arange(0, COLUMNS), 0)
        before += tl.sum((other_opener[:, None] < bucket[None, :]).to(tl.int32), axis=0)
    written = inside
    if DROP:
        written = inside & (bucket > 0)
    place = before * BLOCK_SIZE + rank
    first = program * PLACES
    first_block = program * BLOCKS
    _fill(sorted_ids, numel, tl.minimum(capacity, first + PLACES), first, PLACES, PLACES)
    _fill(expert_ids, -1, tl.minimum(num_blocks, first_block + BLOCKS), first_block, BLOCKS, BLOCKS)
    tl.debug_barrier()
    tl.store(sorted_ids + place, index, mask=written & (place >= first) & (place < first + PLACES))
    block = before + rank // BLOCK_SIZE
    opens = (opener <= num_experts) & (block >= first_block) & (block < first_block + BLOCKS)
    tl.store(expert_ids + block, bucket - 1, mask=opens)
    if program == 0:
        tl.store(total_ptr, tl.sum((opener <= num_experts).to(tl.int32), axis=0) * BLOCK_SIZE)
        if HAS_INVERSE:
            tl.store(inverse_ptr + index, tl.where(written, place, -1), mask=inside)
    if HAS_CUMSUM:
        _store_starts(cumsum_ptr, opener, num_experts, program * 16, tl.num_programs(0) * 16, BLOCK_SIZE, 16)


@triton.jit(do_not_specialize=["numel", "capacity", "num_blocks"])
def rank_kernel(
    sorted_ids,
    expert_ids,
    ranks,
    openers,
    ids_ptr,
    numel,
    num_experts,
    capacity,
    num_blocks,
    BLOCK_SIZE: tl.constexpr,
    OWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    FILL: tl.constexpr,
    DROP: tl.constexpr,
    PDL: tl.constexpr,
):
    """First of two launches: rank and opener of OWN elements; fills sorted_ids and expert_ids."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    index = program * OWN + tl.arange(0, OWN)
    inside = index < numel
    bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
    rank = _ranks(ids_ptr, index, bucket, numel, num_experts, OWN, COLUMNS)
    tl.store(ranks + index, rank, mask=inside)
    tl.store(openers + index, _openers(bucket, rank, num_experts, BLOCK_SIZE, DROP), mask=inside)
    _fill(sorted_ids, numel, capacity, program * FILL, programs * FILL, FILL)
    _fill(expert_ids, -1, num_blocks, program * FILL, programs * FILL, FILL)


@triton.jit(do_not_specialize=["numel"])
def place_ranked_kernel(
    sorted_ids,
    expert_ids,
    total_ptr,
    cumsum_ptr,
    inverse_ptr,
    ranks,
    openers,
    ids_ptr,
    numel,
    num_experts,
    BLOCK_SIZE: tl.constexpr,
    OWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DROP: tl.constexpr,
    HAS_CUMSUM: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Second launch: blocks before an element's bucket = openers of smaller buckets."""
    program = tl.program_id(0)
    index = program * OWN + tl.arange(0, OWN)
    inside = index < numel
    bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
    if PDL:
        tl.extra.cuda.gdc_wait()
    rank = tl.load(ranks + index, mask=inside, other=0)
    before = tl.zeros([OWN], tl.int32)
    blocks = tl.zeros([], tl.int32)
    for begin in range(0, numel, COLUMNS):
        other = begin + tl.arange(0, COLUMNS)
        opener = tl.load(openers + other, mask=other < numel, other=num_experts + 2)
        before += tl.sum((opener[None, :] < bucket[:, None]).to(tl.int32), axis=1)
        if program == 0:
            blocks += tl.sum((opener <= num_experts).to(tl.int32), axis=0)
    written = inside
    if DROP:
        written = inside & (bucket > 0)
    place = before * BLOCK_SIZE + rank
    tl.store(sorted_ids + place, index, mask=written)
    tl.store(expert_ids + before + rank // BLOCK_SIZE, bucket - 1, mask=written & (rank % BLOCK_SIZE == 0))
    if HAS_INVERSE:
        tl.store(inverse_ptr + index, tl.where(written, place, -1), mask=inside)
    if program == 0:
        tl.store(total_ptr, blocks * BLOCK_SIZE)
    if HAS_CUMSUM:
        for first in range(program * 16, num_experts + 2, tl.num_programs(0) * 16):
            bins = first + tl.arange(0, 16)
            starts = tl.zeros([16], tl.int32)
            for begin in range(0, numel, COLUMNS):
                other = begin + tl.arange(0, COLUMNS)
                opener = tl.load(openers + other, mask=other < numel, other=num_experts + 2)
                starts += tl.sum((opener[None, :] < bins[:, None]).to(tl.int32), axis=1)
            tl.store(cumsum_ptr + bins, starts * BLOCK_SIZE, mask=bins < num_experts + 2)


@triton.jit(do_not_specialize=["numel", "capacity", "num_blocks"])
def align_counted_kernel(
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
    PAD: tl.constexpr,
    OWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BINS: tl.constexpr,
    BUCKETS: tl.constexpr,
    BLOCKS: tl.constexpr,
    FILL: tl.constexpr,
    DROP: tl.constexpr,
    HAS_CUMSUM: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
):
    """One launch with the router's counts: OWN elements and BUCKETS buckets' padding a program."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    bins = tl.arange(0, BINS)
    counts = tl.load(histogram_ptr + bins - 1, mask=(bins > 0) & (bins <= num_experts), other=0)
    counts = tl.where(bins == 0, numel - tl.sum(counts, axis=0), counts)
    padded = _padded_counts(counts, bins, num_experts, BLOCK_SIZE, DROP)
    ends = tl.cumsum(padded, axis=0)
    starts = ends - padded
    total = tl.sum(padded, axis=0)

    index = program * OWN + tl.arange(0, OWN)
    inside = index < numel
    bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
    place = tl.gather(starts, bucket, 0)
    place += _ranks(ids_ptr, index, bucket, numel, num_experts, OWN, COLUMNS)
    written = inside
    if DROP:
        written = inside & (bucket > 0)
    tl.store(sorted_ids + place, index, mask=written)
    if HAS_INVERSE:
        tl.store(inverse_ptr + index, tl.where(written, place, -1), mask=inside)

    for first in range(program * BUCKETS, num_experts + 1, programs * BUCKETS):
        own = tl.minimum(first + tl.arange(0, BUCKETS), num_experts + 1)
        own_end = tl.gather(ends, own, 0)
        own_start = tl.gather(starts, own, 0)
        # A dropped bucket has a count, but neither place nor padding.
        used = own_start + tl.where(own_end > own_start, tl.gather(counts, own, 0), 0)
        for begin in range(0, BLOCK_SIZE, PAD):
            pad = used[:, None] + begin + tl.arange(0, PAD)[None, :]
            tl.store(
                sorted_ids + pad, tl.zeros([BUCKETS, PAD], tl.int32) + numel, mask=pad < own_end[:, None]
            )
    _store_expert_ids(
        expert_ids, ends, total, num_blocks, program * BLOCKS, programs * BLOCKS, BLOCK_SIZE, BLOCKS
    )
    _fill(sorted_ids, numel, capacity, total + program * FILL, programs * FILL, FILL)
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
    ATOMIC: tl.constexpr,
):
    """Counts per bucket of one chunk -> chunk_counts [chunks, num_experts + 1]; fills sorted_ids with `numel`."""
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < numel
    bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
    bins = tl.arange(0, BINS)
    row = chunk_counts + chunk.to(tl.int64) * (num_experts + 1)
    if ATOMIC:
        # tl.histogram's work grows with bins x elements.
        tl.store(row + bins, tl.zeros([BINS], tl.int32), mask=bins <= num_experts)
        tl.debug_barrier()
        tl.atomic_add(row + bucket, 1, mask=inside, sem="relaxed")
    else:
        tl.store(row + bins, tl.histogram(bucket, BINS), mask=bins <= num_experts)
    _fill(sorted_ids, numel, capacity, chunk * FILL, tl.num_programs(0) * FILL, FILL)


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
    BLOCKS: tl.constexpr,
    DROP: tl.constexpr,
    HAS_CUMSUM: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
):
    """Writes one chunk's elements."""
    chunk = tl.program_id(0)
    width = num_experts + 1
    bins = tl.arange(0, BINS)
    live = bins < width
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + index, mask=index < numel, other=-1)
    row = chunk_counts + chunk.to(tl.int64) * width + bins
    own = tl.load(row, mask=live, other=0)
    before = tl.load(row + num_chunks.to(tl.int64) * width, mask=live, other=0)
    counts = tl.load(totals + bins, mask=live, other=0)
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
