"""Dispatch tables of one layer in plain numpy: the oracle of the compiled builder."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.placement.shares import even_shares, uneven_or_none
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.tables.row import SPAN_COUNT_BITS, fits_payload


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


def build_table_row(
    row: PlacementRow, num_experts: int, topology: Topology, ep_rank: int, order_begin: int = 0
) -> dict[str, NDArray[np.int32]]:
    """One layer's tables as numpy int32 (the fields of `DispatchTables`, without the layer axis)."""
    slots = np.asarray(row.slots, dtype=np.int64)
    order = np.argsort(slots, kind="stable")
    experts = slots[order]
    count = np.bincount(slots, minlength=num_experts)
    offset = np.concatenate(([0], np.cumsum(count)))
    uneven = None if row.shares is None else uneven_or_none(slots, row.shares)
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
    words = (
        np.where(count <= 4, 0, np.where(count <= 16, 8192, np.where(count <= 256, 16384, 32768))) * is_uneven
    )
    orders = np.where(words > 0, order_begin + np.cumsum(words) - words, 0)
    deepest = int(np.max(count * is_uneven))
    tables = {
        "physical_to_logical": slots,
        "replica_offset": offset,
        "replica_slot": order,
        "replica_threshold": threshold,
        "replica_span": span,
        "static_slot": static,
        "replica_payload": (inverted << 20) | (entry if fits_payload(slots.size, topology.ep_size) else 0),
        "static_payload": (inverted << 20) | static,
        "replica_sequence": orders,
        "replica_depth": np.array([2 if deepest > 4 else 1 if deepest > 2 else 0]),
        "slot_entry": np.argsort(order),
    }
    return {name: table.astype(np.int32) for name, table in tables.items()}
