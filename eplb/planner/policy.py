"""When to plan, and how much: shares often, a few moves when they pay, a full plan only at the start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evenroute.eplb._checks import as_integer, describe, is_number, require_bool, require_instance
from evenroute.eplb.loads.balance import placement_balancedness, validate_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.layers import check_num_threads
from evenroute.eplb.planner.moves import MoveCost
from evenroute.eplb.planner.plan import Plan, plan_placement
from evenroute.eplb.planner.windows import frequencies, sampling_loss

LEAST_WEIGHT = 0.02  # of a new window, however steady the loads are


@dataclass(frozen=True)
class PolicySettings:
    """Dead bands and budgets; balancedness is a mean over layers.

    Attributes:
        share_gain: new shares only where a layer gains that much ...
        share_mean_gain: ... and only if all layers together gain that much.
        move_gain: moves only for that much more than shares alone give, on top of what noise can feign.
        target: moves stop there.
        max_move_fraction: part of all slots that one plan may move.
        cost: moves must also gain more time than they cost.
        uneven_shares: False where the dispatch cannot honour shares: moves then balance even ones.
    """

    share_gain: float = 0.005
    share_mean_gain: float = 0.001
    move_gain: float = 0.003
    target: float = 0.995
    max_move_fraction: float = 0.02
    cost: MoveCost | None = None
    uneven_shares: bool = True

    def __post_init__(self) -> None:
        for name in ("share_gain", "share_mean_gain", "move_gain", "max_move_fraction"):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"{name}={describe(value)}, expected a number in [0, 1]")
        if not is_number(self.target) or not 0 < self.target <= 1:
            raise ValueError(f"target={describe(self.target)}, expected a number in (0, 1]")
        require_bool("uneven_shares", self.uneven_shares)
        if self.cost is not None:
            require_instance("cost", self.cost, MoveCost)


@dataclass(frozen=True, eq=False)
class Decision:
    """What to do now: ``action`` is stay, shares, moves or full; ``plan`` is None for stay."""

    action: str
    reason: str
    plan: Plan | None


class RebalancePolicy:
    """Decides window by window. Deterministic: the same windows and placements give the same decisions.

    Loads are smoothed as far as they are steady: a window that differs from the past by no more than sampling
    explains is averaged with it, one that differs more counts for more (a scalar Kalman filter).
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
        self._smoothed: NDArray[np.float64] | None = None
        self._windows = 0
        self._full_wanted = True

    def request_full_plan(self) -> None:
        """Plan from scratch at the next window, whatever it moves."""
        self._full_wanted = True

    def skip_start(self) -> None:
        """The placement in use was planned before: no full plan at the first window."""
        self._full_wanted = False

    def _observe(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        """Fold a window into the smoothed loads ``[L, E]``, in counts of the assignments they are worth."""
        share = frequencies(counts)
        busy = np.asarray(counts.any(axis=1))
        counted = float(counts.sum(axis=1)[busy].mean())
        self._windows += 1
        if self._smoothed is None:
            self._smoothed, weight = share, 1.0
        else:
            weight = max(self._surprise(counts, share), 1.0 / self._windows, LEAST_WEIGHT)
            old = self._smoothed.any(axis=1, keepdims=True)
            mixed = np.where(old, (1 - weight) * self._smoothed + weight * share, share)
            self._smoothed = np.where(busy[:, None], mixed, self._smoothed)
        return np.asarray(self._smoothed * (counted / weight))

    def _surprise(self, counts: NDArray[np.float64], share: NDArray[np.float64]) -> float:
        """Weight of the new window: the part of its squared difference that sampling does not explain.

        Counts are Poisson, so the difference squared over the expectation is 1 on average if nothing changed;
        if it is D, the filter's gain is 1 - 1 / D.
        """
        assert self._smoothed is not None
        total = counts.sum(axis=1, keepdims=True)
        expected = self._smoothed * total
        known = expected > 1.0
        if not known.any():
            return 1.0
        difference = (share * total - expected)[known] ** 2 / expected[known]
        return float(max(0.0, 1.0 - 1.0 / max(float(difference.mean()), 1.0)))

    def decide(self, counts: ArrayLike, placement: Placement) -> Decision:
        """Decide after a window.

        Args:
            counts: ``[L, E]`` of the window that just ended.
            placement: the one in use (all layers switched).

        Raises:
            ValueError: counts that do not fit the placement, or bad ones.
        """
        require_instance("placement", placement, Placement)
        window = validate_loads(
            counts, num_layers=placement.num_layers, num_logical_experts=placement.num_logical_experts
        )
        if not window.any():
            return Decision("stay", "the window holds no load", None)
        loads = self._observe(window)
        if self._full_wanted:
            return self._full(loads, placement)
        settings = self.settings
        before = placement_balancedness(loads, placement).mean or 0.0
        busy = loads.any(axis=1)
        noise = float(sampling_loss(loads, self.topology, self.num_slots)[busy].mean())
        shares = self._plan(loads, placement, "shares" if settings.uneven_shares else "stay")
        with_shares = shares.predicted.mean or 0.0
        wanted = settings.move_gain + noise
        if with_shares < settings.target - wanted:
            moved = self._plan(loads, placement, "weighted" if settings.uneven_shares else "incremental")
            after, moves = moved.predicted.mean or 0.0, int(moved.moves.sum())
            if moves and after - with_shares >= wanted:
                reason = (
                    f"moves: {moves} slots raise balancedness {before:.4f} -> {after:.4f}, "
                    f"{after - with_shares:.4f} more than shares alone (needed {wanted:.4f}, noise {noise:.4f})"
                )
                return Decision("moves", reason, moved)
        if with_shares >= before + settings.share_mean_gain:
            reason = f"shares: balancedness {before:.4f} -> {with_shares:.4f}, nothing moves"
            return Decision("shares", reason, shares)
        reason = (
            f"stay: balancedness {before:.4f}; shares gain {with_shares - before:.4f} (needed "
            f"{settings.share_mean_gain}), moves less than {wanted:.4f} (noise {noise:.4f})"
        )
        return Decision("stay", reason, None)

    def _full(self, loads: NDArray[np.float64], placement: Placement) -> Decision:
        self._full_wanted = False
        plan = self._plan(loads, placement, "global")
        if not int(plan.moves.sum()):
            return Decision("stay", f"stay: no full plan is better; {plan.reason}", None)
        return Decision("full", f"full plan (start or request): {plan.reason}", plan)

    def _plan(self, loads: NDArray[np.float64], placement: Placement, policy: str) -> Plan:
        settings = self.settings
        few = policy in ("weighted", "incremental")
        budget = int(settings.max_move_fraction * placement.physical_to_logical.size)
        return plan_placement(
            loads,
            topology=self.topology,
            num_slots=self.num_slots,
            current=placement,
            policy=policy,
            target=settings.target if few and settings.cost is None else None,
            max_moves=budget if few else None,
            cost=settings.cost if few else None,
            share_gain=settings.share_gain,
            num_threads=self.num_threads,
        )
