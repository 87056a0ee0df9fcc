"""The arguments of one routing launch, and its result."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from evenroute.routing.counters import ExpertCounters
from evenroute.routing.kernels.types import Columns, Emit, TableColumns
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.settings.modes import Mode
from evenroute.routing.tables.tables import DispatchTables, fits_payload

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
class RouterPlan:
    """What is fixed for a router's life: `route_kernel` and `route_reference` are functions of (plan, call).

    mode            how slots are found, a row of `settings.modes.MODES`
    num_buckets     number of physical ids, shared slots included
    """

    config: RouterConfig
    tables: DispatchTables
    counters: ExpertCounters
    mode: Mode
    emit: tuple[str, ...]
    seed: Tensor
    scratch: Tensor | None = None

    def histogram_scratch(self) -> Tensor:
        """[1 + buckets] int32, all zero between launches: programs done, and the histogram being counted."""
        assert self.scratch is not None
        return self.scratch

    @cached_property
    def payload(self) -> bool:
        """Whether what the tables say of an expert fits beside its inverted id."""
        return self.mode.pick == "slot" or fits_payload(self.tables.num_slots, self.tables.topology.ep_size)

    @cached_property
    def table_columns(self) -> TableColumns:
        """Where the tables' columns start."""
        return TableColumns(*(self.tables.columns[name].start for name in TableColumns._fields))

    @cached_property
    def columns(self) -> Columns:
        """The columns that a launch writes."""
        config = self.config
        return Columns(
            shared=config.num_shared_experts,
            shared_weight=float(config.shared_weight),
            shared_per_rank=config.shared_mode != "global" and config.num_shared_experts > 0,
            local_slots=self.tables.num_local_slots,
            num_slots=self.tables.num_slots,
            buckets=self.num_buckets,
            emit=Emit(*(name in self.emit for name in OUTPUT_NAMES)),
        )

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
    of one element, or None for all rows; row_offset: global index of row 0; count: add to the counters (a tensor of one
    element decides on the device); route_padding: rows from num_valid_tokens on are routed too, and not counted;
    given_ids and given_weights may hold the S shared columns too; keep_weights: as given, not renormalised or scaled.
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
    count: bool | Tensor = True
    route_padding: bool = False
    keep_weights: bool = False


def allocate_output(plan: RouterPlan, num_tokens: int, device: torch.device) -> RoutingOutput:
    """Uninitialised buffers for what `plan.emit` names."""
    columns = plan.config.num_columns

    def rows(name: str, dtype: torch.dtype) -> Tensor | None:
        wanted = name in plan.emit
        return torch.empty((num_tokens, columns), dtype=dtype, device=device) if wanted else None

    none = torch.empty((0, columns), dtype=torch.int32, device=device)
    weights, physical = rows("weights", torch.float32), rows("physical_ids", torch.int32)
    histogram = None
    if "slot_histogram" in plan.emit:
        histogram = torch.empty(plan.num_buckets, dtype=torch.int32, device=device)
    return RoutingOutput(
        weights=none.float() if weights is None else weights,
        physical_ids=none if physical is None else physical,
        logical_ids=rows("logical_ids", torch.int32),
        local_ids=rows("local_ids", torch.int32),
        packed_ids=rows("packed_ids", torch.int32),
        slot_histogram=histogram,
        top_k=plan.config.top_k,
        num_shared=plan.config.num_shared_experts,
        routed_scaling_factor=plan.config.routed_scaling_factor,
        scaling_applied=plan.config.apply_routed_scaling_factor,
        num_buckets=plan.num_buckets,
        emitted=plan.emit,
    )
