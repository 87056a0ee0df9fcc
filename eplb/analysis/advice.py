"""Is EPLB worth it here? A verdict with its reasons as numbers, from a history of loads and nothing else.

Everything is computed on the loads given; what they cannot show (no time axis, too few tokens, no token counts) is
reported instead of guessed. The step-time model is that of `evenroute.eplb.analysis.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.analysis.batches import by_batch_size
from evenroute.eplb.analysis.measures import (
    TOKEN_STEPS,
    WITHIN,
    AdviceSettings,
    Workload,
    batch_floor,
    cross_table,
    enough_tokens,
    expert_time,
    fewest_within,
    good_for,
    planned,
    redundancy_curve,
    staleness,
    tokens_needed,
)
from evenroute.eplb.analysis.replay import plain_map
from evenroute.eplb.loads.balance import RankLoadMap, quick_balancedness
from evenroute.eplb.loads.skew import Floats, skew
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import plan_placement

MIGRATION_POLICY = "weighted"  # what re-plans once there is a good placement: few moves, shares do the rest
RECOMMEND, NOT_NOW, NOT_ENOUGH = "recommend", "not now", "not enough evidence"


def advise(
    workloads: Sequence[Workload],
    settings: AdviceSettings,
    *,
    before_map: RankLoadMap | None = None,
    layers_of_model: int | None = None,
) -> dict[str, Any]:
    """The verdict and its reasons.

    Args:
        before_map: the placement in use now; None = experts in order without redundancy.
        layers_of_model: MoE layers, where the loads do not show them all.
    """
    total = np.asarray(sum(workload.total for workload in workloads))
    num_experts = total.shape[1]
    facts: dict[str, Any] = {
        "ep_size": settings.ep_size,
        "num_logical_experts": num_experts,
        "num_moe_layers": layers_of_model or int(total.any(axis=1).sum()),
        "workloads": [workload.name for workload in workloads],
        "num_windows": sum(len(workload.windows) for workload in workloads),
        "experts_share": settings.experts_share,
        "experts_share_is": "given" if settings.share_given else "assumed",
    }
    if not total.any() or settings.ep_size == 1 or num_experts < 2:
        why = "no load at all" if not total.any() else "one rank has nothing to balance"
        return facts | _verdict(NOT_ENOUGH if not total.any() else NOT_NOW, [why])
    top_k = settings.top_k or min(8, num_experts)
    facts |= {"top_k": top_k, "top_k_is": "known" if settings.top_k_known else "assumed"}
    uneven = skew(total)
    facts["skew"] = uneven.as_dict()
    before_map = before_map or plain_map(total.shape[0], num_experts, settings.ep_size)
    before = _mean_over(workloads, [before_map] * len(workloads))
    total_before = _mean_over(workloads, [before_map] * len(workloads), which=1)
    curve = redundancy_curve(workloads, settings)
    redundant = settings.num_redundant_experts
    smallest = fewest_within(curve)
    chosen = smallest if redundant is None else redundant
    fresh_maps = [RankLoadMap.of(planned(w.total, settings, chosen)) for w in workloads]
    after = _mean_over(workloads, fresh_maps)
    facts |= {
        "balancedness_now": before,
        "balancedness_after": after,
        "total_balancedness_now": total_before,
        "total_balancedness_after": _mean_over(workloads, fresh_maps, which=1),
        "redundancy_curve": curve,
        "smallest_redundancy_within_1_percent": smallest,
        "num_redundant_experts": chosen,
    }
    aged = _ageing(workloads, settings, chosen, before)
    facts |= aged
    facts |= _gain(workloads, settings, before_map, fresh_maps, aged, top_k)
    # What the gain stands on, in the figure that step time follows: time is 1 / total balancedness.
    facts["total_balancedness_expected"] = total_before / max(1.0 - facts["expert_time_saved_used"], 1e-9)
    facts |= _price(workloads, settings, chosen, facts)
    facts |= _phases(workloads, settings, chosen)
    facts |= _evidence(workloads, total, settings, chosen, top_k)
    facts["by_batch_size"] = by_batch_size(workloads, settings, chosen, top_k)
    facts["expert_times"] = settings.times.told()
    return facts | _decide(facts, settings)


def _mean_over(workloads: Sequence[Workload], maps: Sequence[RankLoadMap], *, which: int = 0) -> float:
    """Of the workloads' balancedness: 0 = mean over layers, 1 = total (sum of means / sum of maxes)."""
    values = [quick_balancedness(m(w.total))[which] for w, m in zip(workloads, maps, strict=True)]
    return float(np.mean([value for value in values if value is not None]))


def _ageing(
    workloads: Sequence[Workload], settings: AdviceSettings, redundant: int, before: float
) -> dict[str, Any]:
    """How long a plan stays good, on the longest history; across workloads where none has a time axis."""
    longest = max(workloads, key=lambda workload: len(workload.windows))
    curve = staleness(longest, settings, redundant) if len(longest.windows) > 2 else []
    table = cross_table(workloads, settings, redundant) if len(workloads) > 1 else None
    other = None
    if table is not None:
        other = float(table[~np.eye(len(workloads), dtype=bool)].mean())
    lasts = good_for(curve, before)
    seconds = None if lasts is None or longest.window_seconds is None else lasts * longest.window_seconds
    return {
        "ageing": curve,
        "plan_stays_good_windows": lasts,
        "plan_stays_good_seconds": seconds,
        "history_seconds": None
        if longest.window_seconds is None
        else longest.window_seconds * len(longest.windows),
        "balancedness_under_another_workloads_plan": other,
    }


def _gain(
    workloads: Sequence[Workload],
    settings: AdviceSettings,
    before_map: RankLoadMap,
    fresh: Sequence[RankLoadMap],
    aged: dict[str, Any],
    top_k: int,
) -> dict[str, Any]:
    """Expected step-time gain: with a plan as old as it will be where the history shows that, else an upper bound."""
    saved = []
    for workload, load_map in zip(workloads, fresh, strict=True):
        now = expert_time(workload.total, before_map)
        if now:
            saved.append(1.0 - expert_time(workload.total, load_map) / now)
    expected = float(np.mean(saved))
    basis = "a fresh plan: an upper bound, for these loads have no time axis"
    curve = aged["ageing"]
    if len(curve) > 1:
        # Sum of max loads = sum of mean loads / total balancedness, so time scales with its inverse.
        expected = 1.0 - (1.0 - expected) * curve[0]["total"] / max(curve[1]["total"], 1e-9)
        basis = "a plan one window old, as this history shows it"
    result: dict[str, Any] = {
        "expert_time_saved": expected,
        "expert_time_saved_used": expected,
        "step_time_gain": settings.experts_share * expected,
        "gain_basis": basis,
    }
    if settings.batch_tokens is not None:
        floors = [
            batch_floor(w.total, before_map, m, settings.batch_tokens, top_k)
            for w, m in zip(workloads, fresh, strict=True)
        ]
        known = [floor["expert_time_saved"] for floor in floors if floor["expert_time_saved"] is not None]
        used = min(float(np.mean(known)), expected)
        result |= {
            "batch_tokens": settings.batch_tokens,
            "batch_balancedness_now": float(np.mean([floor["before"] for floor in floors])),
            "batch_balancedness_after": float(np.mean([floor["after"] for floor in floors])),
            "expert_time_saved_used": used,
            "step_time_gain": settings.experts_share * used,
            "gain_basis": f"{basis}; steps of {settings.batch_tokens:,} tokens",
        }
    return result


def _price(
    workloads: Sequence[Workload], settings: AdviceSettings, redundant: int, facts: dict[str, Any]
) -> dict[str, Any]:
    """Memory of the redundant experts per rank, and what moving costs a day."""
    layers = facts["num_moe_layers"]
    per_rank = redundant / settings.ep_size * layers
    moves = _moves_a_plan(workloads, settings, redundant)
    seconds = settings.replan_seconds or facts["plan_stays_good_seconds"]
    basis = "given" if settings.replan_seconds else "how long a plan stays good here"
    if seconds is None:
        seconds, basis = 3600.0, "assumed"
    plans_a_day = 86400.0 / seconds
    result: dict[str, Any] = {
        "redundant_slots_per_rank": per_rank,
        "moves_per_plan": moves,
        "migration_policy": MIGRATION_POLICY,
        "plans_per_day": plans_a_day,
        "replan_seconds": seconds,
        "replan_seconds_is": basis,
        "memory_bytes_per_rank": None,
        "migration_bytes_per_day": None,
        "migration_seconds_per_day": None,
        "memory_part": None,
    }
    size = settings.expert_bytes
    if size is None:
        return result
    result["memory_bytes_per_rank"] = per_rank * size
    if moves is not None:
        result["migration_bytes_per_day"] = moves * size * plans_a_day
    if settings.hardware is not None:
        result["memory_part"] = per_rank * size / settings.hardware.memory_bytes
        if moves is not None:
            received = moves * size * plans_a_day / settings.ep_size
            result["migration_seconds_per_day"] = received / settings.hardware.network_bytes_per_s
    return result


def _moves_a_plan(workloads: Sequence[Workload], settings: AdviceSettings, redundant: int) -> float | None:
    """Slots a re-plan moves, from one window (or workload) to the next, after a full plan at the start; None with a
    single window."""
    longest = max(workloads, key=lambda workload: len(workload.windows))
    series = longest.windows if len(longest.windows) > 1 else [w.total for w in workloads]
    if len(series) < 2:
        return None
    step = max(1, len(series) // 5)
    places = list(range(0, len(series), step))[:6]
    topology = Topology(settings.ep_size, settings.num_nodes)
    slots = series[0].shape[1] + redundant
    current, moved = planned(series[places[0]], settings, redundant), []
    for place in places[1:]:
        if series[place].any():
            plan = plan_placement(
                series[place], topology=topology, num_slots=slots, current=current, policy=MIGRATION_POLICY
            )
            current = plan.placement
            moved.append(int(plan.moves.sum()))
    return float(np.mean(moved)) if moved else None


def _phases(workloads: Sequence[Workload], settings: AdviceSettings, redundant: int) -> dict[str, Any]:
    """Whether prefill and decode need placements of their own."""
    groups: dict[str, list[Workload]] = {}
    for workload in workloads:
        if workload.phase in ("prefill", "decode"):
            groups.setdefault(workload.phase, []).append(workload)
    if len(groups) < 2:
        return {"phases": None}
    sums = [Workload(phase, [_shared_scale(members)]) for phase, members in sorted(groups.items())]
    table = cross_table(sums, settings, redundant)
    names = [workload.name for workload in sums]
    own, other = float(np.diag(table).mean()), float(table[~np.eye(2, dtype=bool)].mean())
    both = Workload("both", [_shared_scale(workloads)])
    joint = RankLoadMap.of(planned(both.total, settings, redundant))
    return {
        "phases": {
            "own_plan": own,
            "other_phases_plan": other,
            "one_plan_for_both": _mean_over(sums, [joint] * len(sums)),
            "table": {
                f"{names[i]} plan, {names[j]} load": float(table[i, j]) for i in range(2) for j in range(2)
            },
            "own_placements": own - other > 0.05,
        }
    }


def _shared_scale(workloads: Sequence[Workload]) -> Floats:
    """Sum of popularities: no workload outweighs another by its length."""
    total: NDArray[np.float64] = np.zeros_like(workloads[0].total)
    for workload in workloads:
        loads = workload.total
        total += loads / max(loads.sum(), 1.0)
    return total * 1e9


def _evidence(
    workloads: Sequence[Workload], total: Floats, settings: AdviceSettings, redundant: int, top_k: int
) -> dict[str, Any]:
    """Tokens at hand against tokens that a plan needs at this skew."""
    curve = tokens_needed(total, settings, redundant, top_k)
    known = [workload.tokens for workload in workloads]
    by_load = int(total.sum(axis=1).max() // top_k)
    tokens = sum(count for count in known if count is not None) if None not in known else by_load
    per_window = tokens / max(1, sum(len(workload.windows) for workload in workloads))
    return {
        "tokens": tokens,
        "tokens_per_window": per_window,
        "token_curve": curve,
        "tokens_needed": enough_tokens(curve, WITHIN),
        "tokens_needed_roughly": enough_tokens(curve, 0.05),
    }


def _decide(facts: dict[str, Any], settings: AdviceSettings) -> dict[str, Any]:
    now, gain = facts["balancedness_now"], facts["step_time_gain"]
    change = f"total balancedness {facts['total_balancedness_now']:.3f} -> {facts['total_balancedness_expected']:.3f}"
    rough = facts["tokens_needed_roughly"] or TOKEN_STEPS[-1]
    reasons = []
    if facts["tokens"] < rough:
        reasons.append(
            f"{facts['tokens']:,} tokens are too few: a plan needs about {rough:,} at this skew to come within 0.05"
        )
        return _verdict(NOT_ENOUGH, reasons)
    part = facts["memory_part"]
    if gain < settings.min_gain:
        reasons.append(
            f"a step would get {100 * abs(gain):.1f} % {'shorter' if gain >= 0 else 'longer'}; shorter by "
            f"{100 * settings.min_gain:.0f} % would be worth it ({change}; {facts['gain_basis']})"
        )
        return _verdict(NOT_NOW, reasons)
    if part is not None and part > 0.2:
        reasons.append(f"the redundant experts take {100 * part:.0f} % of a rank's memory")
        return _verdict(NOT_NOW, reasons)
    other = facts["balancedness_under_another_workloads_plan"]
    lost = len(facts["ageing"]) > 1 and facts["ageing"][1]["balancedness"] <= now
    if lost:
        reasons.append(
            "a plan is no better than today's placement one window later: popularity moves too fast"
        )
        return _verdict(NOT_NOW, reasons)
    reasons.append(f"{change}: a step gets {100 * gain:.1f} % shorter ({facts['gain_basis']})")
    if other is not None:
        reasons.append(
            f"under another workload's plan mean balancedness is {other:.3f}: re-plan when traffic changes"
        )
    return _verdict(RECOMMEND, reasons)


def _verdict(verdict: str, reasons: list[str]) -> dict[str, Any]:
    return {"verdict": verdict, "reasons": reasons}
