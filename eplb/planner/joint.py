"""Joint planning: one placement for several windows of loads at once, replica counts, slots and shares together."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.planner.budget import Hulls, Limits, Paths, choose_points, spend_leftover
from evenroute.eplb.planner.full import full_placement
from evenroute.eplb.planner.history.expected import Expected
from evenroute.eplb.planner.kernels.align import align, keep_places
from evenroute.eplb.planner.kernels.joint import joint_path
from evenroute.eplb.planner.kernels.moves import replay
from evenroute.eplb.planner.kernels.spread import joint_shares, round_parts
from evenroute.eplb.planner.kernels.two_modes import find_kinds
from evenroute.eplb.planner.layers import normalized, over_layers
from evenroute.eplb.planner.moves import MoveLimits, RankCap, exact_shares, moved_placement

Floats = NDArray[np.float64]

# Load above these parts of a mean rank's counts. Below 1, because the next window differs from all that were seen: a
# rank just below the mean is the next to be hot.
MOVE_LEVEL, SHARE_LEVEL = 0.97, 0.99
FULL_LEVELS = (
    0.97,
    0.99,
    1.0,
    1.01,
    0.98,
    1.0,
    1.005,
)  # one search from another: where one is stuck the next is not
SWEEPS, SHARE_SWEEPS, FULL_SHARE_SWEEPS = 2, 30, 200
GOOD_ENOUGH = 0.9995  # expected balancedness of a layer that a full plan searches no further


@dataclass(frozen=True, eq=False)
class _Work:
    """Layers with load: which, their windows ``[L', W, E]`` and weights ``[L', W]``, where experts must not go."""

    layers: NDArray[np.int64]
    loads: Floats
    weights: Floats
    barred: NDArray[np.bool_]
    num_ranks: int
    even: bool
    threads: int | None
    exact: bool = False

    @classmethod
    def of(
        cls,
        expected: Expected,
        num_ranks: int,
        even: bool,
        threads: int | None,
        barred: NDArray[np.bool_] | None,
    ) -> _Work:
        scaled = np.stack([normalized(loads) for loads in expected.windows]).transpose(1, 0, 2)
        weights = scaled.any(axis=2) * expected.weights
        layers = np.flatnonzero(weights.sum(axis=1) > 0)
        weights = weights[layers] / weights[layers].sum(axis=1, keepdims=True)
        nowhere = np.zeros((0, num_ranks, scaled.shape[2]), dtype=np.bool_)
        return cls(
            layers,
            np.ascontiguousarray(scaled[layers]),
            weights,
            nowhere if barred is None else np.ascontiguousarray(barred[layers]),
            num_ranks,
            even,
            threads,
        )

    def only(self, some: NDArray[np.int64]) -> _Work:
        """The same for some of the layers."""
        return replace(
            self,
            layers=self.layers[some],
            loads=np.ascontiguousarray(self.loads[some]),
            weights=self.weights[some],
            barred=self.barred[some] if len(self.barred) else self.barred,
        )

    def search(self, rows: NDArray[np.int32], level: float, most: int, longest: int) -> Paths:
        """One path a layer from ``rows [L', P]``; negative ``most``: moves are free."""
        paths = Paths.empty(1, len(rows), longest)
        num_experts = self.loads.shape[2]

        def search(first: int, last: int) -> None:
            part = slice(first, last)
            row = rows[part].copy()
            kinds = np.zeros(row.shape, dtype=np.int8)
            find_kinds(row, self.num_ranks, num_experts, kinds)
            barred = self.barred[part] if len(self.barred) else self.barred
            joint_path(
                self.loads[part], self.weights[part], row, kinds, barred, self.num_ranks, self.even, level,
                most, SWEEPS, paths.operations[0, part], paths.costs[0, part], paths.levels[0, part],
                paths.lengths[0, part],
            )  # fmt: skip

        over_layers(search, len(rows), self.threads, block=4)
        return paths

    def shares(self, rows: NDArray[np.int32], sweeps: int) -> tuple[NDArray[np.uint16], Floats]:
        """Shares ``[L', P]`` for rows, and the balancedness ``[L']`` they are expected to give.

        One load in a full plan gets the exact optimum; several, or one that will be met again with other noise, get
        those that lower the objective.
        """
        if self.exact:
            found, levels = exact_shares(self.loads[:, 0], rows, self.num_ranks, self.threads)
            return found, self.loads[:, 0].sum(axis=1) / self.num_ranks / levels
        parts, values = np.empty(rows.shape), np.empty(len(rows))
        shares = np.empty(rows.shape, dtype=np.uint16)

        def solve(first: int, last: int) -> None:
            part = slice(first, last)
            loads, weights = self.loads[part], self.weights[part]
            joint_shares(
                loads, weights, rows[part], self.num_ranks, self.even, SHARE_LEVEL, sweeps, parts[part], values[part]
            )  # fmt: skip
            round_parts(rows[part], self.loads.shape[2], parts[part], shares[part])

        over_layers(solve, len(rows), self.threads)
        return shares, values

    def placement(
        self, current: Placement, rows: NDArray[np.int32], shares: NDArray[np.uint16] | None
    ) -> Placement:
        """``current`` with these rows (and shares) in the layers with load."""
        table = current.physical_to_logical.copy()
        table[self.layers] = rows
        if self.even:
            return Placement(table, current.num_logical_experts, current.topology)
        all_shares = even_shares(table) if current.shares is None else current.shares.copy()
        assert shares is not None
        all_shares[self.layers] = shares
        return Placement(table, current.num_logical_experts, current.topology, all_shares)


def node_bars(placement: Placement, num_groups: int) -> NDArray[np.bool_]:
    """``[L, R, E]``: ranks that lie on no node where the expert's group lies now."""
    topology, experts = placement.topology, placement.num_logical_experts
    holds = placement.holds().reshape(
        placement.num_layers, topology.num_nodes, topology.ranks_per_node, num_groups, experts // num_groups
    )
    home = np.repeat(holds.any(axis=(2, 4)), experts // num_groups, axis=2)  # [L, N, E]
    return np.repeat(~home, topology.ranks_per_node, axis=1)


def keep_expected(expected: Expected, current: Placement, made: Placement, least: float = 1e-9) -> Placement:
    """``made``, but rows of ``current`` where that is expected to be no worse, or worse by less than ``least``."""
    before, after = expected.balancedness(current).per_layer, expected.balancedness(made).per_layer
    stays = np.flatnonzero(after <= before + least)
    if len(stays) == 0:
        return made
    table = made.physical_to_logical.copy()
    table[stays] = current.physical_to_logical[stays]
    if current.shares is None and made.shares is None:
        return Placement(table, current.num_logical_experts, current.topology)
    shares = made.all_shares()
    shares[stays] = current.all_shares()[stays]
    return Placement(table, current.num_logical_experts, current.topology, shares)


def joint_shares_placement(
    expected: Expected,
    current: Placement,
    *,
    even: bool = False,
    share_gain: float = 0.0,
    num_threads: int | None = None,
) -> Placement:
    """``current`` with the shares that suit all windows best; nothing moves."""
    work = _Work.of(expected, current.topology.ep_size, even, num_threads, None)
    rows = np.ascontiguousarray(current.physical_to_logical[work.layers])
    shares, _ = work.shares(rows, SHARE_SWEEPS)
    return keep_expected(expected, current, work.placement(current, rows, shares), max(share_gain, 1e-9))


def joint_placement(
    expected: Expected,
    current: Placement,
    *,
    max_moves: int,
    max_moves_per_rank: int | None = None,
    target: float | None = None,
    price: float = 0.0,
    even: bool = False,
    barred: NDArray[np.bool_] | None = None,
    num_threads: int | None = None,
) -> Placement:
    """At most ``max_moves`` slots away from ``current``, with shares, for all windows at once.

    Budgets differ by layer: the steepest rises of expected balancedness are taken first, wherever they are, so a
    steady layer gets none.

    Args:
        max_moves_per_rank: moved slots over all layers on any rank.
        target: mean expected balancedness that is enough.
        price: expected balancedness of a layer that one moved slot must gain.
        even: the dispatch cannot honour shares.
        barred: ``[L, R, E]`` where an expert must not go.
    """
    work = _Work.of(expected, current.topology.ep_size, even, num_threads, barred)
    old = np.ascontiguousarray(current.physical_to_logical[work.layers])
    if not len(old):
        return current
    part = -(-max_moves // len(old))
    most = min(current.num_slots, 2 * part + 4, max_moves)
    rows = old.copy()
    if most > 0 and max_moves_per_rank != 0:
        paths = work.search(old, MOVE_LEVEL, most, 2 * most)
        hulls = Hulls.of(paths, paths.levels)
        enough = None if target is None else target * len(old)
        fits = None
        if max_moves_per_rank is not None:
            fits = RankCap(old, paths, hulls, work.num_ranks, max_moves_per_rank)
        points = choose_points(hulls, Limits(max_moves, target=enough, price=price), fits)
        layers = np.arange(len(old))
        path, step = hulls.path[layers, points], hulls.step[layers, points]
        if price == 0.0 and target is None and fits is None:
            spend_leftover(paths, paths.levels, path, step, max_moves)
        replay(np.ascontiguousarray(paths.operations[0]), step, rows)
        for before, after in zip(old, rows, strict=True):
            keep_places(before, after, current.num_local_slots, current.num_logical_experts)
    shares, _ = work.shares(rows, SHARE_SWEEPS)
    return keep_expected(expected, current, work.placement(current, rows, shares))


def full_joint_placement(
    expected: Expected,
    current: Placement,
    *,
    even: bool = False,
    num_groups: int = 1,
    hierarchical: bool = False,
    num_threads: int | None = None,
) -> Placement:
    """A placement from scratch for all windows at once, laid over ``current`` so that little moves.

    Starts from the full plan of the mean load; one load alone then takes the weighted pass with moves free.
    """
    mean = expected.mean_loads()
    start = full_placement(
        mean, current, num_groups=num_groups, hierarchical=hierarchical, num_threads=num_threads
    )
    barred = node_bars(start, num_groups) if hierarchical else None
    work = _Work.of(expected, current.topology.ep_size, even, num_threads, barred)
    work = replace(work, exact=not even and work.loads.shape[1] == 1)
    rows = np.ascontiguousarray(start.physical_to_logical[work.layers])
    if not len(rows):
        return current
    best = work.shares(rows, SHARE_SWEEPS)[1]
    if not even and not hierarchical:
        _weighted_pass(work, mean, current, rows, best)
    for level in FULL_LEVELS:
        poor = np.flatnonzero(best < GOOD_ENOUGH)
        if not len(poor) or (even and len(expected.weights) == 1):
            break  # even shares of one load: full_placement has searched already
        some = work.only(poor)
        paths = some.search(rows[poor], level, -1, 2 * current.num_slots)
        found = rows[poor]
        replay(np.ascontiguousarray(paths.operations[0]), paths.lengths[0], found)
        kept, value = rows[poor], best[poor]
        _take_better(some, found, kept, value)
        rows[poor], best[poor] = kept, value
    nodes = current.topology.num_nodes if hierarchical else 1
    align(
        np.ascontiguousarray(current.physical_to_logical[work.layers]),
        rows,
        work.num_ranks,
        nodes,
        mean.shape[1],
        nodes == 1,
    )
    shares, _ = work.shares(rows, FULL_SHARE_SWEEPS)
    made = work.placement(current, rows, shares)
    return made if hierarchical else keep_expected(expected, current, made)


def _weighted_pass(
    work: _Work, mean: Floats, current: Placement, rows: NDArray[np.int32], best: Floats
) -> None:
    """Where ``rows`` are not good enough yet: moves for exact shares, as many as help, from two starts."""
    starts = (rows.copy(), None)
    for start in starts:
        poor = np.flatnonzero(best < GOOD_ENOUGH)
        if not len(poor):
            return
        layers = work.layers[poor]
        experts, topology = current.num_logical_experts, current.topology
        table = current.physical_to_logical[layers] if start is None else start[poor]
        some = Placement(table, experts, topology)
        if start is None:  # greedy counts: the search for even shares may have left the better basin
            some = full_placement(mean[layers], some, search_counts=False, num_threads=work.threads)
        made = moved_placement(mean[layers], some, MoveLimits(), weighted=True, num_threads=work.threads)
        part = work.only(poor)
        kept, value = rows[poor], best[poor]
        _take_better(part, made.physical_to_logical, kept, value)
        rows[poor], best[poor] = kept, value


def _take_better(work: _Work, other: NDArray[np.int32], rows: NDArray[np.int32], best: Floats) -> None:
    """Put rows of ``other`` into ``rows`` where they are expected to do better; ``best`` follows."""
    value = work.shares(other, SHARE_SWEEPS)[1]
    better = value > best + 1e-9
    rows[better], best[better] = other[better], value[better]
