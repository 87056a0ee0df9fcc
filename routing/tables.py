"""Dispatch tables of one rank: which slots hold a logical expert, derived from the placement, updated in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenroute.eplb.placement import SHARE_TOTAL, Placement, PlacementRow, even_shares, normalize_shares
from evenroute.eplb.topology import Topology

SPAN_COUNT_BITS = 10
MAX_SLOTS = 1 << 20
_ALIGN = 32  # int32 words: rows start on their own 128-byte lines


def _static_slots(
    experts: NDArray[Any],
    slots: NDArray[Any],
    num_experts: int,
    num_slots: int,
    topology: Topology,
    ep_rank: int,
) -> NDArray[np.int32]:
    """Slot of each expert for this rank: same rank, else same node, else dealt evenly over the ranks.

    `experts`, `slots` [P]: the CSR entries (sorted by expert, then slot). Ranks that must share a set of replicas
    take them in turn, from a start that differs by expert.
    """
    ranks = slots // (num_slots // topology.ep_size)
    nodes = ranks // topology.ranks_per_node
    node = topology.node_of_rank(ep_rank)
    on_rank = np.zeros((num_experts, topology.ep_size), dtype=bool)
    on_rank[experts, ranks] = True
    on_node: NDArray[np.bool_] = np.any(on_rank.reshape(num_experts, topology.num_nodes, -1), axis=2)  # type: ignore[assignment]
    first = node * topology.ranks_per_node
    # My place among the ranks that are served by the same set.
    turn_node = (~on_rank[:, first:ep_rank]).sum(axis=1)
    turn_all = (~on_node[:, :node]).sum(axis=1) * topology.ranks_per_node + (ep_rank - first)
    reachable = np.where(
        on_rank[experts, ep_rank], ranks == ep_rank, np.where(on_node[experts, node], nodes == node, True)
    )
    turn = np.where(on_rank[:, ep_rank], 0, np.where(on_node[:, node], turn_node, turn_all))
    experts, slots = experts[reachable], slots[reachable]
    count = np.bincount(experts, minlength=num_experts)
    offset = np.concatenate(([0], np.cumsum(count)))
    wanted = (turn + np.arange(num_experts)) % count
    chosen: NDArray[np.int32] = slots[offset[:-1] + wanted].astype(np.int32)
    return chosen


def fits_payload(num_slots: int, ep_size: int) -> bool:
    """True if offset (12 bits) and replicas (7 bits) of every expert fit beside its id in the kernels' payload."""
    return num_slots <= 1 << 12 and ep_size < 1 << 7


def build_table_row(
    row: PlacementRow, num_experts: int, topology: Topology, ep_rank: int
) -> dict[str, NDArray[np.int32]]:
    """One layer's tables as numpy int32 (the fields of `DispatchTables`, without the layer axis)."""
    slots = np.asarray(row.slots, dtype=np.int64)
    order = np.argsort(slots, kind="stable")
    experts = slots[order]
    count = np.bincount(slots, minlength=num_experts)
    offset = np.concatenate(([0], np.cumsum(count)))
    uneven = None if row.shares is None else normalize_shares(slots, row.shares)
    shares = (even_shares(slots) if uneven is None else uneven).astype(np.int64)[order]
    total = np.cumsum(shares)
    before = np.concatenate(([0], total))[offset[:-1]]
    threshold = total - before[experts]
    is_uneven = np.zeros(num_experts, dtype=np.int64)
    if uneven is not None:
        is_uneven[slots[uneven != even_shares(slots)]] = 1
    span = (offset[:-1] << (SPAN_COUNT_BITS + 1)) | (count << 1) | is_uneven
    static = _static_slots(experts, order, num_experts, slots.size, topology, ep_rank)
    inverted = 2047 - np.arange(num_experts, dtype=np.int64)
    entry = (offset[:-1] << 8) | (count << 1) | is_uneven
    tables = {
        "physical_to_logical": slots,
        "replica_offset": offset,
        "replica_slot": order,
        "replica_threshold": threshold,
        "replica_span": span,
        "static_slot": static,
        "replica_payload": (inverted << 20) | (entry if fits_payload(slots.size, topology.ep_size) else 0),
        "static_payload": (inverted << 20) | static,
    }
    return {name: table.astype(np.int32) for name, table in tables.items()}


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
        for name, values in build_table_row(
            row, self.num_logical_experts, self.topology, self.ep_rank
        ).items():
            self._rows[layer, self.columns[name]] = values

    def _record(self, layers: Any) -> None:
        if self.device.type != "cuda":
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        for layer in layers:
            self._copied[layer] = event


assert SHARE_TOTAL == 65535, "the kernels' weighted deal divides by 65535"
