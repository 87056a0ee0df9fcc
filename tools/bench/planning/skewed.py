"""Loads where greedy counts pack badly, other sizes of cluster and model, and what a decision costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.full import full_placement
from evenroute.eplb.planner.history.expected import Expected
from evenroute.eplb.planner.joint import full_joint_placement
from evenroute.eplb.planner.moves import MoveLimits, moved_placement
from evenroute.eplb.planner.policy import RebalancePolicy
from evenroute.tools.bench.planning.baseline import greedy_plan
from evenroute.tools.bench.planning.check import judge, moved
from evenroute.tools.bench.planning.next import score, start_of
from evenroute.tools.bench.planning.peers import Peer
from evenroute.tools.bench.planning.rows import Clock, Row, at_least, at_most

Loads = NDArray[np.float64]

SIZES = (
    (8, 128, 136), (16, 256, 288), (32, 256, 288), (64, 256, 320), (72, 256, 288), (72, 384, 432),
    (128, 256, 384), (128, 896, 1024), (320, 256, 320), (320, 384, 640),
)  # fmt: skip


def _zipf(experts: int, exponent: float) -> Loads:
    return np.asarray(1.0 / np.arange(1, experts + 1)[None] ** exponent)


def _mostly_zeros() -> Loads:
    random, loads = np.random.default_rng(0), np.zeros((4, 256))
    for layer in loads:
        layer[random.permutation(256)[:5]] = random.lognormal(0, 1, 5)
    return loads


def cases() -> list[tuple[str, Loads, int, int, float, float]]:
    """Name, loads ``[L, E]``, ranks, slots, and what is wanted of even dispatch and with shares."""
    random = np.random.default_rng(0)
    return [
        ("98 % zeros EP32/288", _mostly_zeros(), 32, 288, 0.935, 0.999),
        ("128 Zipf 1 EP64/192", _zipf(128, 1), 64, 192, 0.967, 0.999),
        ("384 Zipf 1 EP128/512", _zipf(384, 1), 128, 512, 0.962, 0.99),
        ("lognormal 2 EP128/384", random.lognormal(0, 2, (4, 256)), 128, 384, 0.859, 0.995),
        (
            "[600, 560, ...] EP8/16",
            np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]]), 8, 16, 0.906, 0.9999,
        ),
        ("lognormal 1, 128 EP128/256", random.lognormal(0, 1, (4, 128)), 128, 256, 0.927, 0.995),
        ("256 Zipf 1.5 EP32/288", _zipf(256, 1.5), 32, 288, 0.99, 0.999),
    ]  # fmt: skip


def skewed(peers: Mapping[str, Callable[[], Peer]]) -> Iterator[Row]:
    """Own window, full plans: no row loses to a peer."""
    for name, loads, ranks, slots, even, shares in cases():
        start = start_of(loads, ranks, slots)
        flat = score(full_placement(loads, start), loads)
        one = Expected(loads[None], np.ones(1))
        yield at_least(f"skewed, {name}: even", flat, even)
        yield at_least(f"skewed, {name}: shares", score(full_joint_placement(one, start), loads), shares)
        for peer, make in peers.items():
            rows = make()(loads[None], start.physical_to_logical.astype(np.int64), ranks)
            theirs = mean(judge(rows.tolist(), None, loads.tolist(), ranks, once=False))
            yield at_most(f"skewed, {name}: {peer} (even)", theirs, round(flat + 5e-4, 4))


def sizes() -> Iterator[Row]:
    """Lognormal loads on other sizes: full plans, even and with shares, against the numpy baseline."""
    for ranks, experts, slots in SIZES:
        loads = np.random.default_rng(ranks + experts).lognormal(0, 0.7, (2, experts))
        start = Placement.initial(2, experts, slots, Topology(ranks))
        name = f"EP{ranks}/{slots}, {experts} experts"
        flat = score(full_placement(loads, start), loads)
        shared = score(full_joint_placement(Expected(loads[None], np.ones(1)), start), loads)
        base = mean(judge(greedy_plan(loads, ranks, slots).tolist(), None, loads.tolist(), ranks, once=False))
        yield at_least(f"{name}: even", flat, round(base - 5e-4, 4))
        yield at_least(f"{name}: shares", shared, round(flat - 5e-4, 4))


def layout(files: list[Loads], real: bool) -> Iterator[Row]:
    """The two-mode layout after a change of workload: what shares alone give, and the moves for .985."""
    count = len(files)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b][::3]
    for ranks, slots, least, most in ((32, 288, 0.9, 0.8), (64, 320, 0.855, 1.4)):
        start = start_of(files[0], ranks, slots)
        plans = [full_placement(loads, start) for loads in files]
        still, parts = [], []
        for k, (a, b) in enumerate(pairs):
            shares = moved_placement(files[b], plans[a], MoveLimits(max_moves=0), weighted=True)
            still.append(score(shares, files[b]))
            if k % 5 == 0:
                made = moved_placement(files[b], plans[a], MoveLimits(target=0.985), weighted=True)
                old, new = plans[a].physical_to_logical, made.physical_to_logical
                parts.append(moved(old.tolist(), new.tolist(), ranks) / new.size * 100)
        name = f"EP{ranks}/{slots}, {len(pairs)} changes"
        yield at_least(f"{name}, shares alone", mean(still), least if real else None)
        yield at_most(f"{name}, % moved for .985", mean(parts), most if real else 100.0)
    start = start_of(files[0], 72, 288)
    wide = [full_joint_placement(Expected(loads[None], np.ones(1)), start) for loads in files]
    figure = mean(score(made, loads) for made, loads in zip(wide, files, strict=True))
    yield at_least("EP72/288, full plan with shares", figure, 0.9985 if real else None)


def decision_time(files: list[Loads]) -> Iterator[Row]:
    """One decision with all the windows it remembers, after ten of a random walk, against the numpy baseline."""
    base, small, large = Clock.new(), Clock.new(), Clock.new()
    random = np.random.default_rng(0)
    shares = np.stack([each / each.sum(axis=1, keepdims=True) for each in files])
    for _ in range(5):
        base.time(greedy_plan, files[0], 32, 288)
    for clock, loads, ranks, slots in (
        (small, shares, 32, 288),
        (large, random.lognormal(0, 0.5, (6, 92, 896)) * random.lognormal(0, 1, (92, 896)), 128, 1024),
    ):
        policy = RebalancePolicy(Topology(ranks), slots)
        placement = start_of(loads[0], ranks, slots)
        for window in range(14):
            weights = random.dirichlet(np.full(len(loads), 0.5))
            counts = random.poisson(
                1e6 * np.einsum("k,kle->le", weights, loads / loads.sum(axis=2, keepdims=True))
            )
            if window < 10:
                decision = policy.decide(counts, placement)
            else:
                decision = clock.time(policy.decide, counts, placement)
            placement = placement if decision.plan is None else decision.plan.placement
    yield from small.ms("one decision, 58x256 EP32/288")
    yield small.ratio("one decision, 58x256 EP32/288", base, 5)
    yield from large.ms("one decision, 92x896 EP128/1024")
    yield large.ratio("one decision, 92x896, over the 58x256 decision", small, 16)
