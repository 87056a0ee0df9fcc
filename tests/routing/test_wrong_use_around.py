"""What callers of formats, alignment, gate, compiled and simulated routing and the reference get wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.align.align import moe_align_block_size, moe_align_block_size_torch
from evenroute.routing.align.plan import AlignBuffers
from evenroute.routing.compiled import CompiledGateRouter, CompiledRouter
from evenroute.routing.formats import (
    BypassedRouting,
    PackedRouting,
    RaggedRouting,
    pack_ids,
    require_trivial,
    unpack_ids,
)
from evenroute.routing.gate import GateRouter, gate_logits, summation_error
from evenroute.routing.reference import (
    Scores,
    finish_weights,
    gather_scores,
    score_experts,
    select_experts,
    select_largest,
    sort_columns,
)
from evenroute.routing.router import Router
from evenroute.routing.simulated.source import LogitSource
from evenroute.routing.tables.tables import DispatchTables
from evenroute.routing.waterfill import waterfill_ranks
from support.interpreted import BACKEND, DEVICE
from support.refusals import refused
from support.wrong_use import CALLS, CONFIG, ELSEWHERE, E, K, L, R, floats, ints, router

# ------------------------------------------------------------------------------ formats and alignment


def test_packing() -> None:
    ids, weights = ints(2, K), floats(2, K)
    for bad, words in (
        ([[0, 1]], "physical_ids must be a torch.Tensor, found a list"),
        (floats(2, K), "physical_ids must be int32 or int64"),
        (ints(2, K, dtype=torch.int16), "physical_ids must be int32 or int64"),
        (ids + (1 << 15), "physical_ids must lie in [-1, 32768) to be packed, found 32768 to 32768"),
        (ids - 2, "physical_ids must lie in [-1, 32768) to be packed, found -2 to -2"),
        (ids.long() + (1 << 40), "physical_ids must lie in [-1, 32768)"),
    ):
        refused(words, lambda b=bad: pack_ids(b, weights))
    for bad, words in (
        (1.0, "weights must be a torch.Tensor, found 1.0"),
        (ints(2, K), "weights must be float32"),
        (floats(2, K + 1), "weights must have shape [2, 2], found [2, 3]"),
        (floats(2, K, device=ELSEWHERE), "weights lies on meta"),
    ):
        refused(words, lambda b=bad: pack_ids(ids, b))
    for bad, words in (
        (1 << 16, "num_buckets must be in [1, 32768]"),
        ("9", "num_buckets must be an integer"),
    ):
        refused(words, lambda b=bad: pack_ids(ids, weights, num_buckets=b))
    refused("packed_ids must be int32", lambda: unpack_ids(ids.long()))
    refused("packed_ids must be a torch.Tensor", lambda: unpack_ids(None))
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
    refused("output must be a RoutingOutput, found None", lambda: form.from_output(None))


def test_a_format_of_outputs_that_do_not_belong_together_is_refused() -> None:
    output = replace(router()(floats(3, E), 0), weights=floats(2, K))
    for form in (PackedRouting, RaggedRouting):
        refused(
            "weights and physical_ids must have one shape, found [2, 2] and [3, 2]",
            lambda f=form: f.from_output(output),
        )
    refused(
        "num_buckets must be an integer", lambda: RaggedRouting.from_output(router()(floats(3, E), 0), "12")
    )


def test_bypassed() -> None:
    plain = Router(CONFIG, DispatchTables(Placement.initial(1, E, E, Topology(1)), ep_rank=0, device=DEVICE))
    make = BypassedRouting.from_logits
    refused("router must be a Router, found None", lambda: make(None, floats(3, E), 0))
    refused("logits must be a torch.Tensor, found None", lambda: make(plain, None, 0))
    refused("logits must have shape [T, 8], found [3, 9]", lambda: make(plain, floats(3, 9), 0))
    refused("layer=1 is outside [0, num_layers=1)", lambda: make(plain, floats(3, E), 1))
    refused("biass is not one of a call's arguments | bias", lambda: make(plain, floats(3, E), 0, biass=None))
    refused("tables must be a DispatchTables, found None", lambda: require_trivial(None, 0))
    refused("layer must be an integer", lambda: require_trivial(plain.tables, "0"))


def align_buffers(**change: Any) -> AlignBuffers:
    return replace(AlignBuffers.allocate(6, 4, 4, device=DEVICE), **change)


@pytest.mark.parametrize("function", [moe_align_block_size, moe_align_block_size_torch])
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
def test_alignment(function: Any, change: dict[str, Any], words: str) -> None:
    options = {"ids": ints(3, 2), "block_size": 4, "num_experts": 4, **change}
    refused(words, lambda: function(**options))


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


@pytest.mark.parametrize("compiled", [False, True])
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
def test_gate_calls(compiled: bool, change: dict[str, Any], words: str) -> None:
    mine = GateRouter(router(), 64)
    if compiled and ELSEWHERE in words:
        pytest.skip("the operator's fake kernel takes meta tensors")
    options = {"hidden": floats(3, 64, **HALF), "gate_weight": floats(E, 64, **HALF), "layer": 0, **change}
    refused(words, lambda: (CompiledGateRouter(mine) if compiled else mine)(**options))
    assert int(mine.router.counters.take().sum()) == 0


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[words.split(",")[0][:40] for *_, words in CALLS])
def test_compiled_calls(number: int) -> None:
    base, change, words = CALLS[number]
    if ELSEWHERE in words or "out" in change:
        pytest.skip("the operator's fake kernel takes meta tensors, and it has no out")
    mine = router()
    options = {"layer": 0, **base, **change}
    if "logits=None" in words or options["layer"] in (L, -1):
        words = "layer" if "layer" in change else words
    refused(words, lambda: CompiledRouter(mine)(options.pop("logits"), options.pop("layer"), **options))
    assert int(mine.counters.take().sum()) == 0


def test_compiled_routers_take_routers() -> None:
    refused("router must be a Router, found None", lambda: CompiledRouter(None))
    refused("gate must be a GateRouter", lambda: CompiledGateRouter(router()))


def source(
    kind: Any = "uniform", config: Any = CONFIG, num_layers: Any = L, seed: Any = 0, **options: Any
) -> Any:
    return LogitSource(kind, config, num_layers, seed, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": None}, "routing kind=None is not one of"),
        ({"config": 8}, "config must have num_experts, as a RouterConfig has; found 8"),
        ({"num_layers": "2"}, "num_layers must be an integer, found '2'"),
        ({"num_layers": 0}, "num_layers must be >= 1"),
        ({"seed": 1.5}, "seed must be an integer, found 1.5"),
        ({"rank": "0"}, "rank must be an integer"),
        ({"ep_size": 2.0}, "ep_size must be an integer"),
        ({"rank": 3, "ep_size": 2}, "rank: expected 0 <= rank < ep_size 2, found 3"),
        ({"shared": 1}, "shared must be True or False"),
        ({"kind": "zipf", "exponent": "1"}, "exponent must be a finite number, found '1'"),
        ({"kind": "zipf", "exponent": float("nan")}, "exponent must be a finite number, found nan"),
        ({"bias": [0.0] * E}, "bias must be a torch.Tensor, found a list"),
        ({"bias": floats(E + 1)}, "bias must have shape [8] or [2, 8], found [9]"),
        ({"device": "gpu"}, "device must be cpu, cuda or cuda:N, found 'gpu'"),
        ({"kind": "trace", "loads": "x.json"}, "loads: expected numbers"),
        ({"kind": "trace", "loads": [[1, 2], [3]]}, "loads: expected numbers"),
        ({"kind": "trace", "loads": None}, "needs loads"),
    ],
)
def test_simulated_sources(options: dict[str, Any], words: str) -> None:
    refused(words, lambda: source(**options))


def test_methods_of_simulated_sources() -> None:
    given = source()
    for arguments, words in (
        (("0", 3, 0), "layer must be an integer"),
        ((2, 3, 0), "layer=2 is outside [0, num_layers=2)"),
        ((0, 3.0, 0), "num_tokens must be an integer"),
        ((0, -3, 0), "num_tokens must be >= 0"),
        ((0, 3, None), "step must be an integer"),
        ((0, 3, -1), "step must be in [0,"),
        ((0, 3, 0, 2), "num_valid_tokens must be a torch.Tensor, found 2"),
    ):
        refused(words, lambda a=arguments: given.ids(*a))
    refused("num_tokens must be", lambda: given.weights("3"))
    refused("seed must be an integer", lambda: given.reshuffle("3"))
    refused("layer=9 is outside", lambda: given.frequencies(9))


def test_reference_functions() -> None:
    scores = score_experts(floats(3, E), CONFIG)
    ids = select_experts(scores.keys, CONFIG)
    for call, words in (
        (lambda: score_experts(np.ones((3, E)), CONFIG), "logits must be a torch.Tensor, found a numpy.ndarray"),
        (lambda: score_experts(floats(3, 9), CONFIG), "logits must have shape [T, 8], found [3, 9]"),
        (lambda: score_experts(ints(3, E), CONFIG), "logits must be float32"),
        (lambda: score_experts(floats(3, E), None), "config must be a RouterConfig, found None"),
        (lambda: score_experts(floats(3, E), CONFIG, floats(3)), "bias must have shape [8] or [3, 8], found [3]"),
        (lambda: score_experts(floats(3, E), CONFIG, None, floats(E)), "marked_bias and token_marker come together"),
        (lambda: select_experts(scores.keys.double(), CONFIG), "keys must be float32, found torch.float64"),
        (lambda: select_experts([1.0], CONFIG), "keys must be a torch.Tensor, found a list"),
        (lambda: select_largest(floats(3, E), 2), "ordered must be int32"),
        (lambda: select_largest(ints(3, E), 9), "count must be in [1, 8], found 9"),
        (lambda: gather_scores((1, 2), ids), "scores must be a Scores, found a tuple"),
        (lambda: gather_scores(Scores(1, 2), ids), "scores.scores must be a torch.Tensor") ,
        (lambda: gather_scores(scores, ids.int()), "ids must be int64, found torch.int32"),
        (lambda: finish_weights(floats(3, 5), CONFIG), "weights must have shape [T, 2], found [3, 5]"),
        (lambda: finish_weights([1.0], CONFIG), "weights must be a torch.Tensor, found a list"),
        (lambda: sort_columns(ids, floats(3, 5)), "weights must have shape [3, 2], found [3, 5]"),
        (lambda: gate_logits(floats(3, 4), floats(8, 5)), "gate_weight must have shape [E, 4], found [8, 5]"),
        (lambda: summation_error(floats(3, 4), floats(8, 4)), "hidden must be bfloat16 or float16"),
        (lambda: waterfill_ranks([1], ints(1), 3, 0), "load must be a torch.Tensor, found a list"),
        (lambda: waterfill_ranks(ints(2), ints(2), 3, 2), "ep_rank must be in [0, 1], found 2"),
        (lambda: waterfill_ranks(ints(2), ints(3), 3, 0), "target must have shape [2], found [3]"),
    ):  # fmt: skip
        refused(words, call)
