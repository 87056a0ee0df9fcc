"""Plans: loads in; a placement with its predicted balancedness, its moves and its reason out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_integer, describe, is_number, require_choice, require_instance
from evenroute.eplb._notebook import data_frame, plan_page
from evenroute.eplb.loads.balance import Balancedness, placement_balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology, check_plan_numbers
from evenroute.eplb.planner.auto import Candidate, best_candidate, score_of
from evenroute.eplb.planner.backtest import backtest
from evenroute.eplb.planner.classes.sets import planned_sets
from evenroute.eplb.planner.classes.times import ExpertTimes
from evenroute.eplb.planner.full import check_hierarchical, full_placement, node_bound, spill_from_nodes
from evenroute.eplb.planner.history.expected import Expected
from evenroute.eplb.planner.history.memory import WindowMemory
from evenroute.eplb.planner.history.robust import plan_windows
from evenroute.eplb.planner.history.windows import (
    COMBINATIONS,
    counting_noise,
    frequencies,
    noise_notice,
    validate_windows,
)
from evenroute.eplb.planner.joint import full_joint_placement, joint_placement
from evenroute.eplb.planner.layers import check_num_threads
from evenroute.eplb.planner.locality import crossing_fraction, localize, validate_source_loads
from evenroute.eplb.planner.moves import MoveCost, MoveLimits, moved_placement

logger = logging.getLogger("evenroute.eplb.planner")

POLICIES = ("global", "hierarchical", "incremental", "weighted", "joint", "shares", "stay", "auto")
WINDOW_CHOICES = (*COMBINATIONS, "auto")
DEFAULT_MOVE_FRACTION = 0.02  # slots that `auto` may move from the placement in use
MOST_JOINT_WINDOWS = 16


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement and why it was chosen.

    Attributes:
        policy: the policy that made the placement (with ``auto``, the one that won).
        reason: one sentence.
        before, predicted: balancedness of the present placement and of this one, for the loads planned for.
        moves: ``[L]`` slots whose expert is not on that rank now.
        notices: further remarks for the reader (too few tokens, the cost of a hierarchy, ...).
    """

    placement: Placement
    policy: str
    reason: str
    before: Balancedness
    predicted: Balancedness
    moves: NDArray[np.int64]
    notices: tuple[str, ...] = ()

    def __repr__(self) -> str:
        before, after = (
            "no data" if found.mean is None else f"{found.mean:.3f}"
            for found in (self.before, self.predicted)
        )
        moves = int(self.moves.sum())
        return f"<Plan {self.policy} {before} -> {after}, {moves} slot move{'' if moves == 1 else 's'}>"

    def _repr_html_(self) -> str:
        return plan_page(repr(self), self.reason, self.before.per_layer, self.predicted.per_layer)

    def to_dataframe(self) -> Any:
        """A pandas DataFrame by layer: ``before, predicted`` (NaN without load), ``moves``; ImportError without it."""
        known = np.where(self.before.has_load, 1.0, np.nan)
        before, predicted = self.before.per_layer * known, self.predicted.per_layer * known
        return data_frame("layer", before=before, predicted=predicted, moves=self.moves)


def figure(value: float | None) -> str:
    """A balancedness as text; ValueError unless it is a number or None."""
    if value is not None and not isinstance(value, Real):
        raise ValueError(f"value must be a number or None, found {describe(value)}")
    return "no data" if value is None else f"{value:.4f}"


@dataclass(frozen=True, eq=False)
class _Request:
    """Checked arguments of a plan."""

    current: Placement
    at_start: bool
    num_groups: int
    limits: MoveLimits
    spill: float
    share_gain: float
    source_loads: NDArray[np.float64] | None
    num_threads: int | None


def _make(loads: NDArray[np.float64], policy: str, request: _Request) -> Placement:
    """The placement of one policy for ``loads [L, E]``."""
    current, limits, threads = request.current, request.limits, request.num_threads
    if policy == "stay":
        return current
    if policy == "shares":
        none = MoveLimits(max_moves=0)
        return moved_placement(
            loads, current, none, weighted=True, share_gain=request.share_gain, num_threads=threads
        )
    if policy in ("incremental", "weighted"):
        weighted = policy == "weighted"
        return moved_placement(
            loads, current, limits, weighted=weighted, share_gain=request.share_gain, num_threads=threads
        )
    hierarchical = policy == "hierarchical"
    made = full_placement(
        loads, current, num_groups=request.num_groups, hierarchical=hierarchical, num_threads=threads
    )
    if hierarchical and request.spill > 0:
        made = spill_from_nodes(loads, made, request.num_groups, request.spill, num_threads=threads)
    if request.source_loads is not None and not hierarchical:
        made = localize(made, loads, request.source_loads, current=current)
    return made


def _hierarchy_notice(loads: NDArray[np.float64], made: Placement, request: _Request) -> str:
    flat = full_placement(loads, request.current, num_threads=request.num_threads)
    bound = node_bound(loads, request.num_groups, made.topology)
    spilled = f" ({request.spill:.1%} of slots may leave their node)" if request.spill else ""
    return (
        f"keeping {request.num_groups} groups on {made.topology.num_nodes} nodes{spilled} gives "
        f"{figure(placement_balancedness(loads, made).mean)}, at most {figure(bound)} without leaving; "
        f"a global plan reaches {figure(placement_balancedness(loads, flat).mean)}"
    )


def _auto(loads: NDArray[np.float64], request: _Request) -> tuple[Placement, str, str]:
    """Score the candidates; the placement, its policy, and the reason."""
    current = request.current
    slots = current.physical_to_logical.size
    policies = ["stay", "shares"]
    if request.at_start:
        policies.append("global")
    else:
        policies += ["weighted", "global"]
    if request.num_groups > 1 and current.topology.num_nodes > 1:
        policies.append("hierarchical")
    if request.limits.max_moves is None and request.limits.cost is None:
        limits = replace(request.limits, max_moves=int(DEFAULT_MOVE_FRACTION * slots))
        request = replace(request, limits=limits)
    noise = counting_noise(loads, current.topology, current.num_slots)
    candidates = []
    for policy in policies:
        made = _make(loads, policy, request)
        if policy == "global" and request.at_start:
            # A fresh plan gets exact shares on top: they move nothing.
            none = MoveLimits(max_moves=0)
            made = moved_placement(loads, made, none, weighted=True, num_threads=request.num_threads)
        moves = int(current.moved_slots(made).sum())
        sources = request.source_loads
        crossing = None if sources is None else crossing_fraction(made, sources)
        result = placement_balancedness(loads, made)
        score = score_of(
            policy,
            result,
            moves,
            crossing,
            loads,
            current,
            made,
            cost=request.limits.cost,
            noise=noise,
            at_start=request.at_start,
        )
        candidates.append(Candidate(policy, made, score, result.mean, moves, crossing))
    winner, reason = best_candidate(candidates, slots, request.at_start)
    return winner.placement, winner.policy, reason


def _joint(windows: NDArray[np.float64], request: _Request) -> Plan:
    """One placement for all windows; figures are means over them."""
    current, limits = request.current, request.limits
    if len(windows) > MOST_JOINT_WINDOWS:
        memory = WindowMemory(MOST_JOINT_WINDOWS)
        for loads in windows:
            if loads.any():
                memory.remember(loads)
        expected = Expected(*memory.forecast()) if memory.kinds else Expected(windows[:1], np.ones(1))
    else:
        expected = Expected(windows, np.full(len(windows), 1.0 / len(windows)))
    before = expected.balancedness(current)
    if request.at_start:
        made = full_joint_placement(expected, current, num_threads=request.num_threads)
    else:
        busy = int(before.has_load.sum())
        price = 0.0 if limits.cost is None else limits.cost.price_per_slot(busy, current.topology)
        made = joint_placement(
            expected,
            current,
            max_moves=current.physical_to_logical.size if limits.max_moves is None else limits.max_moves,
            max_moves_per_rank=limits.max_moves_per_rank,
            target=limits.target,
            price=price,
            num_threads=request.num_threads,
        )
    predicted, moves = expected.balancedness(made), current.moved_slots(made)
    reason = (
        f"joint: mean balancedness over {len(expected.weights)} windows {figure(before.mean)} -> "
        f"{figure(predicted.mean)} with {int(moves.sum())} moved slots "
        f"({int(moves.sum()) / max(1, made.physical_to_logical.size):.2%})"
    )
    notices = _target_notice(limits.target, predicted)
    logger.info("%s%s", reason, "".join(f"; {notice}" for notice in notices))
    return Plan(made, "joint", reason, before, predicted, moves, tuple(notices))


def _target_notice(target: float | None, predicted: Balancedness) -> list[str]:
    if target is None or predicted.mean is None or predicted.mean >= target:
        return []
    return [f"target {target} is not reached: {figure(predicted.mean)} is what these limits allow"]


def plan_placement(
    loads: ArrayLike,
    *,
    topology: Topology,
    num_slots: int,
    num_groups: int = 1,
    current: Placement | None = None,
    policy: str = "global",
    target: float | None = None,
    max_moves: int | None = None,
    max_moves_per_rank: int | None = None,
    cost: MoveCost | None = None,
    spill: float = 0.0,
    share_gain: float = 0.0,
    windows: str = "mean",
    source_loads: ArrayLike | None = None,
    top_k: int | None = None,
    expert_times: ExpertTimes | None = None,
    num_threads: int | None = None,
) -> Plan:
    """Plan a placement for loads ``[L, E]`` or several windows of them, ``[W, L, E]``, oldest first.

    Args:
        num_slots: P over all ranks.
        num_groups: expert groups, for ``hierarchical``.
        current: placement in use; None means ``Placement.initial`` and a start, where moving is free.
        policy: ``global`` and ``hierarchical`` plan from scratch; ``incremental`` (even shares) and
            ``weighted`` (exact shares) make few moves; ``joint`` does so for all windows at once, or plans from
            scratch where ``current`` is None; ``shares`` moves nothing; ``stay`` changes nothing; ``auto`` scores
            all but ``joint``.
        target, max_moves, max_moves_per_rank, cost: limits of ``incremental``, ``weighted``, ``joint`` and ``auto``.
        spill: part of slots that may leave their group's node in a ``hierarchical`` plan.
        share_gain: dead band of shares, in balancedness of a layer.
        windows: how several windows are put together; ``auto`` takes what did best on them (``backtest``). ``joint``
            keeps them apart; beyond 16 those that are most alike become one.
        source_loads: ``[R, L, E]`` loads by source rank; full plans then keep tokens on their node where
            that costs no balance.
        top_k: K routed experts a token; plans with exact shares then carry sets for small batches, planned by
            ``expert_times`` (default: a roofline).

    Raises:
        ValueError: names the field, what was found and what is allowed.
    """
    if top_k is not None:
        top_k = as_integer("top_k", top_k, 1)
    require_instance("expert_times", times := expert_times or ExpertTimes(), ExpertTimes)
    array = validate_windows(loads)
    require_choice("policy", policy, POLICIES)
    require_choice("windows", windows, WINDOW_CHOICES)
    if not is_number(spill) or not 0 <= spill <= 1:
        raise ValueError(f"spill={describe(spill)}, expected a part of slots in [0, 1]")
    if not is_number(share_gain) or not 0 <= share_gain < 1:
        raise ValueError(f"share_gain={describe(share_gain)}, expected a number in [0, 1)")
    require_instance("topology", topology, Topology)
    if current is not None:
        require_instance("current", current, Placement)
    check_num_threads(num_threads)
    num_slots, num_groups = as_integer("num_slots", num_slots), as_integer("num_groups", num_groups)
    _, num_layers, num_experts = array.shape
    check_plan_numbers(num_experts, num_slots, num_groups, topology.num_nodes, topology.ep_size)
    if policy == "hierarchical":
        check_hierarchical(num_experts, num_slots, num_groups, topology)
    at_start = current is None
    in_use = Placement.initial(num_layers, num_experts, num_slots, topology) if current is None else current
    found = (in_use.num_layers, in_use.num_logical_experts, in_use.num_slots, in_use.topology)
    wanted = (num_layers, num_experts, num_slots, topology)
    if found != wanted:
        raise ValueError(
            f"current placement is (layers, experts, slots, topology) {found}, expected {wanted}"
        )
    sources = None
    if source_loads is not None:
        sources = validate_source_loads(source_loads, topology, num_layers, num_experts)
    limits = MoveLimits(target, max_moves, max_moves_per_rank, cost)
    request = _Request(in_use, at_start, num_groups, limits, spill, share_gain, sources, num_threads)
    if policy == "joint":
        return _with_sets(_joint(array, request), array, top_k, times)
    notices: list[str] = []
    how = windows
    if windows == "auto":
        how = "last"
        if len(array) >= 3:
            result = backtest(array, placement=in_use, num_threads=num_threads)
            how = result.best
            notices.append(f"windows: {result.sentence}")
    reasons: dict[int, tuple[str, str]] = {}

    def make(combined: NDArray[np.float64]) -> Placement:
        if policy != "auto":
            return _make(combined, policy, request)
        made, won, why = _auto(combined, request)
        reasons[id(made)] = (won, why)
        kept.append(made)
        return made

    kept: list[Placement] = []  # keeps the ids in `reasons` alive
    placement, planned_for = plan_windows(array, how, make)
    before = placement_balancedness(planned_for, in_use)
    predicted = placement_balancedness(planned_for, placement)
    moves = in_use.moved_slots(placement)
    won, reason = reasons.get(id(placement), (policy, ""))
    if not reason:
        total, slots = int(moves.sum()), max(1, placement.physical_to_logical.size)
        rise = f"mean balancedness {figure(before.mean)} -> {figure(predicted.mean)}"
        reason = f"{policy}: {rise} with {total} moved slots ({total / slots:.2%})"
    if won == "hierarchical":
        notices.append(_hierarchy_notice(planned_for, placement, request))
    if won != "stay":
        notices += _target_notice(target, predicted)
    notices += noise_notice(array, how, topology, num_slots)
    logger.info("%s%s", reason, "".join(f"; {notice}" for notice in notices))
    plan = Plan(placement, won, reason, before, predicted, moves, tuple(notices))
    with_shares = won in ("weighted", "shares") or (policy == "auto" and won != "stay")
    return _with_sets(plan, planned_for[None], top_k if with_shares else None, times)


def _with_sets(plan: Plan, windows: NDArray[np.float64], top_k: int | None, times: ExpertTimes) -> Plan:
    """The plan with sets of shares for small batches, where K is known."""
    if top_k is None:
        return plan
    made, text = planned_sets(plan.placement, frequencies(windows).mean(axis=0), top_k, times)
    return replace(plan, placement=made, notices=(*plan.notices, text) if text else plan.notices)
