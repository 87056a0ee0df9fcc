"""Which alignment kernels run at which size, their buffers, and their launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenroute.eplb._checks import describe, require_int
from evenroute.routing.settings.checks import require_device, require_output

ONCE_LIMIT = 4096
"""Ids that one launch takes."""
ONCE_BINS = 1 << 13
"""Bins that its shared memory holds."""
_MIDDLE_CHUNK_FROM = 1 << 15
_LARGE_CHUNK_FROM = 1 << 18
_MAX_NUMEL = 1 << 30
_MAX_BUCKETS = 1 << 16


@dataclass(frozen=True)
class AlignPlan:
    """kind "once" (one launch: `own` buckets a program) or "chunks" (three launches, `num_chunks` of `chunk` ids)."""

    kind: str
    chunk: int = 0
    num_chunks: int = 0
    own: int = 0
    warps: int = 4

    def scratch_words(self, num_experts: int) -> int:
        """int32 words of scratch: counts per chunk, their prefix, totals."""
        return (2 * self.num_chunks + 1) * (num_experts + 1) if self.kind == "chunks" else 0


def plan_align(numel: int, num_experts: int) -> AlignPlan:
    """The plan for `numel` ids of `num_experts`, as swept on one H200 (blocks of 64, microseconds a call).

    288 experts, top-8: 1.8 at 1 token, 2.2 at 32, 2.6 at 128, 3.2 at 256 (3.7 with half of them padding), 4.2 at 512;
    chunks: 7.8 at 2048, 9.5 at 8192. 1024 experts, top-16: 2.4, 2.9, 3.6, 4.4; chunks: 11.7 at 512, 12 and 16. The
    router's counts save no time here: reading them takes 0.1 to 0.7 longer than counting in shared memory.
    """
    if numel <= ONCE_LIMIT and num_experts + 2 <= ONCE_BINS:
        return AlignPlan("once", own=4 if num_experts < 512 else 8, warps=4 if numel <= 512 else 8)
    chunk = 256 if numel < _MIDDLE_CHUNK_FROM else 512 if numel < _LARGE_CHUNK_FROM else 2048
    return AlignPlan("chunks", chunk, -(-numel // chunk), warps=4 if chunk <= 512 else 8)


def align_capacity(numel: int, block_size: int, num_experts: int) -> int:
    """Length of `sorted_ids`: the most that any ids can need, rounded up to 4 (16-byte stores)."""
    if numel < num_experts + 1:
        capacity = numel * block_size
    else:
        capacity = numel + (num_experts + 1) * (block_size - 1)
    return (capacity + 3) // 4 * 4


@dataclass(frozen=True, eq=False)
class AlignBuffers:
    """Outputs and scratch of one shape: allocate once, pass as `out`, and no call allocates (CUDA graphs).

    sorted_ids [align_capacity] int32, expert_ids [ceil(capacity / block_size)] int32,
    num_tokens_post_padded [1] int32, scratch int32 (empty for small batches)
    """

    sorted_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor
    scratch: Tensor

    @classmethod
    def allocate(
        cls, numel: int, block_size: int, num_experts: int, *, device: torch.device | str
    ) -> AlignBuffers:
        """Buffers for `numel` = T * K ids; contents are undefined until a call fills them.

        Raises ValueError for numbers out of range, or where there is no such device.
        """
        require_int("numel", numel, 0, _MAX_NUMEL)
        check_sizes(numel, block_size, num_experts)
        device = require_device("device", device)
        capacity = align_capacity(numel, block_size, num_experts)
        scratch = plan_align(numel, num_experts).scratch_words(num_experts)

        def words(length: int) -> Tensor:
            return torch.empty(length, dtype=torch.int32, device=device)

        return cls(words(capacity), words(-(-capacity // block_size)), words(1), words(scratch))


def check_sizes(numel: int, block_size: int, num_experts: int) -> None:
    """ValueError unless the numbers are in range and every place fits an int32."""
    require_int("block_size", block_size, 1)
    require_int("num_experts", num_experts, 1, _MAX_BUCKETS - 1)
    if max(numel, align_capacity(numel, block_size, num_experts)) > _MAX_NUMEL:
        raise ValueError(
            f"ids: {numel} ids in blocks of {block_size} need more than {_MAX_NUMEL} places (int32 indices)"
        )


def check_buffers(
    out: AlignBuffers, numel: int, block_size: int, num_experts: int, device: torch.device
) -> None:
    """ValueError unless `out` has the lengths that `AlignBuffers.allocate` gives."""
    if not isinstance(out, AlignBuffers):
        raise ValueError(f"out must be an AlignBuffers, found {describe(out)}")
    capacity = align_capacity(numel, block_size, num_experts)
    wanted = {"sorted_ids": capacity, "expert_ids": -(-capacity // block_size), "num_tokens_post_padded": 1}
    for name, length in wanted.items():
        require_output(f"out.{name}", getattr(out, name), (length,), torch.int32, device)
    needed = plan_align(numel, num_experts).scratch_words(num_experts)
    if not isinstance(out.scratch, Tensor) or out.scratch.numel() < needed:
        raise ValueError(f"out.scratch must hold {needed} int32, found {describe(out.scratch)}")
    require_output("out.scratch", out.scratch, (out.scratch.numel(),), torch.int32, device)


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
    pdl: bool

    @property
    def options(self) -> dict[str, bool]:
        """Of the first launch."""
        return {"PDL": True, "launch_pdl": True} if self.pdl and self.flat.is_cuda else {"PDL": False}

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
    pdl: bool = False,
) -> None:
    """Enqueue the kernels for `flat` [numel] ids on the current stream (`plan`: for tests and benchmarks)."""
    plan = plan or plan_align(flat.numel(), num_experts)
    needed = plan.scratch_words(num_experts)
    assert out.scratch.numel() >= needed, (out.scratch.numel(), needed)
    launch = _Launch(flat, num_experts, block_size, drop, slot_histogram, cumsum, inverse, out, pdl)
    (_launch_once if plan.kind == "once" else _launch_chunks)(launch, plan)


def _launch_once(launch: _Launch, plan: AlignPlan) -> None:
    from evenroute.routing.align.kernel import align_once_kernel

    numel, out, bins = launch.flat.numel(), launch.out, launch.bins
    length = max(32 * plan.warps, _power_of_two(numel))
    words = bins + plan.own * (length // 32)  # at most 36 KiB; 48 may be declared
    align_once_kernel[(-(-(launch.num_experts + 1) // plan.own),)](
        *launch.outputs,
        launch.flat,
        launch.flat if launch.slot_histogram is None else launch.slot_histogram,
        numel,
        launch.num_experts,
        out.sorted_ids.numel(),
        out.expert_ids.numel(),
        BLOCK_SIZE=launch.block_size,
        PAD=min(64, _power_of_two(launch.block_size)),
        N=length,
        BINS=bins,
        OWN=plan.own,
        BITS=32 if length <= 1024 else 64,
        COUNTED=launch.slot_histogram is not None,
        SHARED=launch.flat.is_cuda,
        DECLARE=f".shared .align 16 .b32 evenroute_words[{words}]; mov.u32 $0, evenroute_words;",
        FILL=256,
        num_warps=plan.warps,
        **launch.flags,
        **launch.options,
    )


def _launch_chunks(launch: _Launch, plan: AlignPlan) -> None:
    from evenroute.routing.align.kernel import count_kernel, place_kernel, scan_kernel

    numel, out, width = launch.flat.numel(), launch.out, launch.num_experts + 1
    words = plan.scratch_words(launch.num_experts)
    chunk_counts, totals = out.scratch, out.scratch[words - width :]
    grid = (plan.num_chunks,)
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
        num_warps=plan.warps,
        **launch.options,
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
        num_warps=plan.warps,
        **launch.flags,
    )


def _power_of_two(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()
