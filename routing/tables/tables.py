"""Dispatch tables of one rank: which slots hold a logical expert, derived from the placement, updated in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from evenroute.eplb._checks import require_instance, require_int
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.shares import even_shares
from evenroute.routing.settings.checks import require_device
from evenroute.routing.settings.config import MAX_EXPERTS
from evenroute.routing.tables.row import SPAN_COUNT_BITS, check_table_row, fill_table_row, fits_payload
from evenroute.routing.tables.tickets import (
    TREE_REPLICAS,
    compile_orders,
    entry_bits,
    packed_order,
    sequence_capacity,
)

__all__ = ["SPAN_COUNT_BITS", "DispatchTables", "fits_payload"]

MAX_SLOTS = 1 << 20
_ALIGN = 32  # int32 words: rows start on their own 128-byte lines


class DispatchTables:
    """Device tables of all layers for one rank; size fixed by (L, E, P), pointers stable for life.

    Attributes (int32, views of one storage):
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

    Memory: 4 (4 P + 6 E) bytes a layer, and 8 KiB for every redundant slot for the orders, were all experts to need one
    (58 layers of 256 experts in 288 slots: 16 MB). Orders are made (1 ms an expert, kept by shares) once a router deals
    tickets by shares: `enable_sequences`; `prepare` makes those of a coming placement on any thread.

    Updates are enqueued on the current stream; the host waits only if it overtakes an update of the same layer.

    Raises:
        ValueError: there is no such rank or device, or the placement is larger than the tables can be.
    """

    physical_to_logical: Tensor
    replica_offset: Tensor
    replica_slot: Tensor
    replica_threshold: Tensor
    replica_span: Tensor
    static_slot: Tensor
    replica_payload: Tensor
    static_payload: Tensor
    replica_sequence: Tensor
    replica_depth: Tensor
    slot_entry: Tensor

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
        words = self.num_layers * (start + self._order_words)
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
        self.storage = self._memory[: self.num_layers * start].view(self.num_layers, start)
        self._orders = self._memory[self.num_layers * start :].view(self.num_layers, self._order_words)
        self._with_orders = False
        self.layer_rows = list(self.storage)  # [L] views, one pointer a layer
        for name, columns in self.columns.items():
            setattr(self, name, self.storage[:, columns])
        on_gpu = self.device.type == "cuda"
        self._host = torch.zeros((self.num_layers, start), dtype=torch.int32, pin_memory=on_gpu)
        self._rows = self._host.numpy()
        self._fields = [{name: row[part] for name, part in self.columns.items()} for row in self._rows]
        self._copied: list[torch.cuda.Event | None] = [None] * self.num_layers

    def layer_row(self, layer: int, num_tokens: int) -> Tensor:
        """The columns of a layer that a batch of T rows is dispatched by, in one row; its pointer is stable."""
        row: Tensor = self.layer_rows[layer]
        return row

    def load(self, placement: Placement) -> None:
        """Take over a placement of the same shape; raises ValueError for another shape."""
        require_instance("placement", placement, Placement)
        mine = (self.num_layers, self.num_logical_experts, self.num_slots, self.topology)
        other = (placement.num_layers, placement.num_logical_experts, placement.num_slots, placement.topology)
        if mine != other:
            raise ValueError(
                f"placement has (layers, experts, slots, topology) {other}, the tables have {mine}"
            )
        for layer in range(self.num_layers):
            self._fill(layer, placement.row(layer))
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
        fill_table_row(row, self.topology, self.ep_rank, self._order_begin(layer), self._fields[layer])

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

    def tickets_in_order(self, layer: int, ids: Tensor, count: Tensor, turn: Tensor) -> Tensor:
        """Replica of ticket `turn` in [0, 65535) of experts with an order; tensors int64 of one shape."""
        bits = torch.full_like(count, 16)
        bits[count <= 256] = entry_bits(256)
        bits[count <= 16] = entry_bits(16)
        begin = self.replica_sequence[layer].long()[ids] + layer * self.storage.stride(0)
        word = self._memory[begin + turn * bits // 32].long()
        return (word >> (turn * bits % 32)) & ((1 << bits) - 1)

    def _order_begin(self, layer: int) -> int:
        """Words from the start of a layer's row to its orders."""
        row, orders = layer * self.storage.stride(0), layer * self._order_words
        return self.storage.numel() - row + orders

    def _write_orders(self, layer: int) -> None:
        fields = self._fields[layer]
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
