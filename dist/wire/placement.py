"""A placement and its wire form: the only packer and the only unpacker."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.wire.messages import JobShape, WirePlacement
from evenroute.dist.wire.received import check_fits
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology


def pack_placement(placement: Placement) -> WirePlacement:
    """The wire form of a placement. A layer with even shares among uneven ones travels with its even numbers."""
    return _pack(
        placement.physical_to_logical, placement.shares, placement.num_logical_experts, placement.topology
    )


def pack_rows(rows: Sequence[PlacementRow], job: JobShape) -> WirePlacement:
    """The wire form of rows that are in use, and so were checked before."""
    shares = None
    if any(row.shares is not None for row in rows):
        shares = np.stack([even_shares(row.slots) if row.shares is None else row.shares for row in rows])
    topology = Topology(job.ep_size, job.num_nodes)
    return _pack(np.stack([row.slots for row in rows]), shares, job.num_logical_experts, topology)


def _pack(
    slots: NDArray[np.int32], shares: NDArray[np.uint16] | None, num_logical_experts: int, topology: Topology
) -> WirePlacement:
    return WirePlacement(
        num_layers=slots.shape[0],
        num_logical_experts=num_logical_experts,
        num_slots=slots.shape[1],
        ep_size=topology.ep_size,
        num_nodes=topology.num_nodes,
        physical_to_logical=slots.astype("<i4").tobytes(),
        shares=None if shares is None else shares.astype("<u2").tobytes(),
    )


def unpack_placement(wire: WirePlacement, job: JobShape) -> Placement:
    """The placement, checked against the job and all placement rules. Raises ValueError in one line."""
    check_fits(wire, job)
    shape = (wire.num_layers, wire.num_slots)
    slots = np.frombuffer(wire.physical_to_logical, dtype="<i4").astype(np.int32).reshape(shape)
    shares = None
    if wire.shares is not None:
        shares = np.frombuffer(wire.shares, dtype="<u2").astype(np.uint16).reshape(shape)
    return Placement(slots, wire.num_logical_experts, Topology(wire.ep_size, wire.num_nodes), shares)
