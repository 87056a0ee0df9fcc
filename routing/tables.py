"""Dispatch tables of one rank: which slots hold a logical expert, derived from the placement, updated in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from evenroute.eplb.placement import Placement, PlacementRow
from evenroute.routing.table_row import SPAN_COUNT_BITS, fill_table_row, fits_payload

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

    Updates are enqueued on the current stream; the host waits only if it overtakes an update of the same layer.
    """

    physical_to_logical: Tensor
    replica_offset: Tensor
    replica_slot: Tensor
    replica_threshold: Tensor
    replica_span: Tensor
    static_slot: Tensor
    replica_payload: Tensor
    static_payload: Tensor

    def __init__(self, placement: Placement, *, ep_rank: int, device: torch.device | str) -> None:
        topology = placement.topology
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
        self.device = torch.device(device)
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
        }
        self.columns: dict[str, slice] = {}
        start = 0
        for name, width in widths.items():
            self.columns[name] = slice(start, start + width)
            # Four words to spare: the weighted deal reads thresholds four at a time.
            start = -(-(start + width + 4) // _ALIGN) * _ALIGN
        self.storage = torch.zeros((self.num_layers, start), dtype=torch.int32, device=self.device)
        self.layer_rows = list(self.storage)  # [L] views, one pointer a layer
        for name, columns in self.columns.items():
            setattr(self, name, self.storage[:, columns])
        on_gpu = self.device.type == "cuda"
        self._host = torch.zeros((self.num_layers, start), dtype=torch.int32, pin_memory=on_gpu)
        self._rows = self._host.numpy()
        self._fields = [{name: row[part] for name, part in self.columns.items()} for row in self._rows]
        self._copied: list[torch.cuda.Event | None] = [None] * self.num_layers
        self.load(placement)

    def load(self, placement: Placement) -> None:
        """Take over a placement of the same shape; raises ValueError for another shape."""
        mine = (self.num_layers, self.num_logical_experts, self.num_slots, self.topology)
        other = (placement.num_layers, placement.num_logical_experts, placement.num_slots, placement.topology)
        if mine != other:
            raise ValueError(
                f"placement has (layers, experts, slots, topology) {other}, the tables have {mine}"
            )
        for layer in range(self.num_layers):
            self._fill(layer, placement.row(layer))
        self.storage.copy_(self._host, non_blocking=True)
        self._record(range(self.num_layers))

    def update_layer(self, layer: int, row: PlacementRow) -> None:
        """Switch one layer, in stream order. The row must be one of a checked placement of this shape.

        Raises:
            ValueError: the layer is out of range or the row has another number of slots.
        """
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} is outside [0, num_layers={self.num_layers})")
        if len(row.slots) != self.num_slots:
            raise ValueError(f"row has {len(row.slots)} slots, the tables have {self.num_slots}")
        self._fill(layer, row)
        self.storage[layer].copy_(self._host[layer], non_blocking=True)
        self._record((layer,))

    def _fill(self, layer: int, row: PlacementRow) -> None:
        event = self._copied[layer]
        if event is not None:
            event.synchronize()  # the last copy out of this pinned row
        fill_table_row(row, self.topology, self.ep_rank, self._fields[layer])

    def _record(self, layers: Any) -> None:
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        for layer in layers:
            self._copied[layer] = event
