"""`moe_align_block_size`: routed ids sorted by expert, every expert's run padded to whole blocks.

A grouped GEMM reads the result block by block: `sorted_ids[b * block : (b + 1) * block]` are flat indices t * K + k
(`numel` = T * K marks padding, so it is never a real row), all of expert `expert_ids[b]`.

>>> ids = torch.tensor([[1, 2, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2]])
>>> sorted_ids, expert_ids, total = moe_align_block_size(ids, 4, 4)
>>> sorted_ids[:16].tolist()
[3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
>>> expert_ids[:4].tolist(), total.item()
([0, 1, 2, 3], 16)
"""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.eplb._checks import require_bool, require_choice
from evenroute.routing.align.plan import AlignBuffers, check_buffers, check_sizes, launch_align
from evenroute.routing.settings.checks import ID_DTYPES, require_output, require_tensor

INVALID = ("sentinel", "drop")
BACKENDS = ("auto", "reference", "triton", "interpret")


def moe_align_block_size(
    ids: Tensor,
    block_size: int,
    num_experts: int,
    *,
    invalid: str = "sentinel",
    slot_histogram: Tensor | None = None,
    cumsum: Tensor | None = None,
    inverse: Tensor | None = None,
    out: AlignBuffers | None = None,
    backend: str = "auto",
    pdl: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort `ids` by expert into runs of whole blocks.

    ids             [T, K] (any shape) int32 or int64, physical or local ids
    block_size      rows of a GEMM block, >= 1
    num_experts     number of valid ids: [0, num_experts)
    invalid         what becomes of other ids (-1 of padding rows): "sentinel" puts them first, in blocks with expert
                    id -1; "drop" leaves them out
    slot_histogram  [num_experts] int32, how often each valid id occurs (`RoutingOutput.slot_histogram`): saves the
                    counting; it must be right
    cumsum          [num_experts + 2] int32, filled with the start of every bucket (invalid ids first, then expert
                    0, ...) and the padded total
    inverse         [T * K] int32, filled with the place of every flat index in sorted_ids, -1 for dropped ones
    out             buffers of `AlignBuffers.allocate` for this shape
    backend         "auto": Triton on CUDA, plain torch elsewhere; "reference", "triton"; "interpret": the kernels on
                    CPU tensors under TRITON_INTERPRET=1, for tests
    pdl             programmatic dependent launch (Hopper and later): starts while the launch before drains, best behind
                    a router with `pdl=True`

    Returns (sorted_ids [capacity] int32, expert_ids [ceil(capacity / block_size)] int32, num_tokens_post_padded [1]
    int32). Flat indices rise inside an expert, the same in every run; the tails behind the total are `numel` and -1.

    Raises ValueError for wrong shapes, dtypes and names.
    """
    require_tensor("ids", ids, dtypes=ID_DTYPES)
    require_choice("invalid", invalid, INVALID)
    numel, device = ids.numel(), ids.device
    check_sizes(numel, block_size, num_experts)
    for name, tensor, length in (
        ("slot_histogram", slot_histogram, num_experts),
        ("cumsum", cumsum, num_experts + 2),
        ("inverse", inverse, numel),
    ):
        if tensor is not None:
            require_output(name, tensor, (length,), torch.int32, device)
    if out is not None:
        check_buffers(out, numel, block_size, num_experts, device)
    require_choice("backend", backend, BACKENDS)
    require_bool("pdl", pdl)
    if backend == "triton" and not ids.is_cuda:
        raise ValueError(f"backend='triton' needs CUDA tensors, ids lie on {ids.device}")
    if out is None:
        out = AlignBuffers.allocate(numel, block_size, num_experts, device=device)
    flat = ids.reshape(-1).contiguous()  # a reshaped view can have a stride, which the kernels do not take
    if backend == "auto":
        backend = "triton" if ids.is_cuda else "reference"
    align = moe_align_block_size_torch if backend == "reference" or numel == 0 else launch_align
    align(
        flat,
        block_size,
        num_experts,
        drop=invalid == "drop",
        slot_histogram=slot_histogram,
        cumsum=cumsum,
        inverse=inverse,
        out=out,
        pdl=pdl,
    )
    return out.sorted_ids, out.expert_ids, out.num_tokens_post_padded


def moe_align_block_size_torch(
    flat: Tensor,
    block_size: int,
    num_experts: int,
    *,
    drop: bool,
    slot_histogram: Tensor | None,
    cumsum: Tensor | None,
    inverse: Tensor | None,
    out: AlignBuffers,
    pdl: bool = False,
) -> None:
    """`launch_align` in plain torch: the path on CPU and the kernels' reference. It needs no `slot_histogram`."""
    numel, device, flat = flat.numel(), flat.device, flat.to(torch.int64)
    bucket = torch.where((flat >= 0) & (flat < num_experts), flat + 1, 0)
    counts = torch.bincount(bucket, minlength=num_experts + 1)
    padded = (counts + block_size - 1) // block_size * block_size
    if drop:
        padded[0] = 0
    bounds = torch.cat([padded.new_zeros(1), padded.cumsum(0)])
    order = torch.argsort(bucket, stable=True)
    by_bucket = bucket[order]
    first = counts.cumsum(0) - counts
    place = bounds[by_bucket] + torch.arange(numel, device=device) - first[by_bucket]
    out.sorted_ids.fill_(numel)
    out.expert_ids.fill_(-1)
    kept = by_bucket > 0 if drop else slice(None)
    out.sorted_ids[place[kept]] = order[kept].to(torch.int32)
    blocks = padded // block_size
    owners = torch.repeat_interleave(torch.arange(-1, num_experts, device=device), blocks)
    out.expert_ids[: len(owners)] = owners.to(torch.int32)
    out.num_tokens_post_padded.copy_(bounds[-1:])
    if cumsum is not None:
        cumsum.copy_(bounds)
    if inverse is not None:
        inverse.fill_(-1)
        inverse[order[kept]] = place[kept].to(torch.int32)
