"""Full plans from scratch: ``global`` and ``hierarchical``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology, check_plan_numbers, nearest_num_groups
from evenroute.eplb.planner.counts import improve_even
from evenroute.eplb.planner.kernels.align import align
from evenroute.eplb.planner.kernels.pack import full_plan
from evenroute.eplb.planner.layers import normalized, over_layers
from evenroute.eplb.planner.moves import MoveLimits, keep_better, moved_placement


def check_hierarchical(num_logical_experts: int, num_slots: int, num_groups: int, topology: Topology) -> None:
    """Whole groups on nodes, and no expert twice on a rank of its node.

    Raises:
        ValueError: names the numbers, the rule and the nearest valid ones.
    """
    nodes, ranks = topology.num_nodes, topology.ep_size
    check_plan_numbers(num_logical_experts, num_slots, num_groups, nodes, ranks)
    if num_groups % nodes:
        nearest = nearest_num_groups(num_logical_experts, max(num_groups, nodes), nodes)
        raise ValueError(
            f"num_groups={num_groups}, num_nodes={nodes}: policy hierarchical needs num_nodes to divide "
            f"num_groups; nearest valid num_groups: {nearest}"
        )
    most = num_logical_experts * ranks // nodes
    if num_slots > most:
        raise ValueError(
            f"num_logical_experts={num_logical_experts}, num_slots={num_slots}, ep_size={ranks}, "
            f"num_nodes={nodes}: with groups on one node an expert has at most ep_size / num_nodes replicas; "
            f"nearest valid num_slots: {most // ranks * ranks}"
        )


def respects_groups(row: NDArray[np.int32], num_groups: int, num_experts: int, num_nodes: int) -> bool:
    """Does every group of experts lie on one node in this row ``[P]``?"""
    group = (row // (num_experts // num_groups)).reshape(num_nodes, -1)
    pairs = np.zeros((num_nodes, num_groups), dtype=np.bool_)
    pairs[np.arange(num_nodes)[:, None], group] = True
    return bool((pairs.sum(axis=0) == 1).all())


def spill_from_nodes(
    loads: NDArray[np.float64],
    placement: Placement,
    num_groups: int,
    spill: float,
    *,
    num_threads: int | None = None,
) -> Placement:
    """The middle way: at most the part ``spill`` of all slots may leave their group's node of ``placement``."""
    topology, num_experts = placement.topology, placement.num_logical_experts
    by_node = placement.holds().reshape(
        placement.num_layers, topology.num_nodes, topology.ranks_per_node, num_groups, -1
    )
    home = by_node.any(axis=(2, 4))  # [L, N, G]
    homes = np.repeat(np.repeat(home, topology.ranks_per_node, axis=1), num_experts // num_groups, axis=2)
    limits = MoveLimits(max_moves=int(spill * placement.physical_to_logical.size))
    return moved_placement(loads, placement, limits, weighted=False, homes=homes, num_threads=num_threads)


def full_placement(
    loads: NDArray[np.float64],
    current: Placement,
    *,
    num_groups: int = 1,
    hierarchical: bool = False,
    refine: bool = True,
    search_counts: bool = True,
    num_threads: int | None = None,
) -> Placement:
    """Best placement found from scratch, laid over ``current`` so that little moves.

    A layer without load, or one that a full plan does not improve, keeps its row.

    Args:
        loads: validated ``[L, E]``.
        hierarchical: whole groups stay on one node (``num_groups`` must be a multiple of the nodes).
        refine: the two-mode layout and swap refinement.
        search_counts: further replica counts, and moves of replicas, where a layer is not good enough.
    """
    topology, num_experts = current.topology, current.num_logical_experts
    if hierarchical:
        check_hierarchical(num_experts, current.num_slots, num_groups, topology)
    groups, nodes = (num_groups, topology.num_nodes) if hierarchical else (1, 1)
    scaled = normalized(loads)
    busy = np.flatnonzero(scaled.any(axis=1))
    work = np.ascontiguousarray(scaled[busy])
    old = np.ascontiguousarray(current.physical_to_logical[busy])
    new = np.empty((len(busy), current.num_slots), dtype=np.int32)

    def plan(first: int, last: int) -> None:
        part = slice(first, last)
        full_plan(work[part], topology.ep_size, current.num_slots, groups, nodes, refine, new[part])

    def lay(first: int, last: int) -> None:
        align(old[first:last], new[first:last], topology.ep_size, nodes, num_experts, nodes == 1)

    over_layers(plan, len(busy), num_threads)
    if search_counts and refine:
        if nodes == 1:
            improve_even(work, new, topology.ep_size, num_threads)
        else:
            _improve_nodes(work, new, topology, num_threads)
    over_layers(lay, len(busy), num_threads)
    table = current.physical_to_logical.copy()
    table[busy] = new
    made = Placement(table, num_experts, topology)
    kept = keep_better(scaled, current, made)
    if not hierarchical:
        return kept
    rows = kept.physical_to_logical
    foreign = [
        layer
        for layer in busy
        if not respects_groups(rows[layer], num_groups, num_experts, topology.num_nodes)
    ]
    for layer in foreign:  # better than any hierarchical row, but not one
        kept = kept.with_row(int(layer), made.row(int(layer)))
    return kept


def _improve_nodes(
    loads: NDArray[np.float64], rows: NDArray[np.int32], topology: Topology, num_threads: int | None
) -> None:
    """`improve_even` inside every node of ``rows [L, P]``: its experts and ranks are a pool of their own."""
    for slots in np.array_split(np.arange(rows.shape[1]), topology.num_nodes):
        experts = np.stack([np.unique(row) for row in rows[:, slots]])  # [L, E / N]: whole groups
        pool = np.take_along_axis(loads, experts, axis=1)
        busy = np.flatnonzero(pool.any(axis=1))
        found = np.zeros((len(busy), len(slots)), dtype=np.int32)
        for place, layer in enumerate(busy):
            found[place] = np.searchsorted(experts[layer], rows[layer, slots])
        improve_even(np.ascontiguousarray(pool[busy]), found, topology.ranks_per_node, num_threads)
        rows[busy[:, None], slots] = np.take_along_axis(experts[busy], found, axis=1)


def node_bound(loads: NDArray[np.float64], num_groups: int, topology: Topology) -> float | None:
    """Upper bound of the mean balancedness of any hierarchical plan: perfect ranks, best known node loads.

    The groups of a layer are dealt to nodes as the plan does it; None without load.
    """
    scaled = normalized(loads)
    num_layers = len(scaled)
    group_load = np.ascontiguousarray(scaled.reshape(num_layers, num_groups, -1).sum(axis=2))
    nodes = np.empty((num_layers, num_groups), dtype=np.int32)
    busy = group_load.any(axis=1)
    if not busy.any():
        return None
    full_plan(group_load, topology.num_nodes, num_groups, 1, 1, True, nodes)
    layers = np.arange(num_layers)[:, None]
    per_node = group_load[layers, nodes].reshape(num_layers, topology.num_nodes, -1).sum(axis=2)
    return balancedness(per_node).mean
