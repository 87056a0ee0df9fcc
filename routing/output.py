"""The arguments of one routing launch, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from evenroute.routing.batch.settings import BatchDeal
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.dispatch import hash_salt
from evenroute.routing.kernels.types import Columns, Emit, TableColumns
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.settings.modes import Mode
from evenroute.routing.tables.tables import DispatchTables, fits_payload
from evenroute.routing.tables.view import TableView

OUTPUT_NAMES = ("weights", "physical_ids", "logical_ids", "local_ids", "packed_ids", "slot_histogram")
CHOICE_NAMES = ("physical_ids", "logical_ids", "local_ids", "packed_ids")
DEFAULT_EMIT = ("weights", "physical_ids")


class Written(NamedTuple):
    """Outputs checked for a router and a number of rows: (name, tensor, where it begins), and all six addresses."""

    plan: RouterPlan
    rows: int
    tensors: tuple[tuple[str, Tensor, int], ...]
    pointers: tuple[int, ...]


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
    written: Written | None = field(default=None, init=False, repr=False, compare=False)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of `OUTPUT_NAMES`."""
        return (
            self.weights,
            self.physical_ids,
            self.logical_ids,
            self.local_ids,
            self.packed_ids,
            self.slot_histogram,
        )


@dataclass(frozen=True)
class RouterPlan:
    """What is fixed for a router's life: `route_kernel` and `route_reference` are functions of (plan, call).

    mode            how slots are found, a row of `settings.modes.MODES`
    num_buckets     number of physical ids, shared slots included
    batch           deal="batch": how, and how small batches are dealt
    """

    config: RouterConfig
    tables: DispatchTables
    counters: ExpertCounters
    mode: Mode
    emit: tuple[str, ...]
    seed: Tensor
    scratch: Tensor | None = None
    batch: BatchDeal | None = None

    def mode_of(self, num_tokens: int) -> Mode:
        """How a batch of T rows is dealt."""
        batch = self.batch
        if batch is None or batch.small is None or num_tokens >= batch.rows:
            return self.mode
        return batch.small

    def view_of(self, num_tokens: int) -> TableView:
        """The tables' columns that a batch of T rows is dealt by: of its class, where planned shares are."""
        return self.tables.of_batch(num_tokens) if self.mode.weighted else self.tables

    @cached_property
    def salt(self) -> int:
        """32-bit salt of hashes and rounding offsets, without the seed."""
        rank = self.tables.ep_rank if self.batch is None else self.batch.salt_rank
        return hash_salt(self.mode, rank)

    @property
    def choice(self) -> str:
        """Output in which the routing launch of deal="batch" leaves the logical ids for the second launch."""
        return next(name for name in CHOICE_NAMES if name in self.emit)

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
    def columns_of_output(self) -> int:
        """K + S."""
        return self.config.num_columns

    @cached_property
    def output_facts(self) -> tuple[int, int, float, bool, int, tuple[str, ...]]:
        """What an output says beside its tensors, from `top_k` on."""
        config = self.config
        factor, applied = config.routed_scaling_factor, config.apply_routed_scaling_factor
        return config.top_k, config.num_shared_experts, factor, applied, self.num_buckets, self.emit

    @cached_property
    def columns(self) -> Columns:
        """The columns that a launch writes."""
        config = self.config
        emit = Emit(*(name in self.emit for name in OUTPUT_NAMES))
        return Columns(
            shared=config.num_shared_experts,
            shared_weight=float(config.shared_weight),
            shared_per_rank=config.shared_mode != "global" and config.num_shared_experts > 0,
            local_slots=self.tables.num_local_slots,
            num_slots=self.tables.num_slots,
            buckets=self.num_buckets,
            emit=emit,
            routed=emit,
            shared_pad=1 << max(config.num_shared_experts - 1, 0).bit_length(),
        )

    @cached_property
    def batch_columns(self) -> Columns:
        """The same for the routing launch of a batch whose slots a second launch finds."""
        columns, choice = self.columns, self.choice
        routed = columns.emit._replace(local_ids=choice == "local_ids", slot_histogram=False)
        return columns._replace(routed=routed)

    @property
    def slots_per_rank(self) -> int:
        """Local slots of a rank in the numbering of the output, per-rank shared slots included."""
        per_rank = self.config.shared_mode != "global"
        return self.tables.num_local_slots + (self.config.num_shared_experts if per_rank else 0)

    @cached_property
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
    shape, none = (num_tokens, plan.columns_of_output), (0, plan.columns_of_output)
    words, emit = plan.seed, plan.emit
    made: list[Tensor | None] = []
    for name in OUTPUT_NAMES:
        if name in emit:
            size = (plan.num_buckets,) if name == "slot_histogram" else shape
        elif name in DEFAULT_EMIT:  # those two are always there
            size = none
        else:
            made.append(None)
            continue
        # In a microsecond less than `torch.empty` with its keywords.
        made.append(
            words.new_empty(size, dtype=torch.float32) if name == "weights" else words.new_empty(size)
        )
    return RoutingOutput(*made, *plan.output_facts)  # type: ignore[arg-type,call-arg]
