"""Kernels of `moe_align_block_size`.

Buckets: id + 1 for ids in [0, num_experts), else 0; bin `num_buckets` collects what lies behind the batch. Order
inside a bucket comes from scans and sorts over the flat index, never from atomics, so it is the same in every run.

`align_once_kernel` (up to a few thousand ids, one launch): a program owns a few buckets; each counts the whole batch,
which is cheaper than agreeing with the others (or takes the router's counts), and places its own buckets' elements.
`count_kernel`, `scan_kernel`, `place_kernel` (large batches): counts per chunk of the batch, their prefix over
chunks, then every chunk sorts its elements by bucket and writes them out.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton
import triton.language as tl

from evenroute.routing.align.shared import bits_set, mark, masks, shared_words, shared_zeros


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


@triton.jit(do_not_specialize=["numel", "capacity", "num_blocks"], do_not_specialize_on_alignment=["ids_ptr"])
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
    PAD: tl.constexpr,
    N: tl.constexpr,
    BINS: tl.constexpr,
    OWN: tl.constexpr,
    BITS: tl.constexpr,
    COUNTED: tl.constexpr,
    SHARED: tl.constexpr,
    DECLARE: tl.constexpr,
    FILL: tl.constexpr,
    DROP: tl.constexpr,
    HAS_CUMSUM: tl.constexpr,
    HAS_INVERSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One launch: every program counts the whole batch and places the elements of its own OWN buckets.

    The own elements are bits of masks, one a valid bucket: an element's rank is the number of bits before it.
    COUNTED: the router has counted. SHARED: masks and counts by atomics in shared memory (DECLARE), else, for
    the interpreter, by reductions. BITS of a mask's words: as many as keep a bucket's words in one warp.
    `ids_ptr` is read by single words on purpose: after loads of 16 bytes the batch is moved through shared memory.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    first = program * OWN
    index = tl.arange(0, N)
    inside = index < numel
    bins = tl.arange(0, BINS)
    if SHARED:
        base = shared_zeros(program, bins, tl.arange(0, OWN * (N // 32)), BINS, DECLARE)
    if PDL:  # what is above does not need the launch before
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    bucket = _buckets(tl.load(ids_ptr + index, mask=inside, other=-1), num_experts, inside)
    own = bucket - first
    mine = inside & (own >= 0) & (own < OWN) & (bucket > 0)
    j = tl.arange(0, OWN)
    word = tl.arange(0, N // BITS)
    if SHARED:
        mark(base, bucket, own, mine, index, N, BINS, COUNTED)
        mask = shared_words(base + BINS * 4 + j[:, None] * (N // 8) + word[None, :] * (BITS // 8), BITS)
    else:
        mask = masks(own, mine, index, N, BITS, OWN)
    if COUNTED:
        counts = tl.load(histogram_ptr + bins - 1, mask=(bins > 0) & (bins <= num_experts), other=0)
    elif SHARED:
        counts = shared_words(base + bins * 4, 32)
    else:
        counts = tl.histogram(bucket, BINS)
    # Blocks of valid buckets, of those before the own ones, and valid elements: one sum, 20 bits each.
    counts = tl.where((bins > 0) & (bins <= num_experts), counts, 0).to(tl.int64)
    blocks = (counts + BLOCK_SIZE - 1) // BLOCK_SIZE
    sums = tl.sum(blocks + (tl.where(bins < first, blocks, 0) << 20) + (counts << 40), axis=0)
    invalid = numel - (sums >> 40).to(tl.int32)
    if DROP:
        invalid = 0
    sentinel = (invalid + BLOCK_SIZE - 1) // BLOCK_SIZE
    blocks_total = (sums & 0xFFFFF).to(tl.int32) + sentinel
    total = blocks_total * BLOCK_SIZE
    blocks_before = ((sums >> 20) & 0xFFFFF).to(tl.int32) + tl.where(first > 0, sentinel, 0)

    bits = bits_set(mask, BITS)
    count = tl.where(first + j == 0, invalid, tl.sum(bits, axis=1))
    own_blocks = (count + BLOCK_SIZE - 1) // BLOCK_SIZE
    end = (blocks_before + tl.cumsum(own_blocks, axis=0)) * BLOCK_SIZE
    start = end - own_blocks * BLOCK_SIZE
    place = start[:, None] + tl.cumsum(bits, axis=1) - bits
    left = tl.max(tl.max(bits, axis=1), axis=0)
    while left > 0:
        lowest = mask & -mask
        source = word[None, :] * BITS + bits_set(lowest - 1, BITS)
        tl.store(sorted_ids + place, source, mask=mask != 0)
        if HAS_INVERSE:
            tl.store(inverse_ptr + source, place, mask=mask != 0)
        place += 1
        mask = mask & (mask - 1)
        left -= 1

    used = start + count
    for begin in range(0, BLOCK_SIZE - 1, PAD):
        pad = used[:, None] + begin + tl.arange(0, PAD)[None, :]
        tl.store(sorted_ids + pad, tl.zeros([OWN, PAD], tl.int32) + numel, mask=pad < end[:, None])
    for begin in range(0, tl.max(own_blocks, axis=0), 4):
        block = (start // BLOCK_SIZE)[:, None] + begin + tl.arange(0, 4)[None, :]
        expert = tl.broadcast_to((first - 1 + j)[:, None], [OWN, 4])
        tl.store(expert_ids + block, expert, mask=block < (end // BLOCK_SIZE)[:, None])
    _fill(sorted_ids, numel, capacity, total + program * FILL, programs * FILL, FILL)
    _fill(expert_ids, -1, num_blocks, blocks_total + program * 32, programs * 32, 32)
    if HAS_CUMSUM:
        tl.store(cumsum_ptr + first + j, start, mask=first + j <= num_experts)
    if program == 0:
        tl.store(total_ptr, total)
        if HAS_CUMSUM:
            tl.store(cumsum_ptr + num_experts + 1, total)
        none = inside & (bucket == 0)
        if DROP:
            if HAS_INVERSE:
                tl.store(inverse_ptr + index, tl.zeros([N], tl.int32) - 1, mask=none)
        elif invalid > 0:
            # Whole rows of padding would fill words of a mask: these are ranked by a scan, from place 0 on.
            rank = tl.cumsum(none.to(tl.int32), axis=0) - 1
            tl.store(sorted_ids + rank, index, mask=none)
            if HAS_INVERSE:
                tl.store(inverse_ptr + index, rank, mask=none)


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
    PDL: tl.constexpr,
):
    """Counts per bucket of one chunk -> chunk_counts [chunks, num_experts + 1]; fills sorted_ids with `numel`."""
    chunk = tl.program_id(0)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = index < numel
    if PDL:
        tl.extra.cuda.gdc_wait()
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
