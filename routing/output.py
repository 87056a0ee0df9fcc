"""What one routing launch is asked for, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from evenroute.routing.counters import ExpertCounters
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

OUTPUT_NAMES = ("weights", "physical_ids", "logical_ids", "local_ids", "packed_ids", "slot_histogram")
DEFAULT_EMIT = ("weights", "physical_ids")


@dataclass
class RoutingOutput:
    """Result of one call, K routed columns and S shared ones.

    Attributes:
        weights [T, K+S] fp32, physical_ids [T, K+S] int32: id -1 and weight 0 in padding rows. Without rows where the
            router's `emit` leaves them out (packed only).
        logical_ids [T, K+S] int32: shared columns are E..E+S-1.
        local_ids [T, K+S] int32: slot index on this rank, -1 for slots elsewhere.
        packed_ids [T, K+S] int32: physical id << 16 | bf16 bits of the weight.
        slot_histogram [buckets] int32: how often each physical id occurs in this batch.
        scaling_applied: True if the weights carry `routed_scaling_factor`; else the consumer multiplies by it.
        num_buckets: number of physical ids, shared slots included.
        emitted: which of `OUTPUT_NAMES` hold this batch.
    """

    weights: Tensor
    physical_ids: Tensor
    logical_ids: Tensor | None
    local_ids: Tensor | None
    packed_ids: Tensor | None
    slot_histogram: Tensor | None
    top_k: int
    num_shared: int
    routed_scaling_factor: float
    scaling_applied: bool
    num_buckets: int
    emitted: tuple[str, ...] = DEFAULT_EMIT


@dataclass(frozen=True)
class RouteForm:
    """What is fixed for a router's life: `kernel` and `reference` are functions of (form, call).

    form            "static", "exact", "hash" or "invariant"; weighted: replicas in planned shares
    num_buckets     number of physical ids, shared slots included
    """

    config: RouterConfig
    tables: DispatchTables
    counters: ExpertCounters
    form: str
    weighted: bool
    emit: tuple[str, ...]
    seed: Tensor
    scratch: Tensor | None = None

    def histogram_scratch(self) -> Tensor:
        """[1 + buckets] int32, all zero between launches: programs done, and the histogram being counted."""
        assert self.scratch is not None
        return self.scratch

    @property
    def slots_per_rank(self) -> int:
        """Local slots of a rank in the numbering of the output, per-rank shared slots included."""
        per_rank = self.config.shared_mode != "global"
        return self.tables.num_local_slots + (self.config.num_shared_experts if per_rank else 0)

    @property
    def num_buckets(self) -> int:
        shared = self.config.num_shared_experts
        if self.config.shared_mode == "global":
            return self.tables.num_slots + shared
        return self.slots_per_rank * self.tables.topology.ep_size


@dataclass(frozen=True)
class RouteCall:
    """Inputs of one launch. Either `logits`, or `given_ids` with `given_weights`, or `logits` and a token-id table.

    logits [T, E] fp32, fp16 or bf16 (any row stride); bias [E] or [T, E]; marked_bias [E], token_marker [T];
    given_ids, given_weights [T, K]; expert_ids_by_token [vocab, K] and token_ids [T]; num_valid_tokens: int32 tensor
    of one element, or None for all rows; row_offset: global index of row 0; count: add to the counters.
    """

    num_tokens: int
    layer: int
    logits: Tensor | None = None
    bias: Tensor | None = None
    marked_bias: Tensor | None = None
    token_marker: Tensor | None = None
    given_ids: Tensor | None = None
    given_weights: Tensor | None = None
    expert_ids_by_token: Tensor | None = None
    token_ids: Tensor | None = None
    num_valid_tokens: Tensor | None = None
    row_offset: int = 0
    count: bool = True


def allocate_output(form: RouteForm, num_tokens: int, device: torch.device) -> RoutingOutput:
    """Uninitialised buffers for what `form.emit` names."""
    columns = form.config.num_columns

    def rows(name: str, dtype: torch.dtype) -> Tensor | None:
        wanted = name in form.emit
        return torch.empty((num_tokens, columns), dtype=dtype, device=device) if wanted else None

    none = torch.empty((0, columns), dtype=torch.int32, device=device)
    weights, physical = rows("weights", torch.float32), rows("physical_ids", torch.int32)
    histogram = None
    if "slot_histogram" in form.emit:
        histogram = torch.empty(form.num_buckets, dtype=torch.int32, device=device)
    return RoutingOutput(
        weights=none.float() if weights is None else weights,
        physical_ids=none if physical is None else physical,
        logical_ids=rows("logical_ids", torch.int32),
        local_ids=rows("local_ids", torch.int32),
        packed_ids=rows("packed_ids", torch.int32),
        slot_histogram=histogram,
        top_k=form.config.top_k,
        num_shared=form.config.num_shared_experts,
        routed_scaling_factor=form.config.routed_scaling_factor,
        scaling_applied=form.config.apply_routed_scaling_factor,
        num_buckets=form.num_buckets,
        emitted=form.emit,
    )
