"""Replays a history of loads through predictor, planner, migration delay and dispatch, window by window.

Every setting is a small state machine that is fed the same windows, so that a sweep reads the history once and needs
no more memory than its placements. Nothing is drawn at random: same history and settings, same result.

Step-time model (the simplest that is honest): the experts' part of a step lasts as long as its fullest rank, layer
after layer, so it is proportional to the sum over layers of the largest rank load. With `experts_share` the part of a
step that experts take without balancing, the gain is ``experts_share * (1 - sum(max) / sum(max without EPLB))``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_integer, describe, is_number, require_choice, require_instance
from evenroute.eplb.loads.balance import RankLoadMap, quick_balancedness
from evenroute.eplb.loads.skew import Floats
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import count_replicas
from evenroute.eplb.placement.topology import Topology, automatic_redundant_experts
from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.plan import POLICIES, Plan, plan_placement
from evenroute.eplb.planner.policy import PolicySettings, RebalancePolicy

PREDICTORS = ("last", "mean", "decay")
DISPATCHES = ("dynamic", "static")
REPLAY_POLICIES = ("none", "rebalancer", *POLICIES)


@dataclass(frozen=True)
class ReplaySettings:
    """One way to run.

    Attributes:
        num_redundant_experts: slots beyond one an expert.
        policy: "none" never moves anything; "rebalancer" decides window by window as the rebalancer does
            (`RebalancePolicy`: a full plan first, then shares and few moves; it remembers windows, so `predictor`,
            `history` and `dead_band` have no part in it); the others are the planner's, asked at every interval.
        interval: windows between two plans.
        predictor: loads a plan is made for: the last window, the mean of the last `history`, or all of them with a
            weight that halves every `history` windows.
        delay: windows between a plan and its use (migration and agreement).
        dispatch: "dynamic" uses replicas evenly (or in planned shares), "static" takes the nearest replica.
        dead_band: a plan is only used if it predicts at least this much more balancedness (total).
        max_moves, target: handed to the planner.
        costs: what moves and imbalance cost in time, for "rebalancer".
    """

    ep_size: int
    num_redundant_experts: int
    num_nodes: int = 1
    num_groups: int = 1
    policy: str = "global"
    interval: int = 1
    predictor: str = "last"
    history: int = 4
    delay: int = 0
    dispatch: str = "dynamic"
    dead_band: float = 0.0
    max_moves: int | None = None
    target: float | None = None
    costs: TimeCosts = field(default_factory=TimeCosts)

    def __post_init__(self) -> None:
        for name, allowed in (
            ("policy", REPLAY_POLICIES),
            ("predictor", PREDICTORS),
            ("dispatch", DISPATCHES),
        ):
            require_choice(name, getattr(self, name), allowed)
        for name, low in (("interval", 1), ("history", 1), ("delay", 0), ("num_redundant_experts", 0)):
            if as_integer(name, getattr(self, name)) < low:
                raise ValueError(f"{name}={getattr(self, name)}, expected >= {low}")
        as_integer("num_groups", self.num_groups)
        if not is_number(self.dead_band) or not 0 <= self.dead_band < 1:
            raise ValueError(f"dead_band={describe(self.dead_band)}, expected [0, 1)")

    @property
    def topology(self) -> Topology:
        return Topology(self.ep_size, self.num_nodes)


@dataclass(frozen=True)
class ReplayPoint:
    """One window: balancedness under the placement in use (None = no load), and the slots a switch moved before it."""

    window: int
    mean: float | None
    total: float | None
    moves: int
    planned: bool


@dataclass(eq=False)
class ReplayResult:
    """What one way to run came to."""

    settings: ReplaySettings
    num_slots: int
    points: list[ReplayPoint] = field(default_factory=list)
    num_plans: int = 0
    num_switches: int = 0
    moves: int = 0
    sum_mean_load: float = 0.0
    sum_max_load: float = 0.0
    sum_max_without: float = 0.0
    placement: Placement | None = None

    @property
    def mean(self) -> float | None:
        """Mean over windows of the mean over layers."""
        known = [point.mean for point in self.points if point.mean is not None]
        return sum(known) / len(known) if known else None

    @property
    def worst(self) -> float | None:
        return min((point.mean for point in self.points if point.mean is not None), default=None)

    @property
    def total(self) -> float | None:
        """Sum of mean rank loads / sum of largest rank loads, over windows and layers."""
        return self.sum_mean_load / self.sum_max_load if self.sum_max_load else None

    def expert_time_saved(self) -> float | None:
        """Part of the experts' time that is saved against experts in order without redundancy."""
        return 1.0 - self.sum_max_load / self.sum_max_without if self.sum_max_without else None

    def as_dict(self, *, experts_share: float, expert_bytes: int | None) -> dict[str, Any]:
        """Plain values; bytes are None where the size of an expert is not known."""
        saved = self.expert_time_saved()
        moves_a_plan = self.moves / self.num_switches if self.num_switches else 0.0
        return {
            "settings": asdict(self.settings),
            "num_slots": self.num_slots,
            "num_windows": len(self.points),
            "balancedness_mean": self.mean,
            "balancedness_worst_window": self.worst,
            "balancedness_total": self.total,
            "num_plans": self.num_plans,
            "num_switches": self.num_switches,
            "moves": self.moves,
            "moves_per_switch": moves_a_plan,
            "moved_bytes": None if expert_bytes is None else self.moves * expert_bytes,
            "expert_time_saved": saved,
            "step_time_gain": None if saved is None else experts_share * saved,
            "experts_share": experts_share,
            "points": [asdict(point) for point in self.points],
        }


def static_factors(placement: Placement) -> Floats:
    """``[L, P]``: part of an expert's load that each of its slots gets when every source rank takes the nearest
    replica: its own, else those of its node evenly, else all evenly (sources send equally much)."""
    topology, local = placement.topology, placement.num_local_slots
    rows = placement.physical_to_logical
    layers = np.arange(placement.num_layers)[:, None]
    node_of_slot = np.arange(placement.num_slots) // local // topology.ranks_per_node
    in_node = np.zeros((placement.num_layers, topology.num_nodes, placement.num_logical_experts))
    np.add.at(in_node, (layers, node_of_slot[None, :], rows), 1.0)
    here = in_node[layers, node_of_slot[None, :], rows]
    served_nodes = (in_node > 0).sum(axis=1)[layers, rows]
    copies = count_replicas(rows, placement.num_logical_experts)[layers, rows]
    far = (topology.num_nodes - served_nodes) * topology.ranks_per_node / copies
    near = (topology.ranks_per_node - here) / here
    return np.asarray((1.0 + near + far) / topology.ep_size)


def load_map(placement: Placement, dispatch: str) -> RankLoadMap:
    """Rank loads under a way to dispatch."""
    if dispatch == "static":
        return RankLoadMap.with_factors(placement, static_factors(placement))
    return RankLoadMap.of(placement)


class _Predictor:
    """Loads to plan for."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        self._recent: deque[Floats] = deque(maxlen=settings.history)
        self._decayed: Floats | None = None
        self._keep = 0.5 ** (1.0 / settings.history)

    def add(self, counts: Floats) -> None:
        kind = self._settings.predictor
        if kind == "decay":
            self._decayed = counts.copy() if self._decayed is None else self._decayed * self._keep + counts
        elif kind == "mean":
            self._recent.append(counts)
        else:
            self._decayed = counts

    def loads(self) -> Floats:
        if self._settings.predictor == "mean":
            return np.asarray(np.sum(self._recent, axis=0))
        assert self._decayed is not None
        return self._decayed


class Replay:
    """One way to run, fed one window at a time.

    Raises:
        ValueError: the numbers do not fit (slots over ranks, groups over nodes), with the nearest that do.
    """

    def __init__(
        self,
        num_layers: int,
        num_logical_experts: int,
        settings: ReplaySettings,
        start: Placement | None = None,
    ) -> None:
        require_instance("settings", settings, ReplaySettings)
        if start is not None:
            require_instance("start", start, Placement)
        num_layers = as_integer("num_layers", num_layers, 1)
        num_logical_experts = as_integer("num_logical_experts", num_logical_experts, 1)
        self.settings = settings
        slots = num_logical_experts + settings.num_redundant_experts
        if start is None:
            start = Placement.initial(num_layers, num_logical_experts, slots, settings.topology)
        self._placement = start
        if self._placement.num_slots != slots or self._placement.topology != settings.topology:
            raise ValueError(
                f"the start placement has {self._placement.num_slots} slots on {self._placement.topology}, "
                f"expected {slots} on {settings.topology}"
            )
        self.result = ReplayResult(settings, slots, placement=self._placement)
        self._map = load_map(self._placement, settings.dispatch)
        self._without = plain_map(num_layers, num_logical_experts, settings.ep_size)
        self._predictor = _Predictor(settings)
        self._policy = _policy_of(settings, slots) if settings.policy == "rebalancer" else None
        self._since: Floats = np.zeros((num_layers, num_logical_experts))  # counts since the last decision
        self._pending: tuple[int, Placement, int] | None = None
        self._window = 0

    def feed(self, counts: NDArray[Any]) -> ReplayPoint:
        """The next window ``[L, E]``."""
        shape = (self._placement.num_layers, self._placement.num_logical_experts)
        if not isinstance(counts, np.ndarray) or counts.shape != shape or counts.dtype.kind not in "iuf":
            raise ValueError(f"counts must be an array of numbers {list(shape)}, found {describe(counts)}")
        moves = self._switch()
        loads = self._map(counts)
        mean, total = quick_balancedness(loads)
        maxima = loads.max(axis=1)
        self.result.sum_mean_load += float(loads.mean(axis=1).sum())
        self.result.sum_max_load += float(maxima.sum())
        self.result.sum_max_without += float(self._without(counts).max(axis=1).sum())
        if self._policy is None:
            self._predictor.add(np.asarray(counts, dtype=np.float64))
        else:
            self._since += counts
        self._window += 1
        planned = self._plan()
        point = ReplayPoint(self._window - 1, mean, total, moves, planned)
        self.result.points.append(point)
        return point

    def _switch(self) -> int:
        """Put a pending placement to use once its delay has passed; the slots it moved."""
        if self._pending is None or self._pending[0] > self._window:
            return 0
        _, placement, moves = self._pending
        self._pending = None
        self._placement = self.result.placement = placement
        self._map = load_map(placement, self.settings.dispatch)
        self.result.num_switches += 1
        self.result.moves += moves
        return moves

    def _plan(self) -> bool:
        """Plan if it is time; whether a plan was made (used or not)."""
        settings = self.settings
        if settings.policy == "none" or self._window % settings.interval or self._pending is not None:
            return False
        if self._policy is not None:
            decision = self._policy.decide(self._since, self._placement)
            self._since = np.zeros_like(self._since)
            self.result.num_plans += 1
            if decision.plan is not None:
                self._use(decision.plan)
            return True
        loads = self._predictor.loads()
        if not loads.any():
            return False
        plan = plan_placement(
            loads,
            topology=settings.topology,
            num_slots=self.result.num_slots,
            num_groups=settings.num_groups,
            current=self._placement,
            policy=settings.policy,
            target=settings.target,
            max_moves=settings.max_moves,
        )
        self.result.num_plans += 1
        if (plan.predicted.total or 0.0) - (plan.before.total or 0.0) >= settings.dead_band:
            self._use(plan)
        return True

    def _use(self, plan: Plan) -> None:
        """Put a plan to use after the delay, unless nothing would change."""
        if plan.placement.digest() != self._placement.digest():
            self._pending = (self._window + self.settings.delay, plan.placement, int(plan.moves.sum()))


def _policy_of(settings: ReplaySettings, num_slots: int) -> RebalancePolicy:
    """The rebalancer's policy; static dispatch cannot honour shares."""
    known = PolicySettings(uneven_shares=settings.dispatch == "dynamic", costs=settings.costs)
    if settings.target is not None:
        known = replace(known, target=settings.target)
    return RebalancePolicy(settings.topology, num_slots, known)


def plain_map(num_layers: int, num_logical_experts: int, ep_size: int) -> RankLoadMap:
    """Experts in order with the fewest redundant slots that divide over the ranks: life without EPLB."""
    slots = num_logical_experts + automatic_redundant_experts(num_logical_experts, ep_size)
    return RankLoadMap.of(Placement.initial(num_layers, num_logical_experts, slots, Topology(ep_size)))


def replay(windows: Iterable[NDArray[Any]], replays: Sequence[Replay]) -> list[ReplayResult]:
    """Feed every window to every way to run; one pass over the history."""
    for counts in windows:
        for one in replays:
            one.feed(counts)
    return [one.result for one in replays]


def worthwhile_redundancy(results: Sequence[ReplayResult], *, within: float = 0.01) -> dict[str, Any] | None:
    """Of runs that differ in redundancy: the fewest redundant experts within ``within`` of the best total."""
    known = [(r.settings.num_redundant_experts, r.total) for r in results if r.total is not None]
    if len({number for number, _ in known}) < 2:
        return None
    best = max(total for _, total in known if total is not None)
    number, total = min((n, t) for n, t in known if t is not None and t >= best * (1 - within))
    return {
        "num_redundant_experts": number,
        "balancedness_total": total,
        "best_total": best,
        "within": within,
    }
