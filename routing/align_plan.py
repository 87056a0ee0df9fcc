"""Which alignment kernels run at which size, and their launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from evenroute.routing.align import AlignBuffers

ONCE_LIMIT = 2048
"""Ids that one launch takes if it has to count them itself."""
ONCE_LIMIT_COUNTED = 16384
"""Ids that one launch takes if the router has counted them."""
_SCAN_FROM = 64
_SMALL_CHUNK, _LARGE_CHUNK = 512, 2048
_LARGE_CHUNK_FROM = 1 << 18


@dataclass(frozen=True)
class AlignPlan:
    """once: one launch; else chunks of `chunk` ids, with a launch of its own for the prefix over chunks if `scan`."""

    once: bool
    chunk: int = 0
    num_chunks: int = 0
    scan: bool = False

    def scratch_words(self, num_experts: int) -> int:
        """int32 words of scratch: counts per chunk, their prefix, totals."""
        if self.once:
            return 0
        return (2 * self.num_chunks + 1) * (num_experts + 1)


def plan_align(numel: int, num_experts: int, *, has_histogram: bool) -> AlignPlan:
    """The plan for `numel` ids; the plan without a histogram needs at least as much scratch as that with one."""
    if numel <= (ONCE_LIMIT_COUNTED if has_histogram else ONCE_LIMIT):
        return AlignPlan(once=True)
    chunk = _LARGE_CHUNK if numel >= _LARGE_CHUNK_FROM else _SMALL_CHUNK
    num_chunks = -(-numel // chunk)
    return AlignPlan(once=False, chunk=chunk, num_chunks=num_chunks, scan=num_chunks > _SCAN_FROM)


def launch_align(
    flat: Tensor,
    block_size: int,
    num_experts: int,
    *,
    drop: bool,
    slot_histogram: Tensor | None,
    cumsum: Tensor | None,
    out: AlignBuffers,
    inverse: Tensor | None = None,
    plan: AlignPlan | None = None,
) -> None:
    """Enqueue the kernels for `flat` [numel] ids on the current stream (`plan`: for tests and benchmarks)."""
    from evenroute.routing import _align_kernel as kernels

    numel = flat.numel()
    plan = plan or plan_align(numel, num_experts, has_histogram=slot_histogram is not None)
    capacity, num_blocks = out.sorted_ids.numel(), out.expert_ids.numel()
    # One bin more than there are buckets: for what lies behind the batch.
    bins = max(32, _power_of_two(num_experts + 2))
    unused = out.expert_ids
    if plan.once:
        warps, owned = once_shape(numel, num_experts)
        length = max(32 * warps, _power_of_two(numel))
        kernels.align_once_kernel[(-(-(num_experts + 1) // owned),)](
            out.sorted_ids,
            out.expert_ids,
            out.num_tokens_post_padded,
            unused if cumsum is None else cumsum,
            unused if inverse is None else inverse,
            flat,
            flat if slot_histogram is None else slot_histogram,
            numel,
            num_experts,
            capacity,
            num_blocks,
            BLOCK_SIZE=block_size,
            BLOCK_SIZE_PAD=_power_of_two(block_size),
            N=length,
            BINS=bins,
            NB=owned,
            BLOCKS=8,
            FILL=256,
            DROP=drop,
            HAS_HISTOGRAM=slot_histogram is not None,
            HAS_CUMSUM=cumsum is not None,
            HAS_INVERSE=inverse is not None,
            num_warps=warps,
        )
        return
    _launch_chunks(flat, block_size, num_experts, drop, cumsum, inverse, out, plan, bins)


def _launch_chunks(
    flat: Tensor,
    block_size: int,
    num_experts: int,
    drop: bool,
    cumsum: Tensor | None,
    inverse: Tensor | None,
    out: AlignBuffers,
    plan: AlignPlan,
    bins: int,
) -> None:
    from evenroute.routing import _align_kernel as kernels

    numel = flat.numel()
    width = num_experts + 1
    words = plan.scratch_words(num_experts)
    assert out.scratch.numel() >= words, (out.scratch.numel(), words)
    chunk_counts, totals = out.scratch, out.scratch[words - width :]
    grid = (plan.num_chunks,)
    warps = 4 if plan.chunk <= _SMALL_CHUNK else 8
    kernels.count_kernel[grid](
        chunk_counts,
        out.sorted_ids,
        flat,
        numel,
        num_experts,
        out.sorted_ids.numel(),
        CHUNK=plan.chunk,
        BINS=bins,
        FILL=1024,
        num_warps=warps,
    )
    if plan.scan:
        kernels.scan_kernel[(-(-width // 16),)](
            chunk_counts, totals, plan.num_chunks, num_experts, ROWS=128, COLUMNS=16, num_warps=4
        )
    kernels.place_kernel[grid](
        out.sorted_ids,
        out.expert_ids,
        out.num_tokens_post_padded,
        out.expert_ids if cumsum is None else cumsum,
        out.expert_ids if inverse is None else inverse,
        chunk_counts,
        totals,
        flat,
        numel,
        num_experts,
        out.expert_ids.numel(),
        plan.num_chunks,
        BLOCK_SIZE=block_size,
        CHUNK=plan.chunk,
        BINS=bins,
        ROWS=16,
        BLOCKS=16,
        DROP=drop,
        SCANNED=plan.scan,
        HAS_CUMSUM=cumsum is not None,
        HAS_INVERSE=inverse is not None,
        num_warps=warps,
    )


def once_shape(numel: int, num_experts: int) -> tuple[int, int]:
    """(warps, buckets owned by a program) of the one-launch kernel."""
    if numel <= 256:
        return 4, 2
    return (8 if numel <= 4096 else 16), (4 if num_experts > 512 else 2)


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
