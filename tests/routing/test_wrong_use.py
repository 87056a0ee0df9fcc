"""What callers of the router get wrong: one ValueError of one line: the field, what was found, what is allowed.

Nothing is routed or counted by a refused call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from evenroute.eplb.placement.placement import PlacementRow
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables
from support.interpreted import BACKEND, DEVICE
from support.refusals import refused
from support.wrong_use import (
    CALLS,
    CONFIG,
    ELSEWHERE,
    E,
    K,
    L,
    P,
    R,
    floats,
    ints,
    placement,
    router,
    tables,
)

FLAGS = ("renormalize", "apply_routed_scaling_factor")
NAMES = ("scoring", "topk_method", "bias_domain", "shared_mode", "column_order")
NO_NAMES = (None, 3, ["key"], np.zeros(2), torch.zeros(2), "SOFTMAX")
NOT_INTS = [
    ("8", "'8'"),
    (8.0, "8.0"),
    (True, "True"),
    (None, "None"),
    ([8], "a list"),
    (np.int64(8), "numpy.int64"),
]


# -------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize("field", ["num_experts", "top_k", "num_groups", "topk_group", "num_shared_experts"])
@pytest.mark.parametrize(("value", "found"), NOT_INTS)
def test_config_takes_integers(field: str, value: object, found: str) -> None:
    refused(
        f"{field} must be an integer | {found}",
        lambda: RouterConfig(**{"num_experts": 8, "top_k": 2, field: value}),
    )


@pytest.mark.parametrize("field", ["routed_scaling_factor", "renormalize_epsilon", "softcap"])
@pytest.mark.parametrize("value", ["1", True, [1.0], float("nan"), float("inf"), 10**400, np.ones(2), 1j])
def test_config_takes_numbers(field: str, value: object) -> None:
    refused(f"{field} must be a finite number", lambda: RouterConfig(8, 2, **{field: value}))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        *((name, bad, f"{name} must be True or False") for name in FLAGS for bad in ("no", 1, None)),
        *((name, bad, f"{name}= | is not one of") for name in NAMES for bad in NO_NAMES),
        ("routed_scaling_factor", 0, "must be > 0"),
        ("renormalize_epsilon", -1.0, "must be >= 0"),
        ("softcap", -2, "must be > 0"),
    ],
)  # fmt: skip
def test_config_takes_names_and_flags(field: str, value: object, words: str) -> None:
    refused(words, lambda: RouterConfig(8, 2, **{field: value}))


# -------------------------------------------------------------------------- tables, counters, router


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"placement": None}, "placement must be a Placement, found None"),
        ({"placement": np.zeros((2, 12))}, "placement must be a Placement | numpy.ndarray"),
        ({"ep_rank": "1"}, "ep_rank must be an integer, found '1'"),
        ({"ep_rank": True}, "ep_rank must be an integer"),
        ({"ep_rank": 4}, "ep_rank=4 is outside [0, ep_size=4)"),
        ({"ep_rank": -1}, "ep_rank must be >= 0, found -1"),
        ({"device": "gpu"}, "device must be cpu, cuda or cuda:N, found 'gpu'"),
        ({"device": None}, "device must be cpu, cuda or cuda:N"),
        ({"device": 1.5}, "device must be cpu, cuda or cuda:N, found 1.5"),
        ({"device": "meta"}, "device must be cpu, cuda or cuda:N, found 'meta'"),
        ({"device": "cuda:99"}, "device='cuda:99': this process sees | CUDA devices"),
    ],
)
def test_tables(change: dict[str, object], words: str) -> None:
    options = {"placement": placement(), "ep_rank": 1, "device": DEVICE, **change}
    refused(words, lambda: DispatchTables(options.pop("placement"), **options))


ROW = placement().row(0).slots


def changed(slot: int, expert: int) -> np.ndarray:
    row = ROW.copy()
    row[slot] = expert
    return row


@pytest.mark.parametrize(
    ("layer", "row", "words"),
    [
        ("0", PlacementRow(ROW, None), "layer must be an integer, found '0'"),
        (2, PlacementRow(ROW, None), "layer=2 is outside [0, num_layers=2)"),
        (0, ROW, "row.slots must be a numpy array of integers [12], found a numpy.ndarray"),
        (0, None, "row.slots | found None"),
        (0, PlacementRow(ROW.tolist(), None), "row.slots | found a list"),
        (0, PlacementRow(ROW.astype(np.float64), None), "row.slots must be a numpy array of integers"),
        (0, PlacementRow(ROW.reshape(3, 4), None), "row.slots must be a numpy array of integers [12]"),
        (0, PlacementRow(ROW[:8], None), "row has 8 slots, the tables have 12"),
        (0, PlacementRow(changed(3, 8), None), "row: slot 3 holds no expert of [0, 8)"),
        (0, PlacementRow(changed(3, -1), None), "row: slot 3 holds no expert of [0, 8)"),
        (0, PlacementRow(changed(3, 3).astype(np.int64) + (1 << 32), None), "row.slots: experts of [0, 8)"),
        (0, PlacementRow(changed(1, 0), None), "row: slot 1 holds an expert that its rank has already"),
        (0, PlacementRow(changed(5, 0), None), "row: expert 5 has no slot"),
        (0, PlacementRow(ROW, np.full(12, 7, np.uint16)), "row: shares of expert 0 do not sum to 65535"),
        (0, PlacementRow(ROW, np.full(12, 0.5)), "row.shares must be a numpy array of integers"),
        (0, PlacementRow(ROW, np.full(12, 7)), "row.shares must be uint16, found int64"),
        (0, PlacementRow(ROW, np.full(11, 7, np.uint16)), "row has 11 shares"),
    ],
)  # fmt: skip
def test_a_wrong_row_changes_nothing(layer: object, row: object, words: str) -> None:
    mine = tables()
    before = mine.storage.clone()
    refused(words, lambda: mine.update_layer(layer, row))
    assert torch.equal(mine.storage, before)


def test_tables_load_and_prepare_placements_alone() -> None:
    for method in ("load", "prepare"):
        refused(
            "placement must be a Placement, found 'p.json'", lambda m=method: getattr(tables(), m)("p.json")
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2", E), "num_layers must be an integer, found '2'"),
        ((2, 8.0), "num_logical_experts must be an integer, found 8.0"),
        ((0, E), "num_layers must be in [1,"),
        ((2, 4096), "num_logical_experts must be in [1, 2048], found 4096"),
        ((2**70, E), "num_layers must be in [1,"),
    ],
)
def test_counters(arguments: tuple[object, ...], words: str) -> None:
    refused(words, lambda: ExpertCounters(*arguments, device=DEVICE))


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ([1], "out must be a torch.Tensor, found a list"),
        (np.zeros((L, E), np.int64), "out must be a torch.Tensor, found a numpy.ndarray"),
        (torch.zeros(L, E), "out must be int64, found torch.float32"),
        (torch.zeros(E, L, dtype=torch.int64), "out must have shape [2, 8], found [8, 2]"),
        (torch.zeros(L, E, dtype=torch.int64).to_sparse(), "out must be a dense tensor"),
    ],
)
def test_a_refused_take_takes_nothing(out: object, words: str) -> None:
    counters = ExpertCounters(L, E, device=DEVICE)
    counters.counts += 1
    refused(words, lambda: counters.take(out))
    assert int(counters.take().sum()) == L * E * counters.copies
    for name in ("copies", "ticket_copies"):
        refused(f"{name} must be | 0", lambda n=name: ExpertCounters(L, E, device=DEVICE, **{n: 0}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"num_experts": 8}}, "config must be a RouterConfig, found a dict"),
        ({"tables": None}, "tables must be a DispatchTables, found None"),
        ({"counters": torch.zeros(2, 8)}, "counters must be a ExpertCounters, found a torch.Tensor"),
        ({"counters": ExpertCounters(3, 8, device=DEVICE)}, "counters have (layers, experts, device) (3, 8,"),
        ({"config": RouterConfig(16, 2)}, "config.num_experts=16, the tables hold 8"),
        ({"dispatch": None}, "dispatch=None is not one of"),
        ({"dispatch": ("static",)}, "dispatch=a tuple is not one of"),
        ({"deal": 1}, "deal=1 is not one of exact, hash"),
        ({"tokens": "Own"}, "tokens='Own' is not one of own, shared"),
        ({"backend": True}, "backend=True is not one of"),
        ({"emit": "weights"}, "emit must be a tuple of names | found 'weights'"),
        ({"emit": None}, "emit must be a tuple of names | found None"),
        ({"emit": ("weights", 1)}, "emit=1 is not one of"),
        ({"emit": {"weights": 1}}, "emit must be a tuple of names | found a dict"),
        ({"pdl": "yes"}, "pdl must be True or False, found 'yes'"),
        ({"custom_routing_function": 5}, "custom_routing_function must be callable, found 5"),
    ],
)
def test_router(change: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {"config": CONFIG, "tables": tables(), **change}
    refused(words, lambda: Router(options.pop("config"), options.pop("tables"), **options))


def test_waterfill_is_refused_before_anything_is_counted() -> None:
    config = replace(CONFIG, num_shared_experts=1, shared_mode="waterfill")
    for emit in (("weights",), ("physical_ids",), ("weights", "physical_ids", "packed_ids"), ()):
        refused(
            "shared_mode='waterfill' rewrites weights and physical_ids",
            lambda e=emit: router(config=config, emit=e),
        )


def test_methods_of_the_router() -> None:
    for bad in ("3", 2.5, True, None, -1):
        refused("num_tokens must be", lambda b=bad: router().allocate(b))
    for bad in ("3", 2.5, True, None, 1 << 70):
        refused("seed must be", lambda b=bad: router().set_seed(b))


# ------------------------------------------------------------------------------------------- one call


@pytest.mark.parametrize("backend", ["reference", BACKEND])
@pytest.mark.parametrize("number", range(len(CALLS)), ids=[words.split(",")[0][:40] for *_, words in CALLS])
def test_a_refused_call_routes_and_counts_nothing(backend: str, number: int) -> None:
    base, change, words = CALLS[number]
    mine = router(backend=backend)
    options = {"layer": 0, **base, **change}
    refused(words, lambda: mine(options.pop("logits"), options.pop("layer"), **options))
    assert int(mine.counters.take().sum()) == 0


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ([3, 3, 3, 3], "waterfill_target must be a torch.Tensor, found a list"),
        (ints(R, dtype=torch.bool), "waterfill_target must be int64 or int32 or float32"),
        (ints(R + 1), "waterfill_target must have shape [4], found [5]"),
        (ints(R, device=ELSEWHERE), "waterfill_target lies on meta"),
    ],
)
def test_waterfill_target(target: object, words: str) -> None:
    mine = router(config=replace(CONFIG, num_shared_experts=1, shared_mode="waterfill"))
    refused(words, lambda: mine(floats(3, E), 0, waterfill_target=target))
    assert int(mine.counters.take().sum()) == 0


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_out_must_be_this_batchs_buffers(backend: str) -> None:
    mine = router(backend=backend, emit=("weights", "physical_ids", "slot_histogram"))
    good = mine.allocate(3)
    wide = floats(3, 2 * K)[:, ::2]
    for change, words in (
        ({"weights": floats(4, K)}, "out.weights must have shape [3, 2], found [4, 2]"),
        ({"weights": floats(3, K, dtype=torch.float16)}, "out.weights must be float32"),
        ({"weights": wide}, "out.weights must be contiguous, found strides [4, 2]"),
        ({"weights": None}, "out.weights must be a torch.Tensor, found None"),
        ({"physical_ids": ints(3, K, dtype=torch.int64)}, "out.physical_ids must be int32"),
        ({"physical_ids": ints(3, K, device=ELSEWHERE)}, "out.physical_ids lies on meta"),
        ({"slot_histogram": ints(P + 1)}, "out.slot_histogram must have shape [12], found [13]"),
    ):
        refused(words, lambda c=change: mine(floats(3, E), 0, out=replace(good, **c)))
    refused("out.weights must have shape [3, 2]", lambda: mine(floats(3, E), 0, out=mine.allocate(2)))
    refused(
        "out holds weights, physical_ids; this router emits weights, physical_ids, slot_histogram",
        lambda: mine(floats(3, E), 0, out=router().allocate(3)),
    )
    assert int(mine.counters.take().sum()) == 0
    mine(floats(3, E), 0, out=good)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *_: None, "custom_routing_function must return (weights, logical_ids), found None"),
        (lambda *_: floats(3, K), "custom_routing_function must return (weights, logical_ids), found a torch.Tensor"),
        (lambda *_: (floats(3, K), None), "custom_routing_function must return | float32 [3, 2] on | , None)"),
        (lambda *_: (ints(3, K), floats(3, K)), "logical_ids must be int32 or int64, found torch.float32"),
        (lambda *_: (floats(2, K), ints(3, K)), "weights must have shape [3, 2], found [2, 2]"),
    ],
)  # fmt: skip
def test_what_a_custom_routing_function_returns(function: Any, words: str) -> None:
    mine = router(custom_routing_function=function)
    refused(words, lambda: mine(floats(3, E), 0))
    refused("weights: the custom_routing_function", lambda: mine(floats(3, E), 0, weights=floats(3, K)))


# -------------------------------------------------------------------------- what is right though odd


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_odd_inputs_that_mean_something_are_routed(backend: str) -> None:
    """Gradients wanted, other strides, other float dtypes of the bias, one element in any shape, inference mode."""
    x = torch.randn(5, E, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    bias = torch.linspace(-1, 1, E).to(DEVICE)
    wanted = router(backend=backend)(x, 0, bias=bias)
    parameter = torch.nn.Parameter(bias.clone())
    turned = x.t().contiguous().t()
    assert not turned.is_contiguous()
    one = torch.tensor([[5]], dtype=torch.int32, device=DEVICE)
    for logits, own in (
        (x.clone().requires_grad_(), parameter),
        (turned, bias.repeat(2).view(2, E).t().contiguous().t()[1]),
        (x, bias.double()),
        (x, bias.repeat(5, 1)),
    ):
        mine = router(backend=backend)
        found = mine(logits, 0, bias=own, num_valid_tokens=one, out=mine.allocate(5))
        # Kernels compiled for another kind of bias may add up a row's denominator in another order.
        torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-6, atol=0)
        assert torch.equal(found.physical_ids, wanted.physical_ids)
        assert found.weights.requires_grad == logits.requires_grad  # the bias has no gradient
    with torch.inference_mode():
        mine = router(backend=backend)
        buffers = mine.allocate(5)
        mine(x, 0, bias=parameter)
    found = mine(x, 0, bias=parameter, out=buffers)  # and outside again
    assert torch.equal(found.weights, wanted.weights)
    mine.tables.update_layer(0, PlacementRow(ROW, None))
    mine.set_seed(3)
    assert int(mine.counters.take().sum()) == 2 * 5 * K


@pytest.mark.parametrize("backend", ["reference", BACKEND])
def test_a_bias_of_eight_bits_is_not_rounded(backend: str) -> None:
    bias = torch.linspace(-3, 3, E).to(DEVICE)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        own = bias.to(dtype)
        for call in ({"bias": own}, {"marked_bias": own, "token_marker": floats(3).bool()}):
            found = router(backend=backend)(floats(3, E), 0, **call).weights
            assert torch.equal(found, router(backend=backend)(floats(3, E), 0, bias=own.float()).weights)
