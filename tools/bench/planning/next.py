"""The next window: plans made on the past, judged on what comes after, on traces mixed from a set of loads.

A trace is a row of mixtures of the loads: two kinds in turn, a day's cycle, random walks, a switch every four windows,
and one load that stays. Counts are drawn from a mixture; a plan is judged on the true loads of the window after.
"""

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
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy
from evenroute.tools.bench.planning.check import judge, moved
from evenroute.tools.bench.planning.peers import Peer
from evenroute.tools.bench.planning.rows import Row, at_least, at_most, note

Loads = NDArray[np.float64]

NUM_WINDOWS, TOKENS, TOP_K = 20, 100_000, 8
SEEDS = (3, 4, 5)  # figures are means over these draws of a trace
RANKS, SLOTS = 32, 288
FIRST_ORDER = (4, 0, 9, 3, 11, 1, 8, 2, 10, 5, 7, 6)
PEER_WINDOWS = 4  # what vLLM's window and FlashLB's stages are given
# Wanted on the twelve real loads: balancedness with at most 2 % and at most 8 % of the slots moved a window.
TRACES: dict[str, tuple[float | None, float | None]] = {
    "two kinds in turn": (0.985, 0.992),
    "day cycle": (0.98, 0.988),
    "walk .7": (0.97, 0.977),
    "walk .95": (0.983, 0.987),
    "switch every 4": (0.935, 0.955),
    "stationary": (0.993, None),
}


def synthetic_loads(count: int = 12, layers: int = 48, experts: int = 256) -> list[Loads]:
    """Synthetic loads: half of them share one skew, half another, each with a part of its own."""
    random = np.random.default_rng(1)
    skews = random.normal(0, 0.9, (2, layers, experts))
    return [np.exp(skews[k % 2] + random.normal(0, 0.35, (layers, experts))) * 1e4 for k in range(count)]


def mixtures(kind: str, count: int, random: np.random.Generator) -> Loads:
    """Weights ``[NUM_WINDOWS, count]`` of the loads in each window."""
    windows, one = np.arange(NUM_WINDOWS), np.eye(count)
    if kind == "two kinds in turn":
        return one[windows % 2]
    if kind == "day cycle":
        part = 0.5 + 0.5 * np.sin(2 * np.pi * windows / 10)
        return np.asarray(np.outer(1 - part, one[0]) + np.outer(part, one[1]))
    if kind == "switch every 4":
        return one[windows // 4 % count]
    if kind == "stationary":
        return np.tile(one[1], (NUM_WINDOWS, 1))
    memory = float(kind.split()[1])
    state, rows = random.standard_normal(count), []
    for _ in range(NUM_WINDOWS):
        state = memory * state + np.sqrt(1 - memory**2) * random.standard_normal(count)
        weights = np.exp(2 * state)
        rows.append(weights / weights.sum())
    return np.array(rows)


def mixed_order(files: list[Loads]) -> list[Loads]:
    """Neighbours of different phases: of twelve files by name the order of the first study, else halves in turn."""
    if len(files) == len(FIRST_ORDER):
        return [files[k] for k in FIRST_ORDER]
    half = len(files) // 2
    return [files[k // 2 + (1 - k % 2) * half] for k in range(2 * half)]


def trace(files: list[Loads], kind: str, seed: int) -> tuple[Loads, Loads]:
    """True frequencies and counts drawn from them, ``[NUM_WINDOWS, 8, E]``: every sixth layer."""
    random = np.random.default_rng(seed)
    loads = np.stack([each[::6][:8] for each in mixed_order(files)])
    shares = loads / loads.sum(axis=2, keepdims=True)
    truth = np.einsum("tm,mle->tle", mixtures(kind, len(shares), random), shares)
    return truth, random.multinomial(TOKENS * TOP_K, truth).astype(np.float64)


def start_of(loads: Loads, num_ranks: int, num_slots: int) -> Placement:
    """Experts in order, for loads ``[L, E]``."""
    return Placement.initial(loads.shape[0], loads.shape[1], num_slots, Topology(num_ranks))


def score(placement: Placement, loads: Loads) -> float:
    shares = None if placement.shares is None else placement.shares.tolist()
    return mean(
        judge(placement.physical_to_logical.tolist(), shares, loads.tolist(), placement.topology.ep_size)
    )


Step = Callable[[int, Placement], Placement]


def follow(truth: Loads, step: Step, num_ranks: int = RANKS, num_slots: int = SLOTS) -> tuple[float, float]:
    """Balancedness on the next window, and part of slots moved a window; the first plan is left out."""
    placement = start_of(truth[0], num_ranks, num_slots)
    scores, parts = [], []
    for window in range(len(truth) - 1):
        made = step(window, placement)
        if window:
            old, new = placement.physical_to_logical, made.physical_to_logical
            scores.append(score(made, truth[window + 1]))
            parts.append(moved(old.tolist(), new.tolist(), num_ranks) / new.size)
        placement = made
    return mean(scores), mean(parts)


def by_policy(counts: Loads, fraction: float, num_ranks: int = RANKS, num_slots: int = SLOTS) -> Step:
    """The rebalancer's policy."""
    settings = PolicySettings(max_move_fraction=fraction)
    policy = RebalancePolicy(Topology(num_ranks), num_slots, settings)

    def step(window: int, placement: Placement) -> Placement:
        plan = policy.decide(counts[window], placement).plan
        return placement if plan is None else plan.placement

    return step


def follow_peer(truth: Loads, counts: Loads, peer: Peer) -> tuple[float, float]:
    """As `follow`, for a peer: a full plan to begin with, then the last four windows each time, even shares.

    Peers may put an expert twice on a rank, which the judge lets pass here.
    """
    start = start_of(truth[0], RANKS, SLOTS)
    rows = full_placement(counts[0], start).physical_to_logical.astype(np.int64)
    scores, parts = [], []
    for window in range(1, len(truth) - 1):
        past = np.maximum(
            0, np.arange(window - PEER_WINDOWS + 1, window + 1)
        )  # the first again while there are fewer
        new = peer(counts[past], rows, RANKS)
        loads = truth[window + 1].tolist()
        scores.append(mean(judge(new.tolist(), None, loads, RANKS, once=False)))
        parts.append(moved(rows.tolist(), new.tolist(), RANKS) / new.size)
        rows = new
    return mean(scores), mean(parts)


def _replanned(truth: Loads, counts: Loads) -> tuple[float, float]:
    return follow(truth, lambda window, now: full_placement(counts[window], now))


def _means(found: list[tuple[float, float]]) -> tuple[float, float]:
    """Mean balancedness, and moved slots in %."""
    return mean(balance for balance, _ in found), 100 * mean(part for _, part in found)


def _notes(name: str, found: list[tuple[float, float]]) -> Iterator[Row]:
    balance, part = _means(found)
    yield note(f"next window, {name}", balance)
    yield note(f"next window, {name}: % moved", part)


def next_windows(files: list[Loads], peers: Mapping[str, Callable[[], Peer]], real: bool) -> Iterator[Row]:
    """Six traces: the policy with two budgets, a full plan every window, and peers."""
    for kind, wanted in TRACES.items():
        traces = [trace(files, kind, seed) for seed in SEEDS]
        for fraction, least in zip((0.02, 0.08), wanted, strict=True):
            if kind == "stationary" and fraction > 0.02:
                continue
            found = [follow(truth, by_policy(counts, fraction)) for truth, counts in traces]
            most = 0.3 if kind == "stationary" else fraction * 100
            balance, part = _means(found)
            yield at_least(f"next window, {kind}, policy {fraction:.0%}", balance, least if real else None)
            yield at_most(f"next window, {kind}, policy {fraction:.0%}: % moved", part, most)
        yield from _notes(f"{kind}, full plan every window", [_replanned(*each) for each in traces])
        for name, make in peers.items():
            yield from _notes(f"{kind}, {name}", [follow_peer(*each, make()) for each in traces])
    yield from abrupt(files, real)
    yield from learn_on_half(files, real)


def abrupt(files: list[Loads], real: bool) -> Iterator[Row]:
    """Every window another load: no full plan made for the last one may be better on the next."""
    loads = np.stack([each[::6][:8] for each in mixed_order(files)])
    truth = loads / loads.sum(axis=2, keepdims=True)
    counts = np.random.default_rng(SEEDS[0]).multinomial(TOKENS * TOP_K, truth).astype(np.float64)
    for ranks, slots in ((16, 288), (32, 320), (32, 352)):
        fresh, _ = follow(truth, lambda window, now: full_placement(counts[window], now), ranks, slots)
        for fraction, behind in ((0.02, 0.005), (0.08, 0.0)):
            ours, _ = follow(truth, by_policy(counts, fraction, ranks, slots), ranks, slots)
            name = f"another load every window, EP{ranks}/{slots}, policy {fraction:.0%}"
            yield at_least(name, ours, round(fresh - behind, 4) if real else None)


def learn_on_half(files: list[Loads], real: bool) -> Iterator[Row]:
    """One plan for one half of the loads, judged on the other half without a move."""
    half = len(files) // 2
    known, others = mixed_order(files)[:half], mixed_order(files)[half:]
    start = start_of(known[0], RANKS, SLOTS)
    expected = Expected(np.stack(known), np.full(half, 1 / half))
    even = full_joint_placement(expected, start, even=True)
    shared = full_joint_placement(expected, start)
    yield at_least(
        "one plan for half of the loads, on these",
        mean(score(shared, x) for x in known),
        0.988 if real else None,
    )
    yield at_least(
        "on the other half, even shares", mean(score(even, x) for x in others), 0.97 if real else None
    )
    exact = [moved_placement(loads, shared, MoveLimits(max_moves=0), weighted=True) for loads in others]
    figure = mean(score(made, loads) for made, loads in zip(exact, others, strict=True))
    yield at_least("on the other half, exact shares of the load judged", figure, 0.985 if real else None)
