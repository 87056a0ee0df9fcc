"""What advice is made of: redundancy curves, how plans age, tokens a plan needs, what a finite batch can reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evenroute.eplb.loads.balance import RankLoadMap, quick_balancedness
from evenroute.eplb.loads.skew import Floats
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology, automatic_redundant_experts
from evenroute.eplb.planner.classes.times import ExpertTimes
from evenroute.eplb.planner.plan import plan_placement

WITHIN = 0.01  # "as good as the best": within this much of its balancedness
MIN_GAIN = 0.02  # a step has to get this much shorter to be worth the memory and the machinery
SAMPLED_LAYERS = 12
TOKEN_STEPS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)


@dataclass(frozen=True)
class Hardware:
    """Memory of an accelerator in bytes and bytes a second a rank can receive from another node."""

    name: str
    memory_bytes: float
    network_bytes_per_s: float


# Vendor data sheets: memory; network = one 400 Gb/s port a GPU (50 GB/s), GB200: 400 Gb/s as well.
HARDWARE = {
    "h20": Hardware("h20", 96e9, 50e9),
    "h100": Hardware("h100", 80e9, 50e9),
    "h200": Hardware("h200", 141e9, 50e9),
    "b200": Hardware("b200", 180e9, 50e9),
    "gb200": Hardware("gb200", 186e9, 50e9),
    "mi300x": Hardware("mi300x", 192e9, 50e9),
}


@dataclass(frozen=True, eq=False)
class Workload:
    """One stretch of history: loads ``[L, E]`` per window (one window = no time axis), and what is known of it."""

    name: str
    windows: Sequence[Floats]
    phase: str = ""
    window_seconds: float | None = None
    tokens: int | None = None

    @property
    def total(self) -> Floats:
        return np.asarray(np.sum(self.windows, axis=0))


@dataclass(frozen=True)
class AdviceSettings:
    """The cluster the advice is for; None = not known.

    Attributes:
        experts_share: part of a step that experts take today; `share_given`: whether it was measured.
        batch_tokens: tokens of one step over all ranks; adds what a finite batch can reach.
        times: what an expert touched and a token cost.
        replan_seconds: time between two plans; None = as long as the history says a plan stays good.
    """

    ep_size: int
    num_nodes: int = 1
    num_redundant_experts: int | None = None
    top_k: int | None = None
    top_k_known: bool = False
    experts_share: float = 0.4
    share_given: bool = False
    expert_bytes: int | None = None
    hardware: Hardware | None = None
    batch_tokens: int | None = None
    replan_seconds: float | None = None
    min_gain: float = MIN_GAIN
    times: ExpertTimes = field(default_factory=ExpertTimes)


def _without_idle(loads: Floats) -> Floats:
    return loads[loads.any(axis=1)]


def planned(loads: Floats, settings: AdviceSettings, redundant: int) -> Placement:
    """A full plan for these loads."""
    slots = loads.shape[1] + redundant
    topology = Topology(settings.ep_size, settings.num_nodes)
    return plan_placement(loads, topology=topology, num_slots=slots).placement


def expert_time(loads: Floats, load_map: RankLoadMap) -> float:
    """The experts' time in units of load: sum over layers of the fullest rank."""
    return float(load_map(loads).max(axis=1).sum())


def redundancy_candidates(num_experts: int, ep_size: int, spare: int | None = None) -> list[int]:
    """Redundant counts to try: those that divide over the ranks, from the fewest on; ``spare`` included."""
    fill = automatic_redundant_experts(num_experts, ep_size)
    highest = num_experts * (ep_size - 1)
    found = {fill + ranks * ep_size for ranks in (0, 1, 2, 3, 4, 6, 8)} | (
        {spare} if spare is not None else set()
    )
    return sorted(number for number in found if number <= highest)


def redundancy_curve(workloads: Sequence[Workload], settings: AdviceSettings) -> list[dict[str, Any]]:
    """Mean and worst balancedness over workloads, of a plan for each one's own loads, by redundant experts."""
    num_experts = workloads[0].total.shape[1]
    curve = []
    for redundant in redundancy_candidates(num_experts, settings.ep_size, settings.num_redundant_experts):
        values = []
        for workload in workloads:
            placement = planned(workload.total, settings, redundant)
            values.append(quick_balancedness(RankLoadMap.of(placement)(workload.total))[0] or 0.0)
        curve.append({"num_redundant_experts": redundant, "balancedness": float(np.mean(values))})
    return curve


def fewest_within(curve: Sequence[dict[str, Any]], within: float = WITHIN) -> int:
    """The smallest redundant count whose balancedness is within ``within`` of the curve's best."""
    best = max(point["balancedness"] for point in curve)
    return int(
        min(point["num_redundant_experts"] for point in curve if point["balancedness"] >= best * (1 - within))
    )


def staleness(
    workload: Workload, settings: AdviceSettings, redundant: int, *, plans: int = 8
) -> list[dict[str, Any]]:
    """How a plan ages: balancedness ``lag`` windows after the one it was made for (0 = that window itself).

    `balancedness` is the mean over layers, `total` the sum of means over the sum of maxes, which step time follows.
    """
    count = len(workload.windows)
    lags = [0] + [2**power for power in range(12) if 2**power < count]
    starts = sorted({round(start) for start in np.linspace(0, max(count - 2, 0), min(plans, count))})
    sums: dict[int, list[tuple[float, float]]] = {lag: [] for lag in lags}
    for start in starts:
        if not workload.windows[start].any():
            continue
        load_map = RankLoadMap.of(planned(workload.windows[start], settings, redundant))
        for lag in lags:
            if start + lag < count:
                mean, total = quick_balancedness(load_map(workload.windows[start + lag]))
                if mean is not None and total is not None:
                    sums[lag].append((mean, total))
    curve = []
    for lag in lags:
        if sums[lag]:
            mean, total = np.mean(sums[lag], axis=0)
            curve.append({"lag": lag, "balancedness": float(mean), "total": float(total)})
    return curve


def good_for(curve: Sequence[dict[str, Any]], before: float) -> int | None:
    """Windows for which a plan keeps at least half of what it gained one window after it was made; None if it never
    falls below within the history."""
    if len(curve) < 2:
        return None
    line = before + 0.5 * (curve[1]["balancedness"] - before)
    for point in curve[1:]:
        if point["balancedness"] < line:
            return int(point["lag"])
    return None


def cross_table(workloads: Sequence[Workload], settings: AdviceSettings, redundant: int) -> Floats:
    """``[W, W]``: balancedness of workload j under a plan for workload i."""
    maps = [RankLoadMap.of(planned(w.total, settings, redundant)) for w in workloads]
    table = [[quick_balancedness(load_map(w.total))[0] or 0.0 for w in workloads] for load_map in maps]
    return np.asarray(table)


def tokens_needed(
    loads: Floats, settings: AdviceSettings, redundant: int, top_k: int
) -> list[dict[str, Any]]:
    """Balancedness on the true loads of a plan made from a sample of this many tokens a layer (independent tokens: real
    ones are correlated, so these counts are minima). At most `SAMPLED_LAYERS` layers, evenly spaced; fixed seed."""
    busy = _without_idle(loads)
    rows = busy[np.unique(np.linspace(0, len(busy) - 1, SAMPLED_LAYERS).round().astype(int))]
    rng = np.random.default_rng(0)
    chances = rows / rows.sum(axis=1, keepdims=True)
    exact = RankLoadMap.of(planned(rows, settings, redundant))
    curve: list[dict[str, Any]] = []
    for tokens in TOKEN_STEPS:
        sample = np.stack([rng.multinomial(tokens * top_k, chance) for chance in chances]).astype(np.float64)
        made = RankLoadMap.of(planned(sample, settings, redundant))
        curve.append({"tokens": tokens, "balancedness": quick_balancedness(made(rows))[0]})
    curve.append({"tokens": None, "balancedness": quick_balancedness(exact(rows))[0]})
    return curve


def enough_tokens(curve: Sequence[dict[str, Any]], within: float) -> int | None:
    """The fewest tokens whose plan comes within ``within`` of the plan for exact loads."""
    best = curve[-1]["balancedness"]
    found = [point["tokens"] for point in curve[:-1] if point["balancedness"] >= best - within]
    return int(min(found)) if found else None


def batch_floor(
    loads: Floats, before: RankLoadMap, after: RankLoadMap, tokens: int, top_k: int, *, batches: int = 16
) -> dict[str, float | None]:
    """Mean balancedness of single steps of ``tokens`` tokens: chance alone keeps small batches uneven."""
    rng = np.random.default_rng(1)
    sums = loads.sum(axis=1, keepdims=True)
    chances = np.divide(loads, sums, out=np.zeros_like(loads), where=sums > 0)
    values: dict[str, list[float]] = {"before": [], "after": []}
    times = {"before": 0.0, "after": 0.0}
    for _ in range(batches):
        drawn = np.stack(
            [rng.multinomial(tokens * top_k, c) if c.any() else np.zeros(len(c), int) for c in chances]
        )
        for name, load_map in (("before", before), ("after", after)):
            ranks = load_map(drawn)
            values[name].append(quick_balancedness(ranks)[0] or 0.0)
            times[name] += float(ranks.max(axis=1).sum())
    saved = 1.0 - times["after"] / times["before"] if times["before"] else None
    return {
        "before": float(np.mean(values["before"])),
        "after": float(np.mean(values["after"])),
        "expert_time_saved": saved,
    }
