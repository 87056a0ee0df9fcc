"""Which alignment kernels run at which size, and their launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from evenroute.routing.align import AlignBuffers

SMALL_LIMIT = 256
"""Ids that one launch takes."""
RANKED_LIMIT = 4096
"""Ids that are compared all with all: in one launch if the router has counted them, else in two."""
_MIDDLE_CHUNK_FROM = 1 << 15
_LARGE_CHUNK_FROM = 1 << 18
_PROGRAMS = 256  # measured on an H200: 8 elements a program at 2048 ids, 16 at 4096


@dataclass(frozen=True)
class AlignPlan:
    """kind "small", "counted" (one launch), "ranked" (two) or "chunks" (three, `num_chunks` of `chunk` ids)."""

    kind: str
    chunk: int = 0
    num_chunks: int = 0

    def scratch_words(self, numel: int, num_experts: int) -> int:
        """int32 words of scratch: ranks and openers, or counts per chunk, their prefix, totals."""
        if self.kind == "chunks":
            return (2 * self.num_chunks + 1) * (num_experts + 1)
        return 2 * numel if self.kind == "ranked" else 0


def plan_align(numel: int, *, has_histogram: bool) -> AlignPlan:
    """The plan for `numel` ids; without a histogram it needs at least as much scratch as with one."""
    if numel <= SMALL_LIMIT:
        return AlignPlan("small")
    if numel <= RANKED_LIMIT:
        return AlignPlan("counted" if has_histogram else "ranked")
    chunk = 256 if numel < _MIDDLE_CHUNK_FROM else 512 if numel < _LARGE_CHUNK_FROM else 2048
    return AlignPlan("chunks", chunk, -(-numel // chunk))


@dataclass(frozen=True)
class _Launch:
    """What all kernels need: flat ids, sizes, and constants; optional outputs stand in as the expert ids."""

    flat: Tensor
    num_experts: int
    block_size: int
    drop: bool
    slot_histogram: Tensor | None
    cumsum: Tensor | None
    inverse: Tensor | None
    out: AlignBuffers

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """sorted_ids, expert_ids, total, cumsum, inverse."""
        out = self.out
        optional = [out.expert_ids if t is None else t for t in (self.cumsum, self.inverse)]
        return (out.sorted_ids, out.expert_ids, out.num_tokens_post_padded, *optional)

    @property
    def bins(self) -> int:
        """A power of two above the buckets' number: at least one bin for what lies behind the batch."""
        return max(32, _power_of_two(self.num_experts + 2))

    @property
    def flags(self) -> dict[str, bool]:
        return {
            "DROP": self.drop,
            "HAS_CUMSUM": self.cumsum is not None,
            "HAS_INVERSE": self.inverse is not None,
        }


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
    plan = plan or plan_align(flat.numel(), has_histogram=slot_histogram is not None)
    needed = plan.scratch_words(flat.numel(), num_experts)
    assert out.scratch.numel() >= needed, (out.scratch.numel(), needed)
    launch = _Launch(flat, num_experts, block_size, drop, slot_histogram, cumsum, inverse, out)
    if plan.kind == "small":
        _launch_small(launch)
    elif plan.kind == "counted":
        _launch_counted(launch)
    elif plan.kind == "ranked":
        _launch_ranked(launch)
    else:
        _launch_chunks(launch, plan)


def _launch_small(launch: _Launch) -> None:
    from evenroute.routing._align_kernel import align_small_kernel

    numel, out = launch.flat.numel(), launch.out
    capacity, num_blocks = out.sorted_ids.numel(), out.expert_ids.numel()
    places = 1024
    programs = -(-capacity // places)
    align_small_kernel[(programs,)](
        *launch.outputs,
        launch.flat,
        numel,
        launch.num_experts,
        capacity,
        num_blocks,
        BLOCK_SIZE=launch.block_size,
        N=max(32, _power_of_two(numel)),
        COLUMNS=min(64, max(32, _power_of_two(numel))),
        PLACES=places,
        BLOCKS=_power_of_two(-(-num_blocks // programs)),
        num_warps=4 if numel <= 128 else 8,
        **launch.flags,
    )


def _launch_counted(launch: _Launch) -> None:
    from evenroute.routing._align_kernel import align_counted_kernel

    numel, out = launch.flat.numel(), launch.out
    own, columns, warps = ranked_shape(numel)
    programs = -(-numel // own)
    assert launch.slot_histogram is not None
    align_counted_kernel[(programs,)](
        *launch.outputs,
        launch.flat,
        launch.slot_histogram,
        numel,
        launch.num_experts,
        out.sorted_ids.numel(),
        out.expert_ids.numel(),
        BLOCK_SIZE=launch.block_size,
        PAD=min(64, _power_of_two(launch.block_size)),
        OWN=own,
        COLUMNS=columns,
        BINS=launch.bins,
        BUCKETS=min(16, _power_of_two(-(-(launch.num_experts + 1) // programs))),
        BLOCKS=8,
        FILL=256,
        num_warps=warps,
        **launch.flags,
    )


def _launch_ranked(launch: _Launch) -> None:
    from evenroute.routing._align_kernel import place_ranked_kernel, rank_kernel

    numel, out = launch.flat.numel(), launch.out
    own, columns, warps = ranked_shape(numel)
    ranks, openers = out.scratch[:numel], out.scratch[numel : 2 * numel]
    grid = (-(-numel // own),)
    # The second launch reads the ids while the first one drains.
    pdl = launch.flat.is_cuda and torch.cuda.get_device_capability(launch.flat.device) >= (9, 0)
    options: dict[str, Any] = {"launch_pdl": True} if pdl else {}
    rank_kernel[grid](
        out.sorted_ids,
        out.expert_ids,
        ranks,
        openers,
        launch.flat,
        numel,
        launch.num_experts,
        out.sorted_ids.numel(),
        out.expert_ids.numel(),
        BLOCK_SIZE=launch.block_size,
        OWN=own,
        COLUMNS=columns,
        FILL=256,
        DROP=launch.drop,
        PDL=pdl,
        num_warps=warps,
    )
    place_ranked_kernel[grid](
        *launch.outputs,
        ranks,
        openers,
        launch.flat,
        numel,
        launch.num_experts,
        BLOCK_SIZE=launch.block_size,
        OWN=own,
        COLUMNS=columns,
        PDL=pdl,
        num_warps=warps,
        **launch.flags,
        **options,
    )


def _launch_chunks(launch: _Launch, plan: AlignPlan) -> None:
    from evenroute.routing._align_kernel import count_kernel, place_kernel, scan_kernel

    numel, out, width = launch.flat.numel(), launch.out, launch.num_experts + 1
    words = plan.scratch_words(numel, launch.num_experts)
    chunk_counts, totals = out.scratch, out.scratch[words - width :]
    grid = (plan.num_chunks,)
    warps = 4 if plan.chunk <= 512 else 8
    count_kernel[grid](
        chunk_counts,
        out.sorted_ids,
        launch.flat,
        numel,
        launch.num_experts,
        out.sorted_ids.numel(),
        CHUNK=plan.chunk,
        BINS=launch.bins,
        FILL=1024,
        ATOMIC=launch.bins > 512,
        num_warps=warps,
    )
    scan_kernel[(-(-width // 16),)](
        chunk_counts, totals, plan.num_chunks, launch.num_experts, ROWS=128, COLUMNS=16, num_warps=4
    )
    place_kernel[grid](
        *launch.outputs,
        chunk_counts,
        totals,
        launch.flat,
        numel,
        launch.num_experts,
        out.expert_ids.numel(),
        plan.num_chunks,
        BLOCK_SIZE=launch.block_size,
        CHUNK=plan.chunk,
        BINS=launch.bins,
        BLOCKS=16,
        num_warps=warps,
        **launch.flags,
    )


def ranked_shape(numel: int) -> tuple[int, int, int]:
    """(elements owned by a program, elements compared at a time, warps)."""
    own = max(8, _power_of_two(-(-numel // _PROGRAMS)))
    return own, min(1024, _power_of_two(numel)), 4


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
