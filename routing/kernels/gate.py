# mypy: ignore-errors
# ruff: noqa: SIM102
"""Gate GEMM and routing in one launch.

Phase 1: the grid is TILES column tiles x PARTS slices of the hidden dimension; every program multiplies its slice and
stores fp32 partial sums (no atomics: the result is the same in every run). Then all programs meet at a grid barrier,
which needs a cooperative launch. Phase 2: program p adds up the slices of its rows, in order, and routes them with the
router's own kernel body. `PHASE` builds each phase alone; the interpreter runs the two one after the other.
"""

from typing import Any

import triton
import triton.language as tl

from evenroute.routing.kernels.route import route


@triton.jit
def _multiply(
    hidden_ptr,
    weight_ptr,
    partial_ptr,
    num_tokens,
    hidden_stride,
    weight_stride,
    E: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    SLICE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Partial logits [PARTS, BM, E] fp32 of one column tile and one slice."""
    tile = tl.program_id(0) % TILES
    part = tl.program_id(0) // TILES
    row = tl.arange(0, BM)
    column = tile * BN + tl.arange(0, BN)
    inner = part * SLICE + tl.arange(0, BK)
    hidden = hidden_ptr + row.to(tl.int64)[:, None] * hidden_stride + inner[None, :]
    weight = weight_ptr + column.to(tl.int64)[None, :] * weight_stride + inner[:, None]
    live = row < num_tokens
    EVEN_H: tl.constexpr = H % SLICE == 0
    EVEN_E: tl.constexpr = E % BN == 0
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, SLICE, BK):
        mask_a = live[:, None]
        mask_b = (column < E)[None, :]
        if not EVEN_H:
            mask_a = mask_a & (inner + k < H)[None, :]
            mask_b = mask_b & (inner + k < H)[:, None]
        a = tl.load(hidden + k, mask=mask_a, other=0.0)
        if EVEN_E and EVEN_H:
            b = tl.load(weight + k)
        else:
            b = tl.load(weight + k, mask=mask_b, other=0.0)
        if WIDEN:
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
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BM: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Logits of this program's rows, slices added in order; they stay in L2 until the row is routed."""
    expert = tl.arange(0, E_PAD)
    for r in tl.static_range(ROWS):
        row = tl.program_id(0) * ROWS + r
        mask = (expert < E) & (row < num_tokens)
        total = tl.zeros([E_PAD], tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(partial_ptr + (part * BM + row) * E + expert, mask=mask, other=0.0)
        tl.store(logits_ptr + row * E + expert, total, mask=mask)
    tl.debug_barrier()


@triton.jit
def _gate_route(
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
    CONSTANTS,
    PHASE: tl.constexpr,
    E: tl.constexpr,
    H: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    SLICE: tl.constexpr,
    PARTS: tl.constexpr,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
    ALL_ROUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if PHASE != "route":
        _multiply(
            hidden_ptr,
            weight_ptr,
            partial_ptr,
            num_tokens,
            hidden_stride,
            weight_stride,
            E,
            H,
            BM,
            BN,
            BK,
            TILES,
            SLICE,
            WIDEN,
        )
    if PHASE == "both":
        _grid_barrier(barrier_ptr)
    if PHASE != "gemm":
        if ALL_ROUTE or tl.program_id(0) * ROWS < num_tokens:
            _add_parts(partial_ptr, gate_logits_ptr, num_tokens, E, E_PAD, BM, PARTS, ROWS)
            route(
                *POINTERS,
                num_tokens,
                E,
                bias_stride,
                vocab,
                row_offset,
                rank_salt,
                ep_rank,
                *CONSTANTS,
            )


@triton.jit(do_not_specialize=["num_tokens", "bias_stride", "vocab", "row_offset", "rank_salt", "ep_rank"])
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
    CONSTANTS,
    GATE,
):
    """POINTERS, CONSTANTS: the pointers and constants of `route`, in its order; GATE: the constants above, from PHASE.

    Both hold `tl.constexpr` objects: a tuple of them can be passed on whole, a constexpr tuple cannot.
    """
    _gate_route(
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
        CONSTANTS,
        *GATE,
    )


@triton.jit
def gate_route_interpreted(
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
    CONSTANTS: tl.constexpr,
    GATE: tl.constexpr,
):
    """The same for the interpreter, which turns the numbers of a plain tuple into tensors."""
    _gate_route(
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
        CONSTANTS,
        *GATE,
    )


def route_constants(values: dict[str, Any]) -> tuple[Any, ...]:
    """Constants by name -> in the order of `route`."""
    names = [name for name in route.arg_names if name.isupper()]
    assert set(names) == set(values), set(names) ^ set(values)
    return tuple(values[name] for name in names)
