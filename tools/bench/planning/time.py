"""Planning over time for the benchmark: chains of changes, a drifting trace, a stationary one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.full import full_placement
from evenroute.eplb.planner.moves import MoveLimits, moved_placement
from evenroute.eplb.planner.policy import RebalancePolicy

Loads = NDArray[np.float64]
Score = Callable[[Placement, Loads], list[float]]
Moved = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]], int], int]


def chains(
    files: list[Loads], policy: str, part: float, *, orders: int, score: Score
) -> tuple[float, float, float]:
    """Go through all files in several orders, each plan from the last one.

    Returns:
        mean balancedness at steps 1-3, at the last three steps, and at the last three when each starts from a
        full plan of the file before.
    """
    topology = Topology(32)
    early, late, fresh = [], [], []
    for seed in range(orders):
        order = np.random.default_rng(seed).permutation(len(files))
        start = Placement.initial(files[0].shape[0], files[0].shape[1], 288, topology)
        placement = full_placement(files[order[0]], start)
        limits = MoveLimits(max_moves=int(part * start.physical_to_logical.size))
        for step, name in enumerate(order[1:], start=1):
            loads = files[name]
            if step > len(order) - 4:
                planned = full_placement(files[order[step - 1]], start)
                control = moved_placement(loads, planned, limits, weighted=policy == "weighted")
                fresh.append(mean(score(control, loads)))
            placement = moved_placement(loads, placement, limits, weighted=policy == "weighted")
            if step <= 3:
                early.append(mean(score(placement, loads)))
            elif step > len(order) - 4:
                late.append(mean(score(placement, loads)))
    return mean(early), mean(late), mean(fresh)


def drifting_loads(windows: int, layers: int, experts: int, memory: float, seed: int) -> Iterator[Loads]:
    """Frequencies ``[L, E]``: log-loads of a first-order autoregression with ``memory`` a window."""
    random = np.random.default_rng(seed)
    logs = random.normal(0, 1, (layers, experts))
    for _ in range(windows):
        raw = np.exp(logs)
        yield raw / raw.sum(axis=1, keepdims=True)
        logs = memory * logs + np.sqrt(1 - memory**2) * random.normal(0, 1, logs.shape)


@dataclass(frozen=True)
class DriftResult:
    """Mean balancedness on the next window's true loads and slots moved after the first plan."""

    mean: float
    moves: int
    replanned: float
    replanned_moves: int


def drift(
    windows: int, layers: int, *, score: Score, moved: Moved, memory: float = 0.999, tokens: int = 1_000_000
) -> DriftResult:
    """The policy beside a full plan from every window's counts, each scored on the window that follows."""
    topology, random = Topology(32), np.random.default_rng(7)
    policy = RebalancePolicy(topology, 288)
    ours = every = Placement.initial(layers, 256, 288, topology)
    our_scores, every_scores, our_moves, every_moves = [], [], 0, 0
    for window, truth in enumerate(drifting_loads(windows, layers, 256, memory, seed=0)):
        if window:
            our_scores.append(mean(score(ours, truth)))
            every_scores.append(mean(score(every, truth)))
        counts = random.multinomial(tokens * 8, truth).astype(np.float64)
        plan = policy.decide(counts, ours).plan
        fresh = full_placement(counts, every)
        if window:
            every_moves += _moves(moved, every, fresh)
            our_moves += 0 if plan is None else _moves(moved, ours, plan.placement)
        every = fresh
        ours = ours if plan is None else plan.placement
    return DriftResult(mean(our_scores), our_moves, mean(every_scores), every_moves)


def _moves(moved: Moved, old: Placement, new: Placement) -> int:
    return moved(old.physical_to_logical.tolist(), new.physical_to_logical.tolist(), old.topology.ep_size)


def stationary(loads: Loads, windows: int, *, score: Score) -> tuple[int, float]:
    """Noise alone: moves after the first 10 windows of 1e5 tokens, and the least true balancedness."""
    topology, random = Topology(32), np.random.default_rng(11)
    truth = loads / loads.sum(axis=1, keepdims=True)
    policy = RebalancePolicy(topology, 288)
    placement = Placement.initial(loads.shape[0], loads.shape[1], 288, topology)
    late, least = 0, 1.0
    for window in range(windows):
        counts = random.multinomial(100_000 * 8, truth).astype(np.float64)
        plan = policy.decide(counts, placement).plan
        if plan is not None:
            late += int(plan.moves.sum()) if window >= 10 else 0
            placement = plan.placement
        least = min(least, mean(score(placement, truth)))
    return late, least
