"""The columns of the dispatch tables that batches of one size class are dealt by."""

from __future__ import annotations

import torch
from torch import Tensor

from evenroute.eplb.placement.topology import Topology
from evenroute.routing.tables.tickets import entry_bits


class TableView:
    """Columns (int32 tensors ``[L, ...]``, see `DispatchTables`) of one class: views of its storage."""

    topology: Topology
    ep_rank: int
    num_local_slots: int
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

    def bind(
        self, memory: Tensor, storage: Tensor, columns: dict[str, slice], number: int, owner: TableView
    ) -> None:
        """storage [L, classes, row]: the first part of `memory`, behind which the orders of tickets lie."""
        self.topology, self.ep_rank, self.num_local_slots = (
            owner.topology,
            owner.ep_rank,
            owner.num_local_slots,
        )
        self.layer_rows = list(storage[:, number])
        """[L] views, one stable pointer a layer."""
        self._words, self._begins = memory, (storage.stride(0), number * storage.shape[2])
        for name, part in columns.items():
            setattr(self, name, storage[:, number, part])

    def tickets_in_order(self, layer: int, ids: Tensor, count: Tensor, turn: Tensor) -> Tensor:
        """Replica of ticket `turn` in [0, 65535) of experts with an order; tensors int64 of one shape."""
        bits = torch.full_like(count, 16)
        bits[count <= 256] = entry_bits(256)
        bits[count <= 16] = entry_bits(16)
        stride, first = self._begins
        begin = self.replica_sequence[layer].long()[ids] + layer * stride + first
        word = self._words[begin + turn * bits // 32].long()
        return (word >> (turn * bits % 32)) & ((1 << bits) - 1)
