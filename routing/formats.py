"""Routing results as different consumers want them.

standard  `RoutingOutput` itself: weights and physical ids, the consumer sorts
packed    physical id << 16 | bf16 bits of the weight, one int32 (`emit=("packed_ids",)`: from the routing launch)
ragged    gather and scatter indices and expert offsets: kernels that walk expert by expert
bypassed  logits handed on to a consumer that routes inside its own kernel; only while slots are experts

Every form has `to_standard()`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from evenroute.routing.align.align import moe_align_block_size
from evenroute.routing.output import RoutingOutput
from evenroute.routing.reference import bf16_bits
from evenroute.routing.router import Router
from evenroute.routing.tables.tables import DispatchTables

FORMATS = ("standard", "packed", "ragged", "bypassed")
MAX_PACKED = 1 << 15
"""Physical ids that fit beside a weight of 16 bits and a sign."""


def pack_ids(physical_ids: Tensor, weights: Tensor, *, num_buckets: int | None = None) -> Tensor:
    """`physical_ids [T, C] int32`, `weights [T, C] fp32` -> `[T, C] int32`: id << 16 | bf16 bits of the weight.

    Weights above the largest bf16 become that one. num_buckets: the ids are known to lie in [-1, num_buckets); without
    it they are looked at, for which the host waits if they lie on a GPU.

    Raises:
        ValueError: ids do not fit in 15 bits (-1 for none).
    """
    if num_buckets is None and physical_ids.numel():
        least, most = (int(bound) for bound in physical_ids.aminmax())
        if least < -1 or most >= MAX_PACKED:
            raise ValueError(
                f"physical_ids must lie in [-1, {MAX_PACKED}) to be packed, found {least} to {most}"
            )
    with torch.no_grad():
        return (physical_ids.to(torch.int32) << 16) | bf16_bits(weights.float()).to(torch.int32)


def unpack_ids(packed_ids: Tensor) -> tuple[Tensor, Tensor]:
    """`[T, C] int32` -> (weights fp32, physical_ids int32), -1 and 0 in padding rows."""
    # The low half as a signed 16-bit number, as int16 wants it.
    bits = ((packed_ids << 16) >> 16).to(torch.int16)
    return bits.view(torch.bfloat16).float(), packed_ids >> 16


@dataclass(frozen=True, eq=False, kw_only=True)
class _Columns:
    """What the columns of a `RoutingOutput` are, kept beside their other form."""

    top_k: int
    num_shared: int
    routed_scaling_factor: float
    scaling_applied: bool
    num_buckets: int

    def _standard(self, weights: Tensor, physical_ids: Tensor, packed_ids: Tensor | None) -> RoutingOutput:
        emitted = ("weights", "physical_ids", *(() if packed_ids is None else ("packed_ids",)))
        others: dict[str, Any] = dict.fromkeys(("logical_ids", "local_ids", "slot_histogram"))
        return RoutingOutput(
            weights, physical_ids, packed_ids=packed_ids, emitted=emitted, **others, **_columns(self)
        )


def _columns(output: RoutingOutput | _Columns) -> dict[str, Any]:
    return {field.name: getattr(output, field.name) for field in fields(_Columns)}


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedRouting(_Columns):
    """`packed_ids [T, K+S] int32` alone; weights keep bf16's 8 bits."""

    packed_ids: Tensor

    @classmethod
    def from_output(cls, output: RoutingOutput) -> PackedRouting:
        """Takes `packed_ids` of the routing launch if it emitted them, else packs here.

        Raises:
            ValueError: ids or weights were not emitted, or ids need more than 15 bits.
        """
        packed = output.packed_ids
        if packed is None or "packed_ids" not in output.emitted:
            _require_emitted("packed", output)
            if output.num_buckets > MAX_PACKED:
                raise ValueError(
                    f"packed: ids hold 15 bits of slot, found {output.num_buckets} physical ids (allowed {MAX_PACKED})"
                )
            packed = pack_ids(output.physical_ids, output.weights, num_buckets=output.num_buckets)
        return cls(packed_ids=packed, **_columns(output))

    def to_standard(self) -> RoutingOutput:
        weights, physical_ids = unpack_ids(self.packed_ids)
        return self._standard(weights, physical_ids, self.packed_ids)


@dataclass(frozen=True, eq=False, kw_only=True)
class RaggedRouting(_Columns):
    """Choices sorted by expert (stable, so by token inside one), without padding rows. C = K + S, n = valid choices.

    gather_indices  [T * C] int32: flat index t * C + c at each place of the sorted order; T * C from place n on
    scatter_indices [T * C] int32: place of each flat index; -1 for choices of padding rows
    expert_offsets  [buckets + 1] int32: first place of each expert; the last is n
    gate_weights    [T, C] fp32
    """

    gather_indices: Tensor
    scatter_indices: Tensor
    expert_offsets: Tensor
    gate_weights: Tensor

    @classmethod
    def from_output(cls, output: RoutingOutput, *, backend: str = "auto") -> RaggedRouting:
        """Uses the slot histogram if there is one.

        Raises:
            ValueError: ids or weights were not emitted.
        """
        num_buckets = output.num_buckets
        _require_emitted("ragged", output)
        ids = output.physical_ids
        bounds = torch.empty(num_buckets + 2, dtype=torch.int32, device=ids.device)
        scatter = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
        gather, _, _ = moe_align_block_size(
            ids,
            1,
            num_buckets,
            invalid="drop",
            slot_histogram=output.slot_histogram if "slot_histogram" in output.emitted else None,
            cumsum=bounds,
            inverse=scatter,
            backend=backend,
        )
        return cls(
            gather_indices=gather[: ids.numel()],
            scatter_indices=scatter,
            expert_offsets=bounds[1:],
            gate_weights=output.weights,
            **_columns(output),
        )

    def to_standard(self) -> RoutingOutput:
        place = self.scatter_indices
        ids = torch.searchsorted(self.expert_offsets, place, right=True, out_int32=True) - 1
        ids = torch.where(place >= 0, ids, -1).view(self.gate_weights.shape)
        return self._standard(self.gate_weights, ids, None)


@dataclass(frozen=True, eq=False)
class BypassedRouting:
    """Logits and what routes them, for a consumer that chooses experts itself.

    It knows logical ids only, so this form exists while slot p of the layer holds expert p and nothing else does.
    The consumer's choices are not counted; `to_standard()` routes (and counts) like any call of the router.
    """

    router: Router
    logits: Tensor
    layer: int
    hidden_states: Tensor | None
    arguments: dict[str, Any]

    @classmethod
    def from_logits(
        cls,
        router: Router,
        logits: Tensor,
        layer: int,
        *,
        hidden_states: Tensor | None = None,
        **arguments: Any,
    ) -> BypassedRouting:
        """`arguments`: other ones of `Router.__call__`, for `to_standard`. Reads the tables: not in a captured step.

        Raises:
            ValueError: the layer's placement is not trivial.
        """
        require_trivial(router.tables, layer)
        return cls(router, logits, layer, hidden_states, arguments)

    def to_standard(self) -> RoutingOutput:
        """Route after all, by the tables as they are now."""
        return self.router(self.logits, self.layer, **self.arguments)


def require_trivial(tables: DispatchTables, layer: int) -> None:
    """Raise ValueError, with the reason, unless slot p of the layer holds expert p and there are no other slots."""
    if tables.num_slots != tables.num_logical_experts:
        raise ValueError(
            f"bypassed: layer {layer} has {tables.num_slots} slots for {tables.num_logical_experts} experts; a "
            "consumer that routes by itself cannot choose among replicas"
        )
    row = tables.physical_to_logical[layer].cpu()
    moved = (row != torch.arange(tables.num_slots, dtype=row.dtype)).nonzero()
    if len(moved):
        slot = int(moved[0])
        raise ValueError(
            f"bypassed: layer {layer} slot {slot} holds expert {int(row[slot])}; a consumer that routes by itself "
            "knows no placement but the identity"
        )


def _require_emitted(name: str, output: RoutingOutput) -> None:
    """Raise ValueError where the router's `emit` left out weights or physical ids."""
    for field in ("weights", "physical_ids"):
        if field not in output.emitted:
            raise ValueError(f"{name}: needs {field}, which the router's emit leaves out")
