"""A placement and its wire form: the only packer and the only unpacker."""

from collections.abc import Sequence

import numpy as np

from evenroute.dist.wire.messages import JobShape, WirePlacement
from evenroute.dist.wire.received import check_fits
from evenroute.eplb.placement.classes import pack_shares, unpack_shares
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology


def pack_placement(placement: Placement) -> WirePlacement:
    """The wire form of a placement. A layer with even shares among uneven ones travels with its even numbers."""
    slots = placement.physical_to_logical
    return WirePlacement(
        num_layers=slots.shape[0],
        num_logical_experts=placement.num_logical_experts,
        num_slots=slots.shape[1],
        ep_size=placement.topology.ep_size,
        num_nodes=placement.topology.num_nodes,
        physical_to_logical=slots.astype("<i4").tobytes(),
        shares=pack_shares(slots, placement.shares, placement.classes),
    )


def pack_rows(rows: Sequence[PlacementRow], job: JobShape) -> WirePlacement:
    """The wire form of rows that are in use."""
    topology = Topology(job.ep_size, job.num_nodes)
    return pack_placement(Placement.from_rows(rows, job.num_logical_experts, topology))


def unpack_placement(wire: WirePlacement, job: JobShape) -> Placement:
    """The placement, checked against the job and all placement rules. Raises ValueError in one line."""
    check_fits(wire, job)
    shape = (wire.num_layers, wire.num_slots)
    slots = np.frombuffer(wire.physical_to_logical, dtype="<i4").astype(np.int32).reshape(shape)
    shares, classes = unpack_shares(wire.shares, shape)
    return Placement(slots, wire.num_logical_experts, Topology(wire.ep_size, wire.num_nodes), shares, classes)
