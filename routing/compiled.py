"""Routers for compiled models: `torch.compile(fullgraph=True)` takes the routing launches as they are.

Importing this registers `torch.ops.evenroute.route`, `.gate_route` and `.align` (see `library_ops.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenroute.eplb._checks import describe, require_bool, require_instance, require_int
from evenroute.routing.call_checks import MAX_ROW_OFFSET
from evenroute.routing.compiled_ops import Outputs, register
from evenroute.routing.gate import GateRouter
from evenroute.routing.output import RoutingOutput
from evenroute.routing.router import Router


class _Compiled:
    """Shared by the two wrappers: the handle and the tensors that the operators name."""

    def __init__(self, router: Router, owner: Router | GateRouter) -> None:
        self._owner = owner  # keeps the handle valid
        self.handle = register(owner)
        self.emit = router.form.emit
        self.tables = router.tables.storage
        self.seed = router.form.seed
        self.counts = router.counters.counts
        self.tickets = router.counters.tickets
        config = router.config
        self.top_k, self.num_shared = config.top_k, config.num_shared_experts
        self.num_buckets = router.form.num_buckets
        self.factor, self.applied = config.routed_scaling_factor, config.apply_routed_scaling_factor

    def _output(self, outputs: Outputs) -> RoutingOutput:
        weights, physical_ids, logical_ids, local_ids, packed_ids, histogram = outputs
        return RoutingOutput(
            weights=weights,
            physical_ids=physical_ids,
            logical_ids=logical_ids if "logical_ids" in self.emit else None,
            local_ids=local_ids if "local_ids" in self.emit else None,
            packed_ids=packed_ids if "packed_ids" in self.emit else None,
            slot_histogram=histogram if "slot_histogram" in self.emit else None,
            top_k=self.top_k,
            num_shared=self.num_shared,
            routed_scaling_factor=self.factor,
            scaling_applied=self.applied,
            num_buckets=self.num_buckets,
            emitted=self.emit,
        )


def _require_types(tensors: dict[str, Any], layer: Any, row_offset: Any, count: Any) -> None:
    """What the operator's schema would refuse in words of its own; the router checks the rest."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a torch.Tensor, found {describe(value)}")
    require_int("layer", layer, 0)
    require_int("row_offset", row_offset, 0, MAX_ROW_OFFSET - 1)
    require_bool("count", count)


class CompiledRouter(_Compiled):
    """`Router.__call__` (without `out`) as one operator in a compiled graph.

    Make it once, outside the compiled function. The router's `custom_routing_function`, if any, runs inside the
    operator, unseen by the compiler.
    """

    def __init__(self, router: Router) -> None:
        require_instance("router", router, Router)
        super().__init__(router, router)

    def __call__(
        self,
        logits: Tensor | None,
        layer: int,
        *,
        num_valid_tokens: Tensor | None = None,
        row_offset: int = 0,
        bias: Tensor | None = None,
        marked_bias: Tensor | None = None,
        token_marker: Tensor | None = None,
        logical_ids: Tensor | None = None,
        weights: Tensor | None = None,
        expert_ids_by_token: Tensor | None = None,
        token_ids: Tensor | None = None,
        count: bool = True,
        waterfill_target: Tensor | None = None,
    ) -> RoutingOutput:
        _require_types(
            {
                "logits": logits,
                "num_valid_tokens": num_valid_tokens,
                "bias": bias,
                "marked_bias": marked_bias,
                "token_marker": token_marker,
                "logical_ids": logical_ids,
                "weights": weights,
                "expert_ids_by_token": expert_ids_by_token,
                "token_ids": token_ids,
                "waterfill_target": waterfill_target,
            },
            layer,
            row_offset,
            count,
        )
        outputs = torch.ops.evenroute.route(
            logits,
            logical_ids,
            weights,
            bias,
            marked_bias,
            token_marker,
            expert_ids_by_token,
            token_ids,
            num_valid_tokens,
            waterfill_target,
            self.tables,
            self.seed,
            self.counts,
            self.tickets,
            self.handle,
            layer,
            row_offset,
            count,
        )
        return self._output(outputs)


class CompiledGateRouter(_Compiled):
    """`GateRouter.__call__` (without `out` and token-id tables) as one operator in a compiled graph."""

    def __init__(self, gate: GateRouter) -> None:
        require_instance("gate", gate, GateRouter)
        super().__init__(gate.router, gate)

    def __call__(
        self,
        hidden: Tensor,
        gate_weight: Tensor,
        layer: int,
        *,
        num_valid_tokens: Tensor | None = None,
        row_offset: int = 0,
        bias: Tensor | None = None,
        marked_bias: Tensor | None = None,
        token_marker: Tensor | None = None,
        count: bool = True,
        waterfill_target: Tensor | None = None,
    ) -> RoutingOutput:
        for name, value in (("hidden", hidden), ("gate_weight", gate_weight)):
            if not isinstance(value, Tensor):
                raise ValueError(f"{name} must be a torch.Tensor, found {describe(value)}")
        _require_types(
            {
                "num_valid_tokens": num_valid_tokens,
                "bias": bias,
                "marked_bias": marked_bias,
                "token_marker": token_marker,
                "waterfill_target": waterfill_target,
            },
            layer,
            row_offset,
            count,
        )
        outputs = torch.ops.evenroute.gate_route(
            hidden,
            gate_weight,
            bias,
            marked_bias,
            token_marker,
            num_valid_tokens,
            waterfill_target,
            self.tables,
            self.seed,
            self.counts,
            self.tickets,
            self.handle,
            layer,
            row_offset,
            count,
        )
        return self._output(outputs)
