"""Routers for compiled models: `torch.compile(fullgraph=True)` takes the routing launches as they are.

Importing this registers `torch.ops.evenroute.route`, `.gate_route` and `.align`, with fake kernels. The first two find
their router by a handle and name the counters and tickets as mutated arguments: a compiler keeps every call, in order,
even if its outputs are equal or unused.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from evenroute.routing.align.align import moe_align_block_size
from evenroute.routing.align.plan import align_capacity
from evenroute.routing.gate import GateRouter
from evenroute.routing.output import OUTPUT_NAMES, RoutingOutput
from evenroute.routing.router import Router

Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

# The tensors that a call may name; behind them every operator takes the same arguments.
ROUTE_INPUTS = (
    *("logits", "logical_ids", "weights", "bias", "marked_bias", "token_marker", "expert_ids_by_token"),
    *("token_ids", "num_valid_tokens", "count_flag", "waterfill_target"),
)
GATE_INPUTS = ("bias", "marked_bias", "token_marker", "num_valid_tokens", "count_flag", "waterfill_target")
_ROUTER_ARGUMENTS = (
    *("Tensor tables", "Tensor seed", "Tensor(a!) counts", "Tensor(b!)? tickets"),
    *("str handle", "int layer", "int row_offset", "bool count", "bool route_padding"),
)

_routers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def _find(handle: str) -> Any:
    router = _routers.get(handle)
    if router is None:
        raise ValueError(f"handle={handle!r}: this router is gone; keep its CompiledRouter alive")
    return router


def _with_counters(router: Router, counts: Tensor, tickets: Tensor | None) -> Router:
    """The router, counting into these tensors: functionalised graphs pass copies and write them back."""
    mine = router.counters
    same = counts.data_ptr() == mine.counts.data_ptr() and (
        tickets is None or mine.tickets is None or tickets.data_ptr() == mine.tickets.data_ptr()
    )
    if same:
        return router
    counters = copy.copy(mine)
    counters.counts, counters.tickets = counts, tickets
    other = copy.copy(router)
    other.counters = counters
    other.plan = replace(router.plan, counters=counters)
    other.direct = None  # that one counts into the router's own
    return other


def _all_outputs(output: RoutingOutput) -> Outputs:
    """The six tensors of an output; a new empty one in place of each that was not emitted."""
    found = (getattr(output, name) for name in OUTPUT_NAMES)
    empty = output.weights.new_empty
    weights, *rest = (empty((0,), dtype=torch.int32) if tensor is None else tensor for tensor in found)
    return (weights, *rest)  # type: ignore[return-value]


def _fake_outputs(router: Router, num_tokens: int, like: Tensor) -> Outputs:
    def one(name: str) -> Tensor:
        shape: tuple[int, ...] = (num_tokens, router.config.num_columns)
        if name == "slot_histogram":
            shape = (router.plan.num_buckets,)
        dtype = torch.float32 if name == "weights" else torch.int32
        return like.new_empty(shape if name in router.plan.emit else (0,), dtype=dtype)

    weights, *rest = map(one, OUTPUT_NAMES)
    return (weights, *rest)  # type: ignore[return-value]


def _register(
    name: str,
    inputs: list[str],
    call: Callable[[dict[str, Any]], Outputs],
    fake: Callable[[dict[str, Any]], Outputs],
) -> None:
    """An operator of `inputs` (types and names) and the router's arguments; `call` and `fake` take them by name."""
    arguments = [*inputs, *_ROUTER_ARGUMENTS]
    names = [argument.split()[-1] for argument in arguments]
    schema = f"({', '.join(arguments)}) -> ({', '.join(['Tensor'] * len(OUTPUT_NAMES))})"

    def run(*values: Any) -> Outputs:
        return call(dict(zip(names, values, strict=True)))

    operator = torch.library.custom_op(name, run, mutates_args=("counts", "tickets"), schema=schema)
    operator.register_fake(lambda *values: fake(dict(zip(names, values, strict=True))))


def _route(given: dict[str, Any]) -> Outputs:
    """`Router.__call__`: all of `output.OUTPUT_NAMES`, in order, empty where the router does not emit them."""
    router = _with_counters(_find(given.pop("handle")), given.pop("counts"), given.pop("tickets"))
    return _all_outputs(router(**_by_flag(given)))


def _by_flag(given: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments, with a flag on the device in the place of `count` where there is one."""
    del given["tables"], given["seed"]
    flag = given.pop("count_flag")
    return given if flag is None else {**given, "count": flag}


def _fake_route(given: dict[str, Any]) -> Outputs:
    rows = given["logits"] if given["logical_ids"] is None else given["logical_ids"]
    return _fake_outputs(_find(given["handle"]), rows.shape[0], given["tables"])


def _gate_route(given: dict[str, Any]) -> Outputs:
    """`GateRouter.__call__`; outputs as for `evenroute::route`."""
    gate: GateRouter = _find(given.pop("handle"))
    router = _with_counters(gate.router, given.pop("counts"), given.pop("tickets"))
    if router is not gate.router:
        gate = copy.copy(gate)
        gate.router = router
    return _all_outputs(gate(**_by_flag(given)))


def _fake_gate_route(given: dict[str, Any]) -> Outputs:
    return _fake_outputs(_find(given["handle"]).router, given["hidden"].shape[0], given["tables"])


_register(
    "evenroute::route",
    [*(f"Tensor? {name}" for name in ROUTE_INPUTS), "bool keep_weights"],
    _route,
    _fake_route,
)
_register(
    "evenroute::gate_route",
    ["Tensor hidden", "Tensor gate_weight", *(f"Tensor? {name}" for name in GATE_INPUTS)],
    _gate_route,
    _fake_gate_route,
)


@torch.library.custom_op("evenroute::align", mutates_args=())
def align_op(
    ids: Tensor, block_size: int, num_experts: int, invalid: str, slot_histogram: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`moe_align_block_size` with fresh outputs."""
    return moe_align_block_size(ids, block_size, num_experts, invalid=invalid, slot_histogram=slot_histogram)


@align_op.register_fake
def _(
    ids: Tensor, block_size: int, num_experts: int, invalid: str, slot_histogram: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    capacity = align_capacity(ids.numel(), block_size, num_experts)

    def words(length: int) -> Tensor:
        return ids.new_empty(length, dtype=torch.int32)

    return words(capacity), words(-(-capacity // block_size)), words(1)


class _Compiled:
    """Shared by the two wrappers: the handle and the tensors that the operators name."""

    def __init__(self, router: Router, owner: Router | GateRouter) -> None:
        self._owner = owner  # keeps the handle valid
        self.handle = f"router-{next(_handles)}"  # a string: the compiler could make a symbol of a number
        _routers[self.handle] = owner
        self.emit = router.plan.emit
        self.tables = router.tables.storage
        self.seed = router.plan.seed
        self.counts = router.counters.counts
        self.tickets = router.counters.tickets
        self.facts = router.plan.output_facts

    def _run(
        self,
        operator: Any,
        names: tuple[str, ...],
        tensors: dict[str, Any],
        switches: tuple[bool, ...],
        layer: int,
        row_offset: int,
        count: bool | Tensor,
        route_padding: bool,
    ) -> RoutingOutput:
        """Call the operator with the tensors in the order of `names`, None for those not given."""
        if isinstance(count, Tensor):
            tensors, count = {**tensors, "count_flag": count}, True
        for name in tensors:
            if name not in names:
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}")
        given = [tensors.get(name) for name in names]
        mine = (self.tables, self.seed, self.counts, self.tickets, self.handle)
        return self._output(operator(*given, *switches, *mine, layer, row_offset, count, route_padding))

    def _output(self, outputs: Outputs) -> RoutingOutput:
        weights, physical_ids, *rest = outputs
        kept = [one if name in self.emit else None for name, one in zip(OUTPUT_NAMES[2:], rest, strict=True)]
        return RoutingOutput(weights, physical_ids, *kept, *self.facts)  # type: ignore[arg-type, call-arg]


class CompiledRouter(_Compiled):
    """`Router.__call__` (without `out`) as one operator in a compiled graph.

    Make it once, outside the compiled function. The router's `custom_routing_function`, if any, runs inside the
    operator, unseen by the compiler.
    """

    def __init__(self, router: Router) -> None:
        super().__init__(router, router)

    def __call__(
        self,
        logits: Tensor | None,
        layer: int,
        *,
        row_offset: int = 0,
        count: bool | Tensor = True,
        route_padding: bool = False,
        keep_weights: bool = False,
        **inputs: Tensor | None,
    ) -> RoutingOutput:
        """`inputs`: the other tensors of `ROUTE_INPUTS`, as `Router.__call__` takes them."""
        tensors = {"logits": logits, **inputs}
        route, switches = torch.ops.evenroute.route, (keep_weights,)
        return self._run(route, ROUTE_INPUTS, tensors, switches, layer, row_offset, count, route_padding)


class CompiledGateRouter(_Compiled):
    """`GateRouter.__call__` (without `out` and token-id tables) as one operator in a compiled graph."""

    def __init__(self, gate: GateRouter) -> None:
        super().__init__(gate.router, gate)

    def __call__(
        self,
        hidden: Tensor,
        gate_weight: Tensor,
        layer: int,
        *,
        row_offset: int = 0,
        count: bool | Tensor = True,
        route_padding: bool = False,
        **inputs: Tensor | None,
    ) -> RoutingOutput:
        """`inputs`: tensors of `GATE_INPUTS`, as `GateRouter.__call__` takes them."""
        names = ("hidden", "gate_weight", *GATE_INPUTS)
        tensors = {"hidden": hidden, "gate_weight": gate_weight, **inputs}
        route = torch.ops.evenroute.gate_route
        return self._run(route, names, tensors, (), layer, row_offset, count, route_padding)
