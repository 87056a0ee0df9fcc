"""When to plan, and how much: shares often, a few moves when they pay, a full plan only at the start or on request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from numpy.typing import ArrayLike

from evenroute.eplb._checks import as_integer, describe, is_number, require_bool, require_instance
from evenroute.eplb.loads.balance import Balancedness, validate_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.classes.sets import class_times, classes_text, planned_sets, sets_gain
from evenroute.eplb.planner.classes.times import ExpertTimes
from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.full import check_hierarchical
from evenroute.eplb.planner.history.expected import Expected
from evenroute.eplb.planner.history.memory import MAX_KINDS, WindowMemory
from evenroute.eplb.planner.history.windows import planning_noise
from evenroute.eplb.planner.joint import (
    full_joint_placement,
    joint_placement,
    joint_shares_placement,
    node_bars,
)
from evenroute.eplb.planner.layers import check_num_threads
from evenroute.eplb.planner.plan import Plan

SETS_GAIN = 0.02  # of a small batch's longest rank: new sets alone are published where they save that much
BUDGET_WINDOWS = (
    20  # over any that many windows in a row the mean of moved slots stays below max_move_fraction
)


@dataclass(frozen=True)
class PolicySettings:
    """Dead bands, budgets and prices; balancedness is a mean over layers, expected for the next window.

    Attributes:
        share_gain: new shares only where a layer gains that much ...
        share_mean_gain: ... and only if all layers together gain that much.
        target: moves stop where shares alone are expected to reach it.
        max_move_fraction: part of all slots that may move a window, on average over 20 windows.
        move_burst: budgets of this many windows may be spent at once, after a change of traffic.
        move_price: balancedness that moving all slots of a layer must gain; moves must also pay in time.
        noise_band: moves must gain this part of what sampling noise costs the loads they are planned from.
        costs: what a moved slot and imbalance cost in time.
        life_seconds: how long a plan is expected to serve.
        uneven_shares: False where the dispatch cannot honour shares: moves then balance even ones.
        hierarchical, num_groups: groups of experts stay on one node.
        max_kinds: kinds of traffic that are remembered.
        top_k: K routed experts a token; with it plans with uneven shares carry sets of shares for small batches.
        expert_times: what those sets are planned by.
    """

    share_gain: float = 0.0005
    share_mean_gain: float = 0.0005
    target: float = 0.998
    max_move_fraction: float = 0.02
    move_burst: int = 4
    move_price: float = 0.03
    noise_band: float = 0.5
    costs: TimeCosts = field(default_factory=TimeCosts)
    life_seconds: float = 300.0
    uneven_shares: bool = True
    hierarchical: bool = False
    num_groups: int = 1
    max_kinds: int = MAX_KINDS
    top_k: int | None = None
    expert_times: ExpertTimes = field(default_factory=ExpertTimes)

    def __post_init__(self) -> None:
        for name in ("share_gain", "share_mean_gain", "max_move_fraction", "move_price", "noise_band"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name}={describe(value)}, expected a number in [0, 1]")
        if not is_number(self.target) or not 0 < self.target <= 1:
            raise ValueError(f"target={describe(self.target)}, expected a number in (0, 1]")
        if not is_number(self.life_seconds) or not self.life_seconds > 0:
            raise ValueError(f"life_seconds={describe(self.life_seconds)}, expected a finite number > 0")
        for name, most in (("move_burst", BUDGET_WINDOWS), ("num_groups", None), ("max_kinds", 64)):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 1, most))
        for name in ("uneven_shares", "hierarchical"):
            require_bool(name, getattr(self, name))
        require_instance("costs", self.costs, TimeCosts)
        require_instance("expert_times", self.expert_times, ExpertTimes)
        if self.top_k is not None:
            object.__setattr__(self, "top_k", as_integer("top_k", self.top_k, 1))


@dataclass(frozen=True, eq=False)
class Decision:
    """What to do now: ``action`` is stay, shares, moves or full; ``plan`` is None for stay."""

    action: str
    reason: str
    plan: Plan | None


@dataclass(frozen=True, eq=False)
class Question:
    """All that a decision depends on apart from the placement, so that a stateless process can make it.

    Attributes:
        expected: remembered windows and their weights.
        max_moves: slots that may move now.
        noise: balancedness that sampling noise costs a plan from these windows.
        full: plan from scratch.
        costs: what moves and imbalance cost in time.
    """

    expected: Expected
    max_moves: int
    noise: float
    full: bool
    costs: TimeCosts


class RebalancePolicy:
    """Decides window by window. Deterministic: the same windows and placements give the same decisions.

    Its state is a bounded memory of windows (`WindowMemory`), what is left of the move budget, and whether a full plan
    is wanted; `remember` rebuilds it from past windows. ``costs`` are the settings' until measured ones are
    set. ``decide`` is ``observe``, then ``answer`` (no state: it may run in another process), then ``settle``.
    """

    def __init__(
        self,
        topology: Topology,
        num_slots: int,
        settings: PolicySettings | None = None,
        *,
        num_threads: int | None = None,
    ) -> None:
        require_instance("topology", topology, Topology)
        check_num_threads(num_threads)
        self.topology = topology
        self.num_slots = as_integer("num_slots", num_slots, 1)
        self.settings = PolicySettings() if settings is None else settings
        require_instance("settings", self.settings, PolicySettings)
        self.num_threads = num_threads
        self.costs = self.settings.costs
        self.memory = WindowMemory(self.settings.max_kinds)
        self._credit: float = self.settings.move_burst
        self._full_wanted = True

    def request_full_plan(self) -> None:
        """Plan from scratch at the next window, whatever it moves."""
        self._full_wanted = True

    def skip_start(self) -> None:
        """The placement in use was planned before: no full plan at the first window."""
        self._full_wanted = False

    def remember(self, windows: Iterable[ArrayLike]) -> None:
        """Take past windows ``[L, E]``, oldest first, into memory without deciding; after a restart."""
        for counts in windows:
            window = validate_loads(counts)
            if window.any():
                self.memory.remember(window)

    def decide(self, counts: ArrayLike, placement: Placement) -> Decision:
        """Decide after a window.

        Args:
            counts: ``[L, E]`` of the window that just ended.
            placement: the one in use (all layers switched).

        Raises:
            ValueError: counts that do not fit the placement, or bad ones.
        """
        question = self.observe(counts, placement)
        if question is None:
            return Decision("stay", "the window holds no load", None)
        decision = answer(question, placement, self.settings, num_threads=self.num_threads)
        self.settle(decision)
        return decision

    def observe(self, counts: ArrayLike, placement: Placement) -> Question | None:
        """Remember a window; what to decide now, or None if it holds no load. Arguments as of `decide`."""
        require_instance("placement", placement, Placement)
        window = validate_loads(
            counts, num_layers=placement.num_layers, num_logical_experts=placement.num_logical_experts
        )
        if not window.any():
            return None
        self.memory.remember(window)
        windows, weights = self.memory.forecast()
        slots = placement.physical_to_logical.size
        max_moves = int(self._credit * self.settings.max_move_fraction * slots)
        noise = planning_noise(windows, weights, self.topology, self.num_slots)
        return Question(Expected(windows, weights), max_moves, noise, self._full_wanted, self.costs)

    def settle(self, decision: Decision) -> None:
        """Take a decision's moves off the budget, which then grows by a window's part."""
        settings = self.settings
        if decision.action == "full" or self._full_wanted:
            self._full_wanted = False
        elif decision.action == "moves" and decision.plan is not None:
            whole = decision.plan.placement.physical_to_logical.size * settings.max_move_fraction
            self._credit -= float(decision.plan.moves.sum()) / whole
        growth = 1 - settings.move_burst / BUDGET_WINDOWS
        self._credit = min(float(settings.move_burst), self._credit + growth)


def answer(
    question: Question, placement: Placement, settings: PolicySettings, *, num_threads: int | None = None
) -> Decision:
    """The decision for a question; no state, so it may be asked in another process.

    Raises:
        ValueError: ``hierarchical`` with groups that do not fit the nodes.
    """
    decision = _decide(question, placement, settings, num_threads)
    return _with_sets(decision, question.expected, placement, settings)


def _with_sets(
    decision: Decision, expected: Expected, placement: Placement, settings: PolicySettings
) -> Decision:
    """The decision's placement with sets of shares for small batches; new sets alone, where they save time."""
    top_k, times = settings.top_k, settings.expert_times
    if top_k is None or not settings.uneven_shares:
        return decision
    loads, plan = expected.mean_loads(), decision.plan
    made, text = planned_sets(placement if plan is None else plan.placement, loads, top_k, times)
    if plan is not None:
        reason = f"{decision.reason}; {text}" if text else decision.reason
        return Decision(decision.action, reason, _with_reason(replace(plan, placement=made), reason))
    gain = sets_gain(placement, made, loads, top_k, times)
    if gain < SETS_GAIN:
        held = classes_text(class_times(placement, loads, top_k, times), times)
        return replace(decision, reason=f"{decision.reason}; {held}") if held else decision
    before = expected.balancedness(placement)
    reason = f"shares of small batches: the longest rank takes {gain:.1%} less; {text or 'without sets'}"
    return Decision(
        "shares", reason, _with_reason(_plan("shares", made, placement, before, expected), reason)
    )


def _decide(
    question: Question, placement: Placement, settings: PolicySettings, num_threads: int | None
) -> Decision:
    expected, even = question.expected, not settings.uneven_shares
    if settings.hierarchical:
        check_hierarchical(
            placement.num_logical_experts, placement.num_slots, settings.num_groups, placement.topology
        )
    before = expected.balancedness(placement)
    if question.full:
        made = full_joint_placement(
            expected,
            placement,
            even=even,
            num_groups=settings.num_groups,
            hierarchical=settings.hierarchical,
            num_threads=num_threads,
        )
        plan = _plan("full", made, placement, before, expected)
        if not int(plan.moves.sum()):
            return Decision("stay", "stay: no full plan is better than the placement in use", None)
        reason = f"full plan (start or request): {_rise(before, plan.predicted)}, {int(plan.moves.sum())} slots move"
        return Decision("full", reason, _with_reason(plan, reason))
    shared = (
        placement
        if even
        else joint_shares_placement(
            expected, placement, share_gain=settings.share_gain, num_threads=num_threads
        )
    )
    shares = _plan("shares", shared, placement, before, expected)
    wanted, moves = settings.noise_band * question.noise, "no move is due"
    if question.max_moves > 0 and (shares.predicted.mean or 1.0) + wanted < settings.target:
        moved = _moves(question, placement, before, settings, num_threads)
        pays, moves = _worth(moved, shares, wanted, question.costs, settings.life_seconds)
        if pays:
            return Decision("moves", moves, _with_reason(moved, moves))
    gain = (shares.predicted.mean or 0.0) - (before.mean or 0.0)
    if gain >= settings.share_mean_gain and gain > 0:
        reason = f"shares: {_rise(before, shares.predicted)}, nothing moves"
        return Decision("shares", reason, _with_reason(shares, reason))
    reason = (
        f"stay: expected balancedness {_text(before.mean)}; shares gain {gain:.4f} (needed "
        f"{settings.share_mean_gain}); {moves}"
    )
    return Decision("stay", reason, None)


def _moves(
    question: Question,
    placement: Placement,
    before: Balancedness,
    settings: PolicySettings,
    num_threads: int | None,
) -> Plan:
    busy = int(before.has_load.sum())
    price = question.costs.price_per_slot(settings.life_seconds, busy, placement.topology.ep_size)
    made = joint_placement(
        question.expected,
        placement,
        max_moves=question.max_moves,
        price=max(price, settings.move_price / placement.num_slots),
        even=not settings.uneven_shares,
        barred=node_bars(placement, settings.num_groups) if settings.hierarchical else None,
        num_threads=num_threads,
    )
    return _plan("joint", made, placement, before, question.expected)


def _worth(
    moved: Plan, shares: Plan, wanted: float, costs: TimeCosts, life_seconds: float
) -> tuple[bool, str]:
    """Whether moves gain enough beyond shares alone, and more time than they cost; and why, in one line."""
    count = int(moved.moves.sum())
    with_moves, with_shares = moved.predicted.mean or 0.0, shares.predicted.mean or 0.0
    if not count or with_moves - with_shares < wanted:
        return False, f"moves gain less than {wanted:.4f}, or than their price"
    cost = costs.moving(count, moved.placement.topology.ep_size)
    saved = costs.saved(life_seconds, shares.predicted.total or 1.0, moved.predicted.total or 1.0)
    whose = f"{costs.source} figures"
    if costs.source != costs.step_source:
        whose = f"cost {costs.source}, gain by {costs.step_source} figures"
    priced = f"cost {cost:.3g} s and save {saved:.3g} s in {life_seconds:g} s ({whose})"
    if saved <= cost:
        return False, f"{count} moves would {priced}"
    return True, (
        f"moves: {count} slots raise expected balancedness {_text(moved.before.mean)} -> {with_moves:.4f} "
        f"(shares alone {with_shares:.4f}); they {priced}"
    )


def _plan(
    policy: str, made: Placement, placement: Placement, before: Balancedness, expected: Expected
) -> Plan:
    return Plan(made, policy, "", before, expected.balancedness(made), placement.moved_slots(made))


def _with_reason(plan: Plan, reason: str) -> Plan:
    return Plan(plan.placement, plan.policy, reason, plan.before, plan.predicted, plan.moves)


def _text(value: float | None) -> str:
    return "no data" if value is None else f"{value:.4f}"


def _rise(before: Balancedness, after: Balancedness) -> str:
    return f"expected balancedness {_text(before.mean)} -> {_text(after.mean)}"
