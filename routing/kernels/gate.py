# mypy: ignore-errors
# ruff: noqa: SIM102
"""Gate GEMM and routing in one launch.

Phase 1: the grid is tiles of columns x parts slices of the hidden dimension; every program multiplies its slice and
stores fp32 partial sums (no atomics: the result is the same in every run). Then all programs meet at a grid barrier,
which needs a cooperative launch. Phase 2: program p adds up the slices of its rows, in order, and routes them with the
router's own kernel body. `phase` builds each phase alone; the interpreter runs the two one after the other.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from evenroute.routing.kernels.route import route


class GateConstants(NamedTuple):
    """What the fused launch is compiled for.

    phase              "both", or "gemm" or "route" alone
    block_rows, columns, depth   of a tile and of one multiply-accumulate step
    tiles, parts, slice_length   of the grid: see `gate_gemm.GatePlan`
    experts_pad        E rounded up to a power of two
    rows               that a program routes
    widen              the interpreter multiplies fp32
    all_route          programs without rows take part in routing too
    pdl                programmatic dependent launch
    """

    phase: str
    experts: int
    hidden_size: int
    block_rows: int
    columns: int
    depth: int
    tiles: int
    slice_length: int
    parts: int
    experts_pad: int
    rows: int
    widen: bool
    all_route: bool
    pdl: bool


@triton.jit
def _multiply(
    hidden_ptr,
    weight_ptr,
    partial_ptr,
    num_tokens,
    hidden_stride,
    weight_stride,
    GATE: tl.constexpr,
):
    """Partial logits [parts, block_rows, E] fp32 of one column tile and one slice."""
    E: tl.constexpr = GATE.experts
    BM: tl.constexpr = GATE.block_rows
    BN: tl.constexpr = GATE.columns
    BK: tl.constexpr = GATE.depth
    TILES: tl.constexpr = GATE.tiles
    SLICE: tl.constexpr = GATE.slice_length
    tile = tl.program_id(0) % TILES
    part = tl.program_id(0) // TILES
    row = tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    inner = part * SLICE + tl.arange(0, BK)
    hidden = hidden_ptr + row.to(tl.int64)[:, None] * hidden_stride + inner[None, :]
    weight = weight_ptr + column.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    live = row < num_tokens
    EVEN_H: tl.constexpr = GATE.hidden_size % SLICE == 0
    EVEN_E: tl.constexpr = E % BN == 0
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, SLICE, BK):
        mask_a = live[:, None]
        mask_b = (column < E)[None, :]
        if not EVEN_H:
            mask_a = mask_a & (inner + k < GATE.hidden_size)[None, :]
            mask_b = mask_b & (inner + k < GATE.hidden_size)[:, None]
        a = tl.load(hidden + k, mask=mask_a, other=0.0)
        if EVEN_E and EVEN_H:
            b = tl.load(weight + k)
        else:
            b = tl.load(weight + k, mask=mask_b, other=0.0)
        if GATE.widen:
            # The interpreter multiplies the bit patterns of bf16.
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total)
    place = (part * BM + row)[:, None] * E + column[None, :]
    tl.store(partial_ptr + place, total, mask=live[:, None] & (column < E)[None, :])


@triton.jit
def _grid_barrier(barrier_ptr):
    """Every program's stores before it are visible to every program's loads after it.

    The counter only grows (64 bits, never reset): launch n ends at (n + 1) x programs.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0).to(tl.int64)
    arrived = tl.atomic_add(barrier_ptr, tl.full([], 1, tl.int64), sem="acq_rel", scope="gpu")
    target = (arrived // programs + 1) * programs
    address = barrier_ptr.to(tl.uint64)
    seen = arrived
    while seen < target:
        seen = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def _add_parts(
    partial_ptr,
    logits_ptr,
    num_tokens,
    GATE: tl.constexpr,
):
    """Logits of this program's rows, slices added in order; they stay in L2 until the row is routed."""
    E: tl.constexpr = GATE.experts
    E_PAD: tl.constexpr = GATE.experts_pad
    expert = tl.arange(0, E_PAD)
    for r in tl.static_range(tl.constexpr(GATE.rows)):
        row = tl.program_id(0) * GATE.rows + r
        mask = (expert < E) & (row < num_tokens)
        total = tl.zeros([E_PAD], tl.float32)
        for part in tl.static_range(tl.constexpr(GATE.parts)):
            total += tl.load(partial_ptr + (part * GATE.block_rows + row) * E + expert, mask=mask, other=0.0)
        tl.store(logits_ptr + row * E + expert, total, mask=mask)
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "bias_stride",
        "vocab",
        "row_offset",
        "rank_salt",
        "ep_rank",
        "batch_chunks",
    ]
)
def gate_route(
    hidden_ptr,
    weight_ptr,
    partial_ptr,
    gate_logits_ptr,
    barrier_ptr,
    POINTERS,
    num_tokens,
    hidden_stride,
    weight_stride,
    bias_stride,
    vocab,
    row_offset,
    rank_salt,
    ep_rank,
    batch_chunks,
    CONSTANTS: tl.constexpr,
    GATE: tl.constexpr,
):
    """POINTERS: those of `route`, in its order; CONSTANTS: its `RouteConstants`; GATE: `GateConstants`."""
    if GATE.pdl:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if GATE.phase != "route":
        _multiply(hidden_ptr, weight_ptr, partial_ptr, num_tokens, hidden_stride, weight_stride, GATE)
    if GATE.phase == "both":
        _grid_barrier(barrier_ptr)
    if GATE.phase != "gemm":
        if GATE.all_route or tl.program_id(0) * GATE.rows < num_tokens:
            _add_parts(partial_ptr, gate_logits_ptr, num_tokens, GATE)
            route(
                *POINTERS,
                num_tokens,
                GATE.experts,
                bias_stride,
                vocab,
                row_offset,
                rank_salt,
                ep_rank,
                batch_chunks,
                CONSTANTS,
            )
