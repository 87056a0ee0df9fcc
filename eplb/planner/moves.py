"""Plans from the placement in use: few moves with even shares, exact uneven shares, and both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_integer, describe, is_number, require_instance
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.budget import Hulls, Limits, Paths, choose_points, spend_leftover
from evenroute.eplb.planner.kernels.align import keep_places
from evenroute.eplb.planner.kernels.even_moves import even_path
from evenroute.eplb.planner.kernels.flow import solve_shares
from evenroute.eplb.planner.kernels.moves import replay
from evenroute.eplb.planner.kernels.weighted_moves import weighted_path
from evenroute.eplb.planner.layers import normalized, over_layers

# Levels (of the mean rank load) that the weighted search aims at: a low one for few moves, a high one for many.
WEIGHTED_LEVELS = (1.004, 1.03)
UNLIMITED_LEVEL = 1.0005
WEIGHTED_TRIES = (32, 256)
ROUNDING = 2e-5  # what rounding shares to 1 / 65535 may cost a mean


@dataclass(frozen=True)
class MoveCost:
    """What moving a slot costs, to be weighed against what balance gains.

    Attributes:
        bytes_per_expert: weights of one expert of one layer.
        intra_node_bytes_per_second, inter_node_bytes_per_second: of one rank.
        seconds_in_use: how long the plan will serve.
        moe_time_fraction: part of a step that scales with the hottest rank's load.
    """

    bytes_per_expert: float
    intra_node_bytes_per_second: float
    inter_node_bytes_per_second: float
    seconds_in_use: float
    moe_time_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not is_number(value) or not value > 0:
                raise ValueError(f"{name} must be a finite number > 0, found {describe(value)}")
        if self.moe_time_fraction > 1:
            raise ValueError(f"moe_time_fraction must be <= 1, found {self.moe_time_fraction}")

    def seconds_per_slot(self, num_ranks: int, num_nodes: int) -> float:
        """Of the whole job for one slot, ranks fetching side by side; between nodes if there are several."""
        speed = self.intra_node_bytes_per_second if num_nodes == 1 else self.inter_node_bytes_per_second
        return self.bytes_per_expert / speed / num_ranks

    def price_per_slot(self, num_layers: int, topology: Topology) -> float:
        """Balancedness of one of ``num_layers`` layers that a moved slot must gain to pay for itself."""
        seconds = self.seconds_per_slot(topology.ep_size, topology.num_nodes)
        return seconds * num_layers / (self.seconds_in_use * self.moe_time_fraction)


@dataclass(frozen=True)
class MoveLimits:
    """How far a plan from the placement in use may go; nothing given: as long as balance improves.

    Attributes:
        target: mean balancedness over layers that is enough.
        max_moves, max_moves_per_rank: moved slots over all layers, in all and on any rank.
        cost: moves must gain more time than they cost.
    """

    target: float | None = None
    max_moves: int | None = None
    max_moves_per_rank: int | None = None
    cost: MoveCost | None = None

    def __post_init__(self) -> None:
        target = self.target
        if target is not None and (not is_number(target) or not 0 < target <= 1):
            raise ValueError(f"target={describe(target)}, expected a balancedness in (0, 1]")
        for name in ("max_moves", "max_moves_per_rank"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_integer(name, value, 0))
        if self.cost is not None:
            require_instance("cost", self.cost, MoveCost)


def _search(
    loads: NDArray[np.float64],
    slots: NDArray[np.int32],
    num_ranks: int,
    limits: MoveLimits,
    weighted: bool,
    num_threads: int | None,
    homes: NDArray[np.bool_] | None = None,
) -> Paths:
    """Paths of layers ``loads [L, E]`` from ``slots [L, P]``."""
    nowhere = np.zeros((0, 0, 0), dtype=np.bool_)
    num_layers, num_slots = slots.shape
    most = num_slots
    if limits.max_moves is not None and num_layers:
        # A layer gets at most a few times its part of the budget; beyond that its hull is flat.
        part = -(-limits.max_moves // num_layers)
        most = min(most, 3 * part + 6 if weighted else 8 * part // 5 + 4, limits.max_moves)
    levels: tuple[float, ...] = (1.0,)
    if weighted:
        low, high = WEIGHTED_LEVELS
        if limits.target is not None:
            low = min(low, 1 + (1 / limits.target - 1) / 2)
        elif limits.max_moves is None:
            low = UNLIMITED_LEVEL
        levels = (low, high)
    longest = 2 * (most if homes is None else num_slots)
    paths = Paths.empty(len(levels), num_layers, longest)

    def search(first: int, last: int) -> None:
        part = slice(first, last)
        for path, level in enumerate(levels):
            work, row = loads[part], slots[part].copy()
            at_home = nowhere if homes is None else homes[part]
            ops, cost = paths.operations[path, part], paths.costs[path, part]
            reached, length = paths.levels[path, part], paths.lengths[path, part]
            if weighted:
                weighted_path(work, row, num_ranks, most, level, WEIGHTED_TRIES, ops, cost, reached, length)
            else:
                even_path(work, row, num_ranks, at_home, most, level, 2, ops, cost, reached, length)

    over_layers(search, num_layers, num_threads, block=4)
    return paths


class RankCap:
    """Refuses points with which some rank would fetch more than ``most`` slots over all layers."""

    def __init__(
        self, slots: NDArray[np.int32], paths: Paths, hulls: Hulls, num_ranks: int, most: int
    ) -> None:
        self.slots, self.paths, self.hulls, self.most = slots, paths, hulls, most
        self.num_ranks = num_ranks
        self.total = np.zeros(num_ranks, dtype=np.int64)
        self.of_layer = np.zeros((len(slots), num_ranks), dtype=np.int64)

    def __call__(self, layer: int, point: int) -> bool:
        row = self.slots[layer : layer + 1].copy()
        path, step = self.hulls.path[layer, point], self.hulls.step[layer, point : point + 1]
        replay(self.paths.operations[path, layer : layer + 1], step, row)
        old = self.slots[layer].reshape(self.num_ranks, -1)
        new = row.reshape(self.num_ranks, -1)
        fetched = (new[:, :, None] != old[:, None, :]).all(axis=2).sum(axis=1)
        total = self.total - self.of_layer[layer] + fetched
        if (total > self.most).any():
            return False
        self.total, self.of_layer[layer] = total, fetched
        return True


def _choose(
    slots: NDArray[np.int32],
    paths: Paths,
    means: NDArray[np.float64],
    topology: Topology,
    limits: MoveLimits,
    weighted: bool,
) -> NDArray[np.int32]:
    """Rows ``[L, P]`` after the operations that the limits allow."""
    values = means[None, :, None] / paths.levels
    stop = Limits(limits.max_moves)
    if limits.cost is not None:
        # Layers take turns, so a step's time is proportional to the sum over layers of the hottest rank's load.
        cost = limits.cost
        seconds = cost.seconds_in_use * cost.moe_time_fraction
        values = -paths.levels * (seconds / paths.levels[0, :, 0].sum())
        price = cost.seconds_per_slot(topology.ep_size, topology.num_nodes)
        stop = Limits(limits.max_moves, price=price)
    elif limits.target is not None:
        enough = (limits.target + (ROUNDING if weighted else 0.0)) * len(means)
        stop = Limits(limits.max_moves, target=enough)
    hulls = Hulls.of(paths, values)
    fits = None
    if limits.max_moves_per_rank is not None:
        fits = RankCap(slots, paths, hulls, topology.ep_size, limits.max_moves_per_rank)
    points = choose_points(hulls, stop, fits)
    layers = np.arange(len(points))
    path, step = hulls.path[layers, points], hulls.step[layers, points]
    spare = limits.max_moves is not None and limits.target is None and limits.cost is None
    if spare and fits is None:
        assert limits.max_moves is not None
        spend_leftover(paths, values, path, step, limits.max_moves)
    rows = slots.copy()
    replay(np.ascontiguousarray(paths.operations[path, layers]), step, rows)
    return rows


def exact_shares(
    loads: NDArray[np.float64], slots: NDArray[np.int32], num_ranks: int, num_threads: int | None = None
) -> tuple[NDArray[np.uint16], NDArray[np.float64]]:
    """Shares that make the hottest rank as cool as it can be: the linear programme's optimum, then rounded.

    Args:
        loads: ``[L, E]``, each layer with load; slots: ``[L, P]``.

    Returns:
        ``[L, P]`` shares of 65535 an expert, and ``[L]`` the optimum (largest rank load) before rounding.
    """
    shares = np.empty(slots.shape, dtype=np.uint16)
    levels = np.empty(len(slots))

    def solve(first: int, last: int) -> None:
        part = slice(first, last)
        solve_shares(loads[part], slots[part], num_ranks, shares[part], levels[part])

    over_layers(solve, len(slots), num_threads)
    return shares, levels


def moved_placement(
    loads: NDArray[np.float64],
    current: Placement,
    limits: MoveLimits,
    *,
    weighted: bool,
    share_gain: float = 0.0,
    homes: NDArray[np.bool_] | None = None,
    num_threads: int | None = None,
) -> Placement:
    """Fewest moves for the target, or the best balancedness within the budget, from ``current``.

    Layers without load, and layers that do not get better, keep their row.

    Args:
        loads: validated ``[L, E]``.
        weighted: exact uneven shares, and moves chosen for them; else even shares.
        homes: ``[L, R, E]``, with even shares only: ``max_moves`` counts the slots that lie elsewhere, instead of
            those that leave the rank where ``current`` has them.
        share_gain: dead band: a row whose slots stay changes its shares only for that much balancedness.
    """
    if limits.target is not None and limits.cost is not None:
        raise ValueError(
            "target and cost exclude each other: give the balancedness wanted, or what moves cost"
        )
    topology, num_experts = current.topology, current.num_logical_experts
    scaled = normalized(loads)
    busy = np.flatnonzero(scaled.any(axis=1))
    if not len(busy):
        return current
    work = np.ascontiguousarray(scaled[busy])
    old = np.ascontiguousarray(current.physical_to_logical[busy])
    means = work.sum(axis=1) / topology.ep_size
    rows = old.copy()
    if limits.max_moves != 0 and limits.max_moves_per_rank != 0:
        at_home = None if homes is None else np.ascontiguousarray(homes[busy])
        paths = _search(work, old, topology.ep_size, limits, weighted, num_threads, at_home)
        rows = _choose(old, paths, means, topology, limits, weighted)
        for before, after in zip(old, rows, strict=True):
            keep_places(before, after, current.num_local_slots, num_experts)
    table = current.physical_to_logical.copy()
    table[busy] = rows
    shares = even_shares(table)
    if weighted:
        shares[busy], _ = exact_shares(work, rows, topology.ep_size, num_threads)
    return keep_better(
        scaled, current, Placement(table, num_experts, topology, shares), share_gain=share_gain
    )


def keep_better(
    scaled: NDArray[np.float64], current: Placement, made: Placement, *, share_gain: float = 0.0
) -> Placement:
    """``made``, but rows of ``current`` where that is no worse, or better by less than the dead band."""
    before = balancedness(rank_loads(scaled, current)).per_layer
    after = balancedness(rank_loads(scaled, made)).per_layer
    same = (current.physical_to_logical == made.physical_to_logical).all(axis=1)
    stays = after <= before + np.where(same, max(share_gain, 1e-12), 1e-12)
    if not stays.any():
        return made
    table = np.where(stays[:, None], current.physical_to_logical, made.physical_to_logical)
    shares = None
    if current.shares is not None or made.shares is not None:
        shares = np.where(stays[:, None], current.all_shares(), made.all_shares())
    return Placement(table, current.num_logical_experts, current.topology, shares)
