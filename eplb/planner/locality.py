"""Node-aware placement: keep tokens on their source's node where that costs no balance."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_numbers
from evenroute.eplb.loads.balance import slot_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import SHARE_TOTAL
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.kernels.align import keep_places
from evenroute.eplb.planner.kernels.locality import swap_towards_sources
from evenroute.eplb.planner.layers import normalized

SLACK = 1e-3  # balancedness that locality may cost


def validate_source_loads(
    source_loads: ArrayLike, topology: Topology, num_layers: int, num_experts: int
) -> NDArray[np.float64]:
    """Loads ``[R, L, E]`` by source rank, as float64.

    Raises:
        ValueError: another shape, or a load that is not finite and >= 0.
    """
    array = as_numbers("source_loads", source_loads, "[ranks, layers, experts]")
    expected = (topology.ep_size, num_layers, num_experts)
    if array.shape != expected:
        raise ValueError(
            f"source_loads must be [ranks, layers, experts] {expected}, found shape {list(array.shape)}"
        )
    bad = np.argwhere(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        rank, layer, expert = (int(i) for i in bad[0])
        raise ValueError(
            f"source_loads: rank {rank} layer {layer} expert {expert} is {array[rank, layer, expert]}, "
            "expected a finite number >= 0"
        )
    return array


def _by_node(source_loads: NDArray[np.float64], topology: Topology) -> NDArray[np.float64]:
    """``[L, N, E]``: loads by source node."""
    ranks, layers, experts = source_loads.shape
    nodes = topology.num_nodes
    summed = source_loads.reshape(nodes, ranks // nodes, layers, experts).sum(axis=1)
    return np.ascontiguousarray(summed.transpose(1, 0, 2))


def crossing_fraction(placement: Placement, source_loads: NDArray[np.float64]) -> float:
    """Part of all (token, expert) pairs that leave their source's node, every source using the shares alike."""
    by_node = _by_node(source_loads, placement.topology)
    total = by_node.sum()
    if total <= 0:
        return 0.0
    rows = placement.physical_to_logical
    shares = placement.all_shares()
    node = np.arange(placement.num_slots) // (placement.num_slots // placement.topology.num_nodes)
    layers = np.arange(placement.num_layers)[:, None]
    stays = by_node[layers, node[None, :], rows] * (shares / SHARE_TOTAL)
    return float(max(0.0, 1.0 - stays.sum() / total))


def localize(
    placement: Placement,
    loads: NDArray[np.float64],
    source_loads: NDArray[np.float64],
    *,
    current: Placement | None = None,
    slack: float = SLACK,
) -> Placement:
    """Exchange ranks' contents, then slots, between nodes while fewer tokens cross and no rank gets hotter
    than the hottest one now (by ``slack``, relative). Even and uneven shares travel with their slots.

    Args:
        loads: ``[L, E]`` to balance; source_loads: ``[R, L, E]``.
        current: placement in use; slots within a rank keep its order where they can.
    """
    topology = placement.topology
    if topology.num_nodes == 1:
        return placement
    by_node = _by_node(source_loads, topology)
    rows = placement.physical_to_logical.copy()
    even = placement.shares is None
    shares = placement.all_shares()
    scaled = normalized(loads)
    sizes = np.ascontiguousarray(slot_loads(scaled, placement))
    swap_towards_sources(rows, shares, sizes, by_node, topology.ep_size, topology.num_nodes, slack)
    if even and current is not None:
        for before, after in zip(current.physical_to_logical, rows, strict=True):
            keep_places(before, after, placement.num_local_slots, placement.num_logical_experts)
    return Placement(rows, placement.num_logical_experts, topology, None if even else shares)
