"""moe_align_block_size: the reference against plain Python, the kernels against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evenroute.routing.align.align import moe_align_block_size
from evenroute.routing.align.plan import AlignBuffers, AlignPlan, align_capacity, launch_align, plan_align
from support.interpreted import BACKEND, COMPILED, DEVICE

GUARD = 0x5A5A5A5A


def plain(ids, block_size, num_experts, invalid):
    """The contract, written down: (sorted_ids, expert_ids, total, cumsum) as lists."""
    flat = ids.flatten().tolist()
    runs = [[] for _ in range(num_experts + 1)]
    for place, expert in enumerate(flat):
        runs[expert + 1 if 0 <= expert < num_experts else 0].append(place)
    if invalid == "drop":
        runs[0] = []
    sorted_ids, expert_ids, cumsum = [], [], [0]
    for bucket, run in enumerate(runs):
        blocks = -(-len(run) // block_size)
        sorted_ids += run + [len(flat)] * (blocks * block_size - len(run))
        expert_ids += [bucket - 1] * blocks
        cumsum.append(len(sorted_ids))
    capacity = align_capacity(len(flat), block_size, num_experts)
    total = len(sorted_ids)
    sorted_ids += [len(flat)] * (capacity - total)
    expert_ids += [-1] * (-(-capacity // block_size) - len(expert_ids))
    return sorted_ids, expert_ids, total, cumsum


def guarded(numel, block_size, num_experts):
    """Buffers inside one allocation with guard words before and after each."""
    capacity = align_capacity(numel, block_size, num_experts)
    scratch = AlignBuffers.allocate(numel, block_size, num_experts, device=DEVICE).scratch.numel()
    lengths = [capacity, -(-capacity // block_size), 1, scratch, num_experts + 2, numel]
    arena = torch.full((sum(lengths) + 32 * 7,), GUARD, dtype=torch.int32, device=DEVICE)
    mask = torch.ones_like(arena, dtype=torch.bool)
    parts, start = [], 32
    for length in lengths:
        parts.append(arena[start : start + length])
        mask[start : start + length] = False
        start += length + 32
    return AlignBuffers(*parts[:4]), parts[4], parts[5], lambda: bool((arena[mask] == GUARD).all())


def check(ids, block_size, num_experts, invalid, backend, *, plan=None, counted=False):
    ids = ids.to(DEVICE)
    out, cumsum, inverse, intact = guarded(ids.numel(), block_size, num_experts)
    histogram = None
    if counted:
        flat = ids.flatten()
        valid = flat[(flat >= 0) & (flat < num_experts)].long()
        histogram = torch.bincount(valid, minlength=num_experts).int()
    if plan is None:
        moe_align_block_size(
            ids,
            block_size,
            num_experts,
            invalid=invalid,
            slot_histogram=histogram,
            cumsum=cumsum,
            inverse=inverse,
            out=out,
            backend=backend,
        )
    else:
        scratch = torch.empty(plan.scratch_words(num_experts), dtype=torch.int32, device=DEVICE)
        out = AlignBuffers(out.sorted_ids, out.expert_ids, out.num_tokens_post_padded, scratch)
        launch_align(
            ids.flatten(),
            block_size,
            num_experts,
            drop=invalid == "drop",
            slot_histogram=histogram,
            cumsum=cumsum,
            inverse=inverse,
            out=out,
            plan=plan,
        )
    sorted_ids, expert_ids, total, bounds = plain(ids.cpu(), block_size, num_experts, invalid)
    assert out.num_tokens_post_padded.tolist() == [total]
    assert cumsum.tolist() == bounds
    assert out.expert_ids.tolist() == expert_ids
    assert out.sorted_ids.tolist() == sorted_ids
    places = {source: place for place, source in enumerate(sorted_ids) if source < ids.numel()}
    assert inverse.tolist() == [places.get(source, -1) for source in range(ids.numel())]
    assert intact()


def draw(shape, num_experts, seed, *, bad=0.0):
    rng = np.random.default_rng(seed)
    weight = rng.permutation(np.arange(1, num_experts + 1) ** -1.1)
    ids = rng.choice(num_experts, size=shape, p=weight / weight.sum())
    wrong = rng.choice([-1, -2, num_experts, 2**30, -(2**31)], size=shape)
    return torch.from_numpy(np.where(rng.random(shape) < bad, wrong, ids).astype(np.int32))


BACKENDS = ["reference", BACKEND]


@pytest.mark.parametrize("backend", BACKENDS)
def test_worked_example_of_the_article(backend):
    # Printed there with ids 1..4 and "num_experts = 4": as ids 0..3, and as it stands with room for id 4.
    ids = torch.tensor([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]], device=DEVICE)
    places = [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12]
    for shift, experts in ((1, 4), (0, 5)):
        sorted_ids, expert_ids, total = moe_align_block_size(ids - shift, 4, experts, backend=backend)
        assert sorted_ids[:16].tolist() == places
        assert expert_ids[:4].tolist() == [1 - shift, 2 - shift, 3 - shift, 4 - shift]
        assert total.tolist() == [16]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("repeat", [1, 2000])
def test_b13_invalid_ids(backend, repeat):
    plan = None
    if repeat > 1 and not COMPILED and backend != "reference":
        # The large-batch path at a size that the interpreter gets through.
        repeat = 8
        plan = AlignPlan("chunks", 32, -(-6 * repeat // 32))
    ids = torch.tensor([[0, 5], [-1, -1], [5, 0]], dtype=torch.int32)
    if repeat == 1:
        sorted_ids, expert_ids, total = moe_align_block_size(
            ids.to(DEVICE), 4, 6, invalid="drop", backend=backend
        )
        assert sorted_ids[:8].tolist() == [0, 5, 6, 6, 1, 4, 6, 6]
        assert expert_ids[:2].tolist() == [0, 5]
        assert total.tolist() == [8]
        masked = torch.full_like(ids, -1).to(DEVICE)
        assert moe_align_block_size(masked, 4, 6, invalid="drop", backend=backend)[2].tolist() == [0]
    too_large = ids.clone()
    too_large[0, 0], too_large[2, 1] = 6, 2**30
    for case in (ids, torch.full_like(ids, -1), too_large):
        for invalid in ("drop", "sentinel"):
            check(case.repeat(repeat, 1), 4, 6, invalid, backend, plan=plan)


def test_int64_ids_beyond_int32_are_invalid():
    ids = torch.tensor([[2**32 + 1, 1, -(2**40)]])
    for backend in BACKENDS:
        check(ids, 2, 3, "drop", backend)
        check(ids, 2, 3, "sentinel", backend)


@pytest.mark.parametrize(
    ("numel", "experts", "block", "capacity"),
    [
        (8, 288, 64, 512),
        (288, 288, 64, 288 * 64),
        (289, 288, 64, 289 + 289 * 63),
        (3, 2, 3, 12),
        (0, 8, 16, 0),
    ],
)
def test_capacity(numel, experts, block, capacity):
    assert align_capacity(numel, block, experts) == (capacity + 3) // 4 * 4


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_capacity_holds_the_worst_case(block_size):
    # One element in each bucket, the invalid one included, then everything in one more.
    ids = torch.tensor([*range(-1, 7), 3, 3, 3])[:, None]
    check(ids, block_size, 7, "sentinel", "reference")
    check(torch.full((7, 1), 2), block_size, 7, "sentinel", "reference")


@given(
    ids=st.lists(st.integers(-3, 12), max_size=60),
    block_size=st.integers(1, 20),
    num_experts=st.integers(1, 11),
    invalid=st.sampled_from(["sentinel", "drop"]),
)
def test_reference_keeps_the_contract(ids, block_size, num_experts, invalid):
    check(torch.tensor(ids, dtype=torch.int32)[:, None], block_size, num_experts, invalid, "reference")


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(backend):
    cumsum = torch.full((10,), -7, dtype=torch.int32, device=DEVICE)
    ids = torch.empty((0, 2), dtype=torch.int32, device=DEVICE)
    sorted_ids, expert_ids, total = moe_align_block_size(ids, 16, 8, cumsum=cumsum, backend=backend)
    assert (sorted_ids.shape, expert_ids.shape, total.tolist()) == ((0,), (0,), [0])
    assert cumsum.tolist() == [0] * 10


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("invalid", ["sentinel", "drop"])
@pytest.mark.parametrize("own", [2, 4])
@pytest.mark.parametrize("shape", [(1, 8), (32, 8), (39, 7)])
def test_small_batches(counted, invalid, own, shape):
    plan = AlignPlan("once", own=own, warps=4)
    for block_size, experts in ((64, 13), (5, 1)) if invalid == "drop" else ((4, 13), (1, 9)):
        ids = draw(shape, experts, 3, bad=0.1)
        check(ids, block_size, experts, invalid, BACKEND, plan=plan, counted=counted)


@pytest.mark.parametrize("numel", [1025, 2048])
def test_masks_of_wide_words(numel):
    """From 1025 ids on a bucket's mask has words of 64 bits; one bucket may hold them all."""
    plan = AlignPlan("once", own=4, warps=4)
    check(draw((numel, 1), 6, numel, bad=0.1), 16, 6, "sentinel", BACKEND, plan=plan)
    check(torch.full((numel, 1), 2, dtype=torch.int32), 64, 3, "drop", BACKEND, plan=plan)


@pytest.mark.gpu
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("experts", [288, 8190])
def test_small_batches_of_every_size(experts, warps):
    """Every element is counted once, whatever the layout: sizes from below the threads to the limit."""
    for numel in (1, 127, 300, 1000, 2048, 4096):
        for counted in (False, True):
            for invalid, own in (("sentinel", 4), ("drop", 2)):
                plan = AlignPlan("once", own=own, warps=warps)
                ids = draw((numel, 1), experts, numel, bad=0.05)
                check(ids, 64, experts, invalid, BACKEND, plan=plan, counted=counted)


@pytest.mark.parametrize("invalid", ["sentinel", "drop"])
@pytest.mark.parametrize(
    ("numel", "block_size", "experts"), [(1, 16, 40), (65, 64, 5), (130, 16, 40), (90, 3, 600)]
)
def test_chunked_launches(numel, block_size, experts, invalid):
    chunk = 512 if COMPILED else 32
    numel *= 20 if COMPILED else 1
    plan = AlignPlan("chunks", chunk, -(-numel // chunk))
    check(draw((numel, 1), experts, numel, bad=0.1), block_size, experts, invalid, BACKEND, plan=plan)


def test_sizes_around_the_limits_of_the_plans():
    sizes = (512, 513, 4095, 4096, 4097, 32767, 32768, 1 << 18) if COMPILED else (128, 129)
    for numel in sizes:
        for counted in (False, True):
            check(
                draw((numel, 1), 24 if COMPILED else 7, numel), 16, 24, "sentinel", BACKEND, counted=counted
            )
    kinds = [
        plan_align(*sizes).kind for sizes in ((1, 8190), (4096, 288), (4097, 288), (1, 8191), (1 << 20, 8))
    ]
    assert kinds == ["once", "once", "chunks", "chunks", "chunks"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(128, 2, 32, 16), (4097, 16, 128, 64)])
def test_b15_same_order_every_time(backend, shape):
    tokens, top_k, experts, block_size = shape
    interpreted = not COMPILED and backend != "reference"
    if interpreted:
        tokens, experts = min(tokens, 16), min(experts, 32)
    ids = draw((tokens, top_k), experts, 15).to(DEVICE)
    first = moe_align_block_size(ids, block_size, experts, backend=backend)
    for _ in range(1 if interpreted else 99):
        again = moe_align_block_size(ids, block_size, experts, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    sorted_ids, expert_ids, total = (part.cpu() for part in first)
    blocks = sorted_ids[: int(total)].view(-1, block_size)
    for expert in expert_ids[: len(blocks)].unique():
        run = blocks[expert_ids[: len(blocks)] == expert].flatten()
        run = run[run < ids.numel()]
        assert bool((run.diff() > 0).all())


@pytest.mark.parametrize(
    "tokens",
    [pytest.param(t, marks=pytest.mark.gpu) for t in (1, 8191, 8192, 64448, 64449, 65535, 65536)] + [65537],
)
def test_b07_batch_sizes_that_cross_limits(tokens):
    ids = draw((97, 8), 256, 7)
    rows = torch.arange(tokens) % 97
    batch = ids[rows].to(DEVICE)
    backend = "triton" if COMPILED else "reference"
    sorted_ids, expert_ids, total = moe_align_block_size(batch, 64, 256, backend=backend)
    wanted = moe_align_block_size(batch, 64, 256, backend="reference")
    assert torch.equal(total, wanted[2])
    assert torch.equal(expert_ids, wanted[1])
    assert torch.equal(sorted_ids, wanted[0])
    real = sorted_ids[: int(total)]
    assert int((real < batch.numel()).sum()) == batch.numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(2, 2)}, "ids must be int32 or int64"),
        ({"block_size": 0}, "block_size must be >= 1"),
        ({"num_experts": 0}, r"num_experts must be in \[1,"),
        ({"invalid": "keep"}, "invalid='keep' is not one of sentinel, drop"),
        ({"backend": "cuda"}, "backend='cuda' is not one of"),
        ({"cumsum": torch.zeros(5, dtype=torch.int32)}, r"cumsum must have shape \[6\]"),
        ({"slot_histogram": torch.zeros(4)}, "slot_histogram must be int32"),
        ({"block_size": 1 << 30}, "need more than"),
        ({"out": AlignBuffers.allocate(9, 2, 4, device="cpu")}, r"out.sorted_ids must have shape \[8\]"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    arguments = {"ids": torch.zeros(2, 2, dtype=torch.int32), "block_size": 2, "num_experts": 4, **change}
    with pytest.raises(ValueError, match=message):
        moe_align_block_size(**arguments)


def test_buffers_are_reused():
    ids = torch.tensor([[0, 1], [1, 2]], device=DEVICE)
    out = AlignBuffers.allocate(4, 2, 3, device=DEVICE)
    for shift in (0, 1):
        result = moe_align_block_size((ids + shift) % 3, 2, 3, out=out)
        assert result[0].data_ptr() == out.sorted_ids.data_ptr()
        assert result[1].tolist() == plain((ids + shift).cpu() % 3, 2, 3, "sentinel")[1]


@pytest.mark.parametrize("rows", [1, 40, 3000] if COMPILED else [1, 40])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_stride(rows: int, dtype: torch.dtype) -> None:
    """Views of wider, turned and repeated ids; such a view can stay one when it is flattened."""
    ids = torch.randint(-1, 10, (rows, 8), generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)
    for view in (
        ids[:, ::2],
        ids[:, :1],
        ids[:, 3],
        ids[:, 1:5],
        ids.t(),
        ids[:1].expand(5, 8),
        ids[::3, ::4],
    ):
        counts = torch.bincount(view.reshape(-1).clamp(min=-1) + 1, minlength=11)[1:].int()
        for histogram in (None, counts):
            found = moe_align_block_size(view, 2, 10, backend=BACKEND, slot_histogram=histogram)
            wanted = moe_align_block_size(view.contiguous(), 2, 10, backend="reference")
            for one, other in zip(found, wanted, strict=True):
                assert torch.equal(one, other)
