"""What a layer of vLLM calls: its routing as one operator that compilers do not look into.

State (tables, counters, rows that count) is behind the operator and never its argument: its outputs are used, so no
compiler drops a call, and a graph of vLLM's, compiled or captured, holds the same call whatever is placed where.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from evenroute.dist.engines.vllm.choice import Choice
from evenroute.routing.router import Router

Routed = tuple[Tensor, Tensor, Tensor]

_models: dict[str, ModelRoutes] = {}


class LayerRoute(NamedTuple):
    """One layer's router and what it chooses by."""

    router: Router
    choice: Choice


class ModelRoutes:
    """The routing of all layers of a model on one rank.

    valid       int32 on the device: rows of the pass at hand that count; vLLM's own tensor, 0 in dummy passes
    chunk_rank  which part of the rows this rank routes where they are split over tensor-parallel ranks, else None
    kept        ``[L, rows, K]`` int32: logical ids of the last pass, for recordings; None without
    """

    def __init__(
        self, layers: list[LayerRoute], *, valid: Tensor, chunk_rank: int | None, kept: Tensor | None
    ) -> None:
        self.layers, self.valid, self.chunk_rank, self.kept = layers, valid, chunk_rank, kept
        # A number in the order of making, so that graphs that were compiled by an earlier process find theirs.
        self.handle = str(len(_models))
        _models[self.handle] = self

    def route(self, layer: int, logits: Tensor | None, ids: Tensor | None, weights: Tensor | None) -> Routed:
        """Weights ``[T, K]`` fp32, physical ids ``[T, K]`` int32, logical ids alike (empty unless emitted)."""
        router, choice = self.layers[layer]
        rows = logits if ids is None else ids
        assert rows is not None
        valid = self.valid
        if self.chunk_rank is not None:
            valid = (valid - self.chunk_rank * rows.shape[0]).clamp(min=0)
        if ids is None:
            out = router(logits, layer, bias=choice.bias, num_valid_tokens=valid, route_padding=True)
        else:
            out = router(
                None,
                layer,
                logical_ids=ids,
                weights=weights,
                num_valid_tokens=valid,
                route_padding=True,
                keep_weights=True,
            )
        logical = out.logical_ids
        if logical is None:
            logical = out.physical_ids.new_empty(0)
        elif self.kept is not None:
            count = min(int(rows.shape[0]), int(self.kept.shape[1]))
            self.kept[layer, :count].copy_(logical[:count])
        return out.weights, out.physical_ids, logical


class EngineRoute:
    """What hangs on a router of vLLM's and stands for its `_select_experts`."""

    def __init__(self, model: ModelRoutes, layer: int, top_k: int) -> None:
        self._handle, self._layer, self._top_k = model.handle, layer, top_k
        self._chooses = not model.layers[layer].choice.reason  # not vLLM's router
        self._emits = "logical_ids" in model.layers[layer].router.plan.emit

    def select(self, router: Any, hidden: Tensor, logits: Tensor, dtype: Any, token_ids: Any) -> Any:
        """Weights and physical ids, as vLLM's router gives them."""
        if self._chooses:
            weights, physical, logical = self._call(logits, None, None)
        else:
            given, ids = router._compute_routing(hidden, logits, dtype, input_ids=token_ids)
            weights, physical, logical = self._call(None, ids, given)
        if router.capture_fn is not None:
            assert self._emits, "logical ids are captured, but were not asked for when the model was loaded"
            router.capture_fn(logical)
        return weights, physical if dtype is None else physical.to(dtype)

    def count(self, ids: Tensor) -> Tensor:
        """Count logical ids that vLLM's router chose; the same ids, for its own mapping."""
        _, _, logical = self._call(None, ids, torch.ones_like(ids, dtype=torch.float32))
        counted: Tensor = logical.to(ids.dtype)
        return counted

    def _call(self, logits: Tensor | None, ids: Tensor | None, weights: Tensor | None) -> Any:
        arguments = (logits, ids, weights, self._handle, self._layer, self._top_k, self._emits)
        if torch.compiler.is_compiling():
            return torch.ops.evenroute.vllm_route(*arguments)
        return _models[self._handle].route(self._layer, logits, ids, weights)


@torch.library.custom_op("evenroute::vllm_route", mutates_args=())
def vllm_route(
    logits: Tensor | None,
    ids: Tensor | None,
    weights: Tensor | None,
    model: str,
    layer: int,
    top_k: int,
    emits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ModelRoutes.route` for compiled graphs."""
    return _models[model].route(layer, logits, ids, weights)


@vllm_route.register_fake
def _(
    logits: Tensor | None,
    ids: Tensor | None,
    weights: Tensor | None,
    model: str,
    layer: int,
    top_k: int,
    emits: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits if ids is None else ids
    assert rows is not None
    shape = (rows.shape[0], top_k)
    like = rows.new_empty
    physical = like(shape, dtype=torch.int32)
    return (
        like(shape, dtype=torch.float32),
        physical,
        like(shape if emits else (0,), dtype=torch.int32),
    )
