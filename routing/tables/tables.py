"""Dispatch tables of one rank: which slots hold a logical expert, derived from the placement, updated in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenroute.eplb._checks import require_instance, require_int
from evenroute.eplb.placement.classes import default_class_rows
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.shares import even_shares
from evenroute.routing.settings.checks import require_device
from evenroute.routing.settings.config import MAX_EXPERTS
from evenroute.routing.tables.row import SPAN_COUNT_BITS, check_table_row, fill_table_row, fits_payload
from evenroute.routing.tables.tickets import (
    TREE_REPLICAS,
    compile_orders,
    packed_order,
    sequence_capacity,
)
from evenroute.routing.tables.view import TableView

__all__ = ["SPAN_COUNT_BITS", "DispatchTables", "fits_payload"]

MAX_SLOTS = 1 << 20
CLASSES, SMALL, MEDIUM = (
    3,
    1,
    2,
)  # sets of columns of a layer: the placement's own shares, those of small batches
_ALIGN = 32  # int32 words: rows start on their own 128-byte lines


class DispatchTables(TableView):
    """Device tables of all layers for one rank; size fixed by (L, E, P), pointers stable for life.

    Attributes (int32, views of one storage; those of the placement's own shares, see `of_batch`):
        physical_to_logical [L, P]
        replica_offset [L, E+1], replica_slot [L, P]    slots of expert e: replica_slot[offset[e]:offset[e+1]], rising
        replica_threshold [L, P]   cumulative shares within an expert, the last is 65535
        replica_span [L, E]        offset << 11 | replicas << 1 | (shares are uneven)
        static_slot [L, E]         the slot that `static` dispatch uses on this rank
        replica_payload, static_payload [L, E]   the same behind the inverted id, (2047 - e) << 20 | ...: what the
                                   kernels carry through the choice (the largest payload is the lowest id)
        replica_sequence [L, E]    for uneven shares over more than four replicas: where the order of its tickets lies
                                   (`ticket_sequence.py`), in words from the start of the layer's row; else 0
        replica_depth [L, 1]       0: no uneven expert has more than two replicas; 1: none more than four; 2: some have
        slot_entry [L, P]          where a slot stands in replica_slot

    Shares by batch-size class: a layer has such columns for small and for medium batches too, of the placement's set
    for that size, else as its own shares have them. There only the replicas with a share are counted in replica_span
    and come first among an expert's. Which batch is of which class is fixed by `hold_classes`, so that a captured graph
    keeps its class, whatever placements bring.

    Memory: 12 (4 P + 6 E) bytes a layer, and 8 KiB for every redundant slot for the orders, were all experts to need
    one (58 layers of 256 experts in 288 slots: 17 MB). Orders are made (1 ms an expert, kept by shares) once a router
    deals tickets by shares: `enable_sequences`; `prepare` makes those of a coming placement on any thread.

    Updates are enqueued on the current stream; the host waits only if it overtakes an update of the same layer.

    Raises:
        ValueError: there is no such rank or device, or the placement is larger than the tables can be.
    """

    def __init__(self, placement: Placement, *, ep_rank: int, device: torch.device | str) -> None:
        require_instance("placement", placement, Placement)
        topology = placement.topology
        require_int("ep_rank", ep_rank, 0)
        require_int("placement.num_logical_experts", placement.num_logical_experts, 1, MAX_EXPERTS)
        if not 0 <= ep_rank < topology.ep_size:
            raise ValueError(f"ep_rank={ep_rank} is outside [0, ep_size={topology.ep_size})")
        if placement.num_slots >= MAX_SLOTS or topology.ep_size >= 1 << SPAN_COUNT_BITS:
            raise ValueError(
                f"num_slots={placement.num_slots}, ep_size={topology.ep_size}: the dispatch tables hold fewer than "
                f"{MAX_SLOTS} slots and {1 << SPAN_COUNT_BITS} ranks"
            )
        self.topology = topology
        self.ep_rank = ep_rank
        self.num_layers = placement.num_layers
        self.num_logical_experts = placement.num_logical_experts
        self.num_slots = placement.num_slots
        self.num_local_slots = placement.num_local_slots
        self.device = require_device("device", device)
        experts, slots = self.num_logical_experts, self.num_slots
        widths = {
            "replica_span": experts,
            "replica_slot": slots,
            "replica_threshold": slots,
            "static_slot": experts,
            "replica_offset": experts + 1,
            "replica_payload": experts,
            "static_payload": experts,
            "physical_to_logical": slots,
            "replica_sequence": experts,
            "replica_depth": 1,
            "slot_entry": slots,
        }
        self.columns: dict[str, slice] = {}
        start = 0
        for name, width in widths.items():
            self.columns[name] = slice(start, start + width)
            start = -(-(start + width) // _ALIGN) * _ALIGN
        self._order_words = sequence_capacity(experts, slots, self.topology.ep_size)
        words = self.num_layers * (CLASSES * start + self._order_words)
        if words >= 1 << 31:
            raise ValueError(
                f"dispatch tables of {self.num_layers} layers, {experts} experts, {slots} slots on {topology.ep_size} "
                f"ranks need {words} words, more than {(1 << 31) - 1}"
            )
        with torch.inference_mode(False):  # made under it, they could not be updated outside
            self._allocate(words, start)
        # Compiles the check, so that no switch waits for it.
        check_table_row(placement.row(0), self.num_slots, self.num_logical_experts, topology)
        self.load(placement)

    def _allocate(self, words: int, start: int) -> None:
        self._memory = torch.zeros(words, dtype=torch.int32, device=self.device)
        first = self.num_layers * CLASSES * start
        self.storage = self._memory[:first].view(self.num_layers, CLASSES, start)
        self._orders = self._memory[first:].view(self.num_layers, self._order_words)
        self._with_orders = False
        self.class_rows: tuple[int, ...] = ()
        self._small = self._medium = 0  # largest batches of the classes, as calls have them
        self.views: list[TableView] = [self, TableView(), TableView()]
        for number, view in enumerate(self.views):
            view.bind(self._memory, self.storage, self.columns, number, self)
        on_gpu = self.device.type == "cuda"
        self._host = torch.zeros(self.storage.shape, dtype=torch.int32, pin_memory=on_gpu)
        self._fields = [
            [{name: row[part] for name, part in self.columns.items()} for row in layer]
            for layer in self._host.numpy()
        ]
        self._in_use: list[PlacementRow] = [PlacementRow(self._host[0, 0].numpy(), None)] * self.num_layers
        self._copied: list[torch.cuda.Event | None] = [None] * self.num_layers

    def hold_classes(self, top_k: int, *, shared: bool) -> None:
        """Fix the classes of batch sizes for good (`default_class_rows`); shared: a batch is that of all ranks."""
        if self.class_rows:
            return
        ranks = self.topology.ep_size
        self.class_rows = tuple(default_class_rows(self.num_logical_experts, top_k, ranks))
        factor = ranks if shared else 1
        self._small, self._medium = self.class_rows[0] * factor, self.class_rows[-1] * factor
        for layer, row in enumerate(self._in_use):
            self._fill(layer, row)
        self.storage.copy_(self._host, non_blocking=True)
        self._record(range(self.num_layers))

    def of_batch(self, num_tokens: int) -> TableView:
        """The columns that shares of a batch of T rows are taken from."""
        if num_tokens > self._medium:
            return self
        return self.views[SMALL if num_tokens <= self._small else MEDIUM]

    def load(self, placement: Placement) -> None:
        """Take over a placement of the same shape; raises ValueError for another shape."""
        require_instance("placement", placement, Placement)
        mine = (self.num_layers, self.num_logical_experts, self.num_slots, self.topology)
        other = (placement.num_layers, placement.num_logical_experts, placement.num_slots, placement.topology)
        if mine != other:
            raise ValueError(
                f"placement has (layers, experts, slots, topology) {other}, the tables have {mine}"
            )
        for layer, row in enumerate(placement.rows()):
            self._fill(layer, row)
            self._write_orders(layer)
        self.storage.copy_(self._host, non_blocking=True)
        self._record(range(self.num_layers))

    def update_layer(self, layer: int, row: PlacementRow) -> None:
        """Switch one layer, in stream order.

        Raises:
            ValueError: the layer is out of range, or the row does not fit the tables (number of slots,
                ids, an expert without a slot or twice on a rank, shares that do not sum to 65535). Nothing is changed.
        """
        require_int("layer", layer, -(1 << 63))
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} is outside [0, num_layers={self.num_layers})")
        check_table_row(row, self.num_slots, self.num_logical_experts, self.topology)
        self._fill(layer, row)
        self._write_orders(layer)
        self.storage[layer].copy_(self._host[layer], non_blocking=True)
        self._record((layer,))

    def _fill(self, layer: int, row: PlacementRow) -> None:
        event = self._copied[layer]
        if event is not None:
            event.synchronize()  # the last copy out of this pinned row
        self._in_use[layer] = row
        for number in range(CLASSES if self.class_rows else 1):
            shares = self._shares_of_class(row, number)
            own = row if shares is None else PlacementRow(row.slots, shares)
            begin = self._order_begin(layer) - number * self.storage.shape[2]
            fields = self._fields[layer][number]
            fill_table_row(own, self.topology, self.ep_rank, begin, fields, only_used=shares is not None)

    def _shares_of_class(self, row: PlacementRow, number: int) -> NDArray[np.uint16] | None:
        """Of the first set that is for batches as large as the class has; None: the row's own are for them."""
        if number == 0 or row.classes is None:
            return None
        largest = self.class_rows[0 if number == SMALL else -1]
        at = int(np.searchsorted(row.classes.rows, largest))
        return row.classes.shares[at] if at < len(row.classes.rows) else None

    def enable_sequences(self) -> None:
        """Make the orders of tickets, now and at every update; a router that deals tickets by shares asks for it."""
        if not self._with_orders:
            self._with_orders = True
            if self._order_words:
                compile_orders()
            for layer in range(self.num_layers):
                self._write_orders(layer)

    def prepare(self, placement: Placement) -> None:
        """Make the orders that this placement's rows will need, so that their updates only copy. On any thread."""
        require_instance("placement", placement, Placement)
        for layer in range(self.num_layers if self._with_orders else 0):
            slots, shares, _ = placement.row(layer)
            if shares is None:
                continue
            uneven = np.bincount(slots, weights=shares != even_shares(slots)) > 0
            for expert in np.flatnonzero(uneven & (np.bincount(slots) > TREE_REPLICAS)):
                packed_order(shares[slots == expert].astype(np.int32).tobytes())

    def _order_begin(self, layer: int) -> int:
        """Words from the start of a layer's row to its orders."""
        row, orders = layer * self.storage.stride(0), layer * self._order_words
        return self.storage.numel() - row + orders

    def _write_orders(self, layer: int) -> None:
        fields = self._fields[layer][0]
        if not self._with_orders or fields["replica_depth"][0] < 2:
            return
        orders = []
        for expert in np.flatnonzero(fields["replica_sequence"]):
            first, last = fields["replica_offset"][expert : expert + 2]
            shares = np.diff(fields["replica_threshold"][first:last], prepend=np.int32(0))
            orders.append(packed_order(shares.tobytes()))
        length = sum(map(len, orders))
        # Pinned memory that the allocator takes back once the copy is done.
        staged = torch.empty(length, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        np.concatenate(orders, out=staged.numpy())
        self._orders[layer, :length].copy_(staged, non_blocking=True)

    def _record(self, layers: Any) -> None:
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        for layer in layers:
            self._copied[layer] = event
