"""Counts and masks of a batch in shared memory, by inline assembly; `masks` is the interpreter's twin."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def bits_of_half(word):
    word = word.to(tl.uint32)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def bits_set(word, BITS: tl.constexpr):
    number = bits_of_half(word)
    if BITS == 64:
        number += bits_of_half(word >> 32)
    return number


@triton.jit
def zero_shared(address):
    tl.inline_asm_elementwise(
        "st.shared.u32 [$1], 0; mov.u32 $0, 0;", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def shared_zeros(program, bins, masks, BINS: tl.constexpr, DECLARE: tl.constexpr):
    """Address of shared memory (DECLARE says how much): BINS words of counts, then the words of the masks, all 0."""
    base = tl.inline_asm_elementwise(DECLARE, "=r,r", [program], dtype=tl.int32, is_pure=False, pack=1)
    zero_shared(base + bins * 4)
    zero_shared(base + (BINS + masks) * 4)
    tl.debug_barrier()
    return base


@triton.jit
def shared_words(address, BITS: tl.constexpr):
    if BITS == 64:
        return tl.inline_asm_elementwise(
            "ld.shared.u64 $0, [$1];", "=l,r", [address], dtype=tl.int64, is_pure=False, pack=1
        )
    else:
        return tl.inline_asm_elementwise(
            "ld.shared.u32 $0, [$1];", "=r,r", [address], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def mark(base, bucket, own, mine, index, N: tl.constexpr, BINS: tl.constexpr, COUNTED: tl.constexpr):
    """Counts every element in its bin (unless COUNTED), and sets the bit of an own one in its bucket's mask.

    Sums and bits do not depend on the order of the atomics. A thread adds for every element it holds, so elements must
    not be fewer than threads.
    """
    if not COUNTED:
        tl.inline_asm_elementwise(
            "red.shared.add.u32 [$1], 1; mov.u32 $0, 0;",
            "=r,r",
            [base + bucket * 4],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    # 32 bits at a time: little-endian halves of the words.
    half = base + BINS * 4 + own * (N // 8) + index // 32 * 4
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $3, 0; @p red.shared.or.b32 [$1], $2; mov.u32 $0, 0; }",
        "=r,r,r,r",
        [half, (1 << (index % 32)).to(tl.int32), mine.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


@triton.jit
def masks(own, mine, index, N: tl.constexpr, BITS: tl.constexpr, OWN: tl.constexpr):
    """The masks of `mark` without shared memory, for the interpreter: [OWN, N / BITS]."""
    WORD: tl.constexpr = tl.int64 if BITS == 64 else tl.int32
    bucket = tl.arange(0, OWN)[:, None]
    masks = tl.zeros([OWN, N // BITS], WORD)
    value = tl.full([N], 1, WORD) << (index % BITS).to(WORD)
    for j in tl.static_range(OWN):
        words = tl.sum(tl.reshape(tl.where(mine & (own == j), value, 0), [N // BITS, BITS]), axis=1)
        masks = tl.where(bucket == j, words[None, :], masks)
    return masks
