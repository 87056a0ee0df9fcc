"""Launches of known forms: their arguments are those of the long way, and whatever differs goes back to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.direct import DirectLaunch, supports_direct
from evenroute.routing.kernels.plan import plan_launch, size_class
from evenroute.routing.launch import Launched, launch_arguments
from evenroute.routing.output import RouteCall, RoutingOutput, allocate_output
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

EXPERTS, LAYERS = 256, 3
CONFIG = RouterConfig(EXPERTS, 8, "sigmoid", 8, 4, routed_scaling_factor=2.5)


class Odd(torch.Tensor):
    """May be anything."""


class Kernel:
    """Stands for Triton's compiled kernel: keeps what it is started with."""

    function, packed_metadata = 11, 12

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []

    def run(self, *arguments: Any) -> None:
        self.started.append(arguments)


class Desk:
    """One router's direct launch over CPU tensors."""

    def __init__(self, **options: Any) -> None:
        placement = Placement.initial(LAYERS, EXPERTS, 288, Topology(32))
        tables = DispatchTables(placement, ep_rank=5, device="cpu")
        # As on a GPU: copies of counts on their own lines, so that every pointer is aligned.
        counters = ExpertCounters(LAYERS, EXPERTS, device="cpu", copies=16, ticket_copies=8)
        self.router = Router(CONFIG, tables, counters, **options)
        # As a router with a kernel has it.
        scratch = aligned(1 + self.router.plan.num_buckets, dtype=torch.int32)
        self.plan = replace(self.router.plan, scratch=scratch)
        self.direct = DirectLaunch(self.plan, False)
        self.direct.current_device = self.direct.current_stream = lambda *_: -1  # as tensors of a CPU say
        self.kernel = Kernel()

    def learn(self, call: RouteCall, out: RoutingOutput) -> None:
        constants = launch_arguments(self.plan, call, out)[2]
        self.direct.learn(call, out, Launched(self.kernel, constants))

    def launch(self, call: RouteCall, out: RoutingOutput | None) -> RoutingOutput | None:
        return self.direct.launch(
            call.logits,
            call.layer,
            call.bias,
            call.num_valid_tokens,
            call.row_offset,
            call.count,
            call.route_padding,
            out,
        )


def aligned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros that begin on 16 bytes, as all memory of a GPU does."""
    length = torch.Size(shape).numel()
    memory = torch.zeros(length + 16, dtype=dtype)
    skip = -memory.data_ptr() % 16 // memory.element_size()
    return memory[skip : skip + length].view(shape)


def make_call(rows: int, layer: int = 0, **changes: Any) -> RouteCall:
    values: dict[str, Any] = {
        "logits": aligned(rows, EXPERTS),
        "bias": aligned(EXPERTS),
        "num_valid_tokens": aligned(1, dtype=torch.int32),
    }
    return RouteCall(rows, layer, **{**values, **changes})


def make_output(desk: Desk, rows: int) -> RoutingOutput:
    out = allocate_output(desk.plan, rows, torch.device("cpu"))
    for name in ("weights", "physical_ids", "logical_ids", "local_ids", "packed_ids"):
        tensor = getattr(out, name)
        if tensor is not None and tensor.numel():
            setattr(out, name, aligned(*tensor.shape, dtype=tensor.dtype))
    if out.slot_histogram is not None:
        out.slot_histogram = aligned(*out.slot_histogram.shape, dtype=torch.int32)
    return out


def addresses(arguments: list[Any]) -> list[Any]:
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]


FORMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "no bias": {"bias": None},
    "bf16 logits, bf16 bias": {
        "logits": aligned(40, EXPERTS, dtype=torch.bfloat16),
        "bias": aligned(EXPERTS, dtype=torch.bfloat16),
    },
    "no padding": {"num_valid_tokens": None},
    "not counting": {"count": False},
    "a flag": {"count": aligned(1, dtype=torch.bool)},
    "padding routed": {"route_padding": True},
    "late rows": {"row_offset": (1 << 32) + (1 << 31) + 7},
    "rows apart": {"logits": aligned(40, 2 * EXPERTS)[:, :EXPERTS]},
}


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize(
    "options",
    [
        {"dispatch": "dynamic"},
        {"dispatch": "weighted", "emit": ("weights", "physical_ids", "logical_ids", "slot_histogram")},
        {"dispatch": "rank_invariant", "tokens": "shared", "emit": ("packed_ids", "local_ids")},
    ],
)
def test_started_as_by_the_long_way(name: str, options: dict[str, Any]) -> None:
    """Every pointer and number in its place, for a layer and outputs that were not there when the form was learned."""
    desk = Desk(**options)
    call = make_call(40, 0, **FORMS[name])
    out = make_output(desk, 40)
    assert desk.launch(call, out) is None, "not known yet"
    desk.learn(call, out)
    other = make_call(40, 2, **FORMS[name])
    assert desk.launch(other, out) is out
    (started,) = desk.kernel.started
    grid, arguments, constants, _ = launch_arguments(desk.plan, other, out)
    assert started[:9] == (*grid, 1, 1, -1, 11, 12, None, None, None)
    wanted = addresses(arguments)
    unused = desk.plan.seed.data_ptr()
    for place, (found, right) in enumerate(zip(started[9:-1], wanted, strict=True)):
        # What is not emitted is never written: any address will do.
        assert found == right or (place < 6 and right in (0, unused) and found == 0), (place, found, right)
    assert started[-1] == constants


def test_fresh_outputs_and_other_sizes_of_the_class() -> None:
    desk = Desk()
    call = make_call(40)
    desk.learn(call, make_output(desk, 40))
    for rows in (1, 2, 255, 256):
        out = desk.launch(make_call(rows), None)
        assert out is not None
        assert out.physical_ids.shape == (rows, 8)
        assert desk.kernel.started[-1][0] == -(-rows // desk.direct.forms[next(iter(desk.direct.forms))].rows)
    assert desk.launch(make_call(257), None) is None, "another plan"


STRANGERS: dict[str, Callable[[RouteCall], dict[str, Any]]] = {
    "logits of another dtype": lambda call: {"logits": call.logits.half()},  # type: ignore[union-attr]
    "logits of another width": lambda call: {"logits": aligned(40, EXPERTS + 4)[:, 1:]},
    "logits that step": lambda call: {"logits": aligned(EXPERTS, 40).t()},
    "three dimensions": lambda call: {"logits": aligned(40, EXPERTS, 1)},
    "a subclass": lambda call: {"logits": call.logits.as_subclass(Odd)},
    "no tensor": lambda call: {"logits": [[0.0]]},
    "sparse logits": lambda call: {"logits": call.logits.to_sparse()},  # type: ignore[union-attr]
    "a gradient": lambda call: {"logits": aligned(40, EXPERTS).requires_grad_()},
    "an odd address": lambda call: {"logits": aligned(41 * EXPERTS)[1 : 40 * EXPERTS + 1].view(40, EXPERTS)},
    "bias a row": lambda call: {"bias": aligned(40, EXPERTS)},
    "a short bias": lambda call: {"bias": aligned(EXPERTS - 4)},
    "bias of another dtype": lambda call: {"bias": aligned(EXPERTS, dtype=torch.float64)},
    "sparse bias": lambda call: {"bias": call.bias.to_sparse()},  # type: ignore[union-attr]
    "valid rows as int64": lambda call: {"num_valid_tokens": aligned(1, dtype=torch.int64)},
    "two numbers of valid rows": lambda call: {"num_valid_tokens": aligned(2, dtype=torch.int32)},
    "a float flag": lambda call: {"count": aligned(1)},
    "count=1": lambda call: {"count": 1},
    "layer past the end": lambda call: {"layer": LAYERS},
    "layer True": lambda call: {"layer": True},
    "a negative offset": lambda call: {"row_offset": -1},
    "route_padding=1": lambda call: {"route_padding": 1},
}


@pytest.mark.parametrize("name", list(STRANGERS))
def test_what_differs_takes_the_long_way(name: str) -> None:
    """Where it is checked in full; nothing is started, even after the call went through once."""
    desk = Desk()
    call, out = make_call(40), make_output(desk, 40)
    desk.learn(call, out)
    changed = {**call.__dict__, **STRANGERS[name](call)}
    assert desk.launch(RouteCall(**changed), out) is None
    assert desk.kernel.started == []


def test_outputs_that_are_not_those_checked() -> None:
    desk, other = Desk(), Desk()
    call, out = make_call(40), make_output(desk, 40)
    desk.learn(call, out)
    other.learn(call, make_output(other, 40))
    assert other.launch(call, out) is None, "another router's"
    assert desk.launch(make_call(39), out) is None, "another number of rows"
    kept = out.weights
    out.weights = aligned(40, 8)
    assert desk.launch(call, out) is None, "another tensor"
    out.weights = kept
    assert desk.launch(call, out) is out
    kept.set_(aligned(40, 8))  # type: ignore[call-overload]
    assert desk.launch(call, out) is None, "other memory"


def test_profilers_and_other_devices_take_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    call, out = make_call(40), make_output(desk, 40)
    desk.learn(call, out)
    for hook in desk.direct.hooks:
        hook.add(print)
        try:
            assert desk.launch(call, out) is None
        finally:
            hook.remove(print)
    monkeypatch.setattr(desk.direct, "current_device", lambda: 1)
    assert desk.launch(call, out) is None


def test_a_class_of_sizes_has_one_plan() -> None:
    for config in (CONFIG, RouterConfig(384, 8), RouterConfig(896, 16), RouterConfig(2048, 32)):
        for low, high in ((1, 256), (257, 4096), (4097, 1 << 20)):
            assert size_class(low) == size_class(high)
            assert plan_launch(config, low) == plan_launch(config, high)


def test_versions_of_triton() -> None:
    known = [
        name
        for name in ("3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.10.0", "4.0.0", "odd")
        if supports_direct(name)
    ]
    assert known == ["3.6.0", "3.7.1", "3.8.0", "3.9.0"]


def test_warm_up_on_a_cpu_has_nothing_to_compile_and_checks() -> None:
    router = Desk().router
    assert router.warm_up([1, 8192]).compiled == ()
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (0, {}, "rows"),
        ([], {}, "rows is empty"),
        ("8", {}, "rows"),
        (8, {"dtype": torch.int32}, "dtype"),
        (8, {"bias": torch.zeros(3)}, "bias"),
        (8, {"padding": 1}, "padding"),
    ]
    for rows, options, words in wrong:
        with pytest.raises(ValueError, match=words):
            router.warm_up(rows, **options)
