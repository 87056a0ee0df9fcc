"""What callers of formats, alignment, gate, compiled and simulated routing and the reference get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from evenroute.routing.align.align import moe_align_block_size
from evenroute.routing.align.plan import AlignBuffers
from evenroute.routing.formats import (
    PackedRouting,
    RaggedRouting,
    pack_ids,
    unpack_ids,
)
from evenroute.routing.gate import GateRouter
from support.interpreted import BACKEND, DEVICE
from support.refusals import refused
from support.wrong_use import CONFIG, ELSEWHERE, E, K, R, floats, ints, router

# ------------------------------------------------------------------------------ formats and alignment


def test_packing() -> None:
    ids, weights = ints(2, K), floats(2, K)
    for bad, words in (
        (ids + (1 << 15), "physical_ids must lie in [-1, 32768) to be packed, found 32768 to 32768"),
        (ids - 2, "physical_ids must lie in [-1, 32768) to be packed, found -2 to -2"),
        (ids.long() + (1 << 40), "physical_ids must lie in [-1, 32768)"),
    ):
        refused(words, lambda b=bad: pack_ids(b, weights))
    assert torch.equal(pack_ids(ids.long(), weights, num_buckets=4), pack_ids(ids, weights))
    assert pack_ids(ints(0, K), floats(0, K)).shape == (0, K)


def test_packed_weights_stay_finite() -> None:
    """The largest fp32 would round to an infinite bf16."""
    big = torch.full((1, K), torch.finfo(torch.float32).max, device=DEVICE)
    assert torch.isfinite(unpack_ids(pack_ids(ints(1, K), big))[0]).all()
    config = replace(CONFIG, renormalize=False)
    for backend in ("reference", BACKEND):
        mine = router(config=config, backend=backend, emit=("weights", "physical_ids", "packed_ids"))
        found = mine(None, 0, logical_ids=ints(1, K), weights=big)
        assert torch.equal(found.packed_ids, pack_ids(found.physical_ids, found.weights))
        assert torch.isfinite(unpack_ids(found.packed_ids)[0]).all()


@pytest.mark.parametrize("form", [PackedRouting, RaggedRouting])
@pytest.mark.parametrize("emit", [(), ("slot_histogram",), ("logical_ids",), ("local_ids", "slot_histogram")])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_format_is_never_made_of_what_was_not_emitted(form: Any, emit: tuple[str, ...], rows: int) -> None:
    output = router(emit=emit)(floats(rows, E), 0)
    refused("needs weights, which the router's emit leaves out", lambda: form.from_output(output))


def align_buffers(**change: Any) -> AlignBuffers:
    return replace(AlignBuffers.allocate(6, 4, 4, device=DEVICE), **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": [[0, 1]]}, "ids must be a torch.Tensor, found a list"),
        ({"ids": floats(3, 2)}, "ids must be int32 or int64, found torch.float32"),
        ({"block_size": 0}, "block_size must be >= 1, found 0"),
        ({"block_size": 4.0}, "block_size must be an integer, found 4.0"),
        ({"block_size": True}, "block_size must be an integer, found True"),
        ({"num_experts": "4"}, "num_experts must be an integer, found '4'"),
        ({"num_experts": 1 << 16}, "num_experts must be in [1, 65535]"),
        ({"block_size": 1 << 40}, "ids: 6 ids in blocks of 1099511627776 need more than"),
        ({"invalid": None}, "invalid=None is not one of sentinel, drop"),
        ({"slot_histogram": [1] * 4}, "slot_histogram must be a torch.Tensor, found a list"),
        ({"slot_histogram": ints(5)}, "slot_histogram must have shape [4], found [5]"),
        ({"cumsum": ints(4)}, "cumsum must have shape [6], found [4]"),
        ({"cumsum": ints(12)[::2]}, "cumsum must be contiguous, found strides [2]"),
        ({"inverse": ints(6, dtype=torch.int64)}, "inverse must be int32, found torch.int64"),
        ({"out": ints(3)}, "out must be an AlignBuffers, found a torch.Tensor"),
        ({"out": align_buffers(sorted_ids=ints(3))}, "out.sorted_ids must have shape [24], found [3]"),
        ({"out": align_buffers(expert_ids=None)}, "out.expert_ids must be a torch.Tensor, found None"),
        ({"out": align_buffers(sorted_ids=ints(48)[::2])}, "out.sorted_ids must be contiguous"),
        ({"out": align_buffers(scratch=None)}, "out.scratch must hold 0 int32, found None"),
    ],
)
def test_alignment(change: dict[str, Any], words: str) -> None:
    options = {"ids": ints(3, 2), "block_size": 4, "num_experts": 4, **change}
    refused(words, lambda: moe_align_block_size(**options))


def test_alignment_backends_and_buffers() -> None:
    refused("backend=None is not one of", lambda: moe_align_block_size(ints(3, 2), 4, 4, backend=None))
    refused("numel must be an integer", lambda: AlignBuffers.allocate("6", 4, 4, device=DEVICE))
    refused("device must be cpu", lambda: AlignBuffers.allocate(6, 4, 4, device="gpu"))
    # Two launches' scratch does not fit one of a larger batch.
    large = AlignBuffers.allocate(5000, 4, 4, device=DEVICE)
    refused(
        "out.scratch must hold | found a torch.Tensor",
        lambda: moe_align_block_size(ints(5000), 4, 4, out=replace(large, scratch=ints(1))),
    )


# ------------------------------------------------------------------ the gate, compiled, simulated, reference


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"router": None}, "router must be a Router, found None"),
        ({"hidden_size": "64"}, "hidden_size must be an integer, found '64'"),
        ({"hidden_size": 0}, "hidden_size must be in [1,"),
        ({"max_fused_tokens": 129}, "max_fused_tokens must be in [0, 128], found 129"),
        ({"max_fused_tokens": None}, "max_fused_tokens must be an integer, found None"),
        ({"backend": 3}, "backend=3 is not one of"),
        ({"pdl": None}, "pdl must be True or False"),
    ],
)
def test_gate_router(change: dict[str, Any], words: str) -> None:
    options = {"router": router(), "hidden_size": 64, **change}
    refused(words, lambda: GateRouter(**options))


HALF = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden": [[1.0]]}, "hidden must be a torch.Tensor, found a list"),
        ({"hidden": floats(64, **HALF)}, "hidden must have shape [T, 64], found [64]"),
        ({"hidden": floats(3, 64, dtype=torch.float16)}, "hidden must be bfloat16, found torch.float16"),
        ({"hidden": floats(3, 64, device=ELSEWHERE, **HALF)}, "hidden lies on meta"),
        ({"gate_weight": None}, "gate_weight must be a torch.Tensor, found None"),
        ({"gate_weight": floats(E, 64)}, "gate_weight must be bfloat16 or float16, found torch.float32"),
        ({"gate_weight": floats(E, 32, **HALF)}, "gate_weight must have shape [8, 64], found [8, 32]"),
        ({"layer": "0"}, "layer must be an integer"),
        ({"bias": [1.0]}, "bias must be a torch.Tensor, found a list"),
        ({"count": 1}, "count must be True or False"),
        ({"waterfill_target": ints(R)}, "waterfill_target needs"),
    ],
)
def test_gate_calls(change: dict[str, Any], words: str) -> None:
    mine = GateRouter(router(), 64)
    options = {"hidden": floats(3, 64, **HALF), "gate_weight": floats(E, 64, **HALF), "layer": 0, **change}
    refused(words, lambda: mine(**options))
    assert int(mine.router.counters.take().sum()) == 0
