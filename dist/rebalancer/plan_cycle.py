"""When to plan, from what, and what becomes of the plan: the policy between the protocol core and the planner process.

No socket and no thread; `now` is a monotonic clock given by the caller. A plan is made from the counts of a whole
interval: all reporting ranks, no window missing; otherwise it waits and says for whom.
"""

from __future__ import annotations

import logging
import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.config import PlannerSettings
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.receipt import LoadView
from evenroute.dist.protocol.types import Outgoing, PlacementInfo
from evenroute.dist.rebalancer.planner import PlannerError, PlannerProcess, plan_request
from evenroute.dist.rebalancer.planner_child import PlanReply
from evenroute.dist.wire.placement import unpack_placement
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement

logger = logging.getLogger("evenroute.dist.rebalancer")

_LEAST_COVERAGE = 0.5  # steps that all ranks cover over steps that any covers; below, wait for those behind


class PlanCycle:
    """One planner, one cycle at a time. `planner.receive` is driven by `turn`."""

    def __init__(self, core: RebalancerCore, settings: PlannerSettings, now: float) -> None:
        self.settings = settings
        self.planner = PlannerProcess(settings.time_limit_s, settings.function)
        self.cycle = 0
        self.succeeded = 0
        self.errors: Counter[str] = Counter()
        self.last_error = ""
        self.placements: Counter[str] = Counter()
        self.plan_seconds: float | None = None
        self.before_total: float | None = None
        self.before_per_layer: list[float | None] = []
        self.predicted: float | None = None
        self.waiting_for = ""
        self._core = core
        self._run: int | None = None
        self._interval_from = now
        self._success_at = now
        self._requested_at = now
        self._told_at = -math.inf
        self._checked_at = -math.inf
        self._ready: tuple[Placement, PlacementInfo] | None = None

    # --------------------------------------------------------------------------------------- timing

    def warm_up(self) -> None:
        """Start the planner's process ahead of the first plan."""
        if self.settings.enabled:
            self.planner.start()

    def until_next(self, now: float) -> float:
        """Seconds or windows until the next plan is due; 0 while it is overdue, never negative."""
        if self.settings.interval_unit == "seconds":
            return max(0.0, self._interval_from + self.settings.interval - now)
        view = self._core.loads()
        return max(0.0, self.settings.interval - (0 if view is None else _whole_windows(view)))

    def overdue(self, now: float) -> bool:
        """Whether `degraded_after` intervals went by without a plan that succeeded, with load to plan from."""
        if not self.settings.enabled or not self._core.has_view():
            return False
        if self.settings.interval_unit == "windows":
            view = self._core.loads()
            late = view is not None and view.tokens and _most_windows(view) >= self._limit_windows()
            return bool(late) or self._failed_in_a_row >= self.settings.degraded_after
        return now - self._success_at > self.settings.interval * self.settings.degraded_after + 1.0

    _failed_in_a_row = 0

    def _limit_windows(self) -> float:
        return self.settings.interval * self.settings.degraded_after

    # ----------------------------------------------------------------------------------------- turn

    def turn(self, now: float) -> list[Outgoing]:
        """Go on: read the planner, publish what may be published, begin a cycle that is due."""
        self._follow_run(now)
        self._read_planner(now)
        out = self._publish(now)
        if self.settings.enabled and not self.planner.busy and self._ready is None:
            self._begin(now)
        return out

    def _follow_run(self, now: float) -> None:
        run = None if self._core.view is None else self._core.view.run
        if run != self._run:
            self._run, self._ready = run, None
            self._interval_from = self._success_at = now

    def _begin(self, now: float) -> None:
        if now - self._checked_at < 0.05 or not self._core.has_view():
            return
        self._checked_at = now
        if self.settings.interval_unit == "seconds" and now - self._interval_from < self.settings.interval:
            return
        if not self._core.may_publish(now):
            return
        view = self._core.loads()
        assert view is not None
        if self.settings.interval_unit == "windows" and _most_windows(view) < self.settings.interval:
            return
        self.waiting_for = self._lacking(view)
        if self.waiting_for:
            self._tell_waiting(now)
            if any(rank.num_missing for rank in view.ranks):
                self._core.clear_loads()  # an interval with a hole never gets whole; begin a new one
                self._interval_from = now
            return
        self._request(view, now)

    def _lacking(self, view: LoadView) -> str:
        if view.missing_ranks:
            return f"no counts of ranks {_short(view.missing_ranks)} in this interval"
        holes = [rank.rank for rank in view.ranks if rank.num_missing]
        if holes:
            return f"windows of ranks {_short(holes)} are missing; the interval is not planned from"
        if self.settings.interval_unit == "windows" and _whole_windows(view) < self.settings.interval:
            behind = [r.rank for r in view.ranks if r.num_windows < self.settings.interval]
            return f"windows of ranks {_short(behind)} are not here yet"
        if view.tokens < self.settings.min_tokens:
            return f"{view.tokens} tokens counted, planner.min_tokens is {self.settings.min_tokens}"
        if view.coverage < _LEAST_COVERAGE:
            return f"the ranks' windows cover different steps (common part {view.coverage:.2f})"
        return ""

    def _tell_waiting(self, now: float) -> None:
        if now - self._told_at > max(
            10.0, self.settings.interval if self.settings.interval_unit == "seconds" else 0
        ):
            self._told_at = now
            logger.info("plan waits: %s", self.waiting_for)

    def _request(self, view: LoadView, now: float) -> None:
        live = self._core.live_placement()
        assert live is not None
        self.cycle += 1
        loads = view.counts.astype(np.float64)
        self._measure(loads, live)
        self._core.clear_loads()
        self._interval_from = self._requested_at = now
        request = plan_request(self.settings, self.cycle, loads, live)
        try:
            self.planner.request(request)
        except OSError as error:
            self._failed("crash", f"planner process cannot be started: {error}")

    def _measure(self, loads: NDArray[np.float64], live: Placement) -> None:
        found = balancedness(rank_loads(loads, live))
        self.before_total = found.total
        self.before_per_layer = [
            float(value) if has else None for value, has in zip(found.per_layer, found.has_load, strict=True)
        ]

    # ------------------------------------------------------------------------------------- planner

    def _read_planner(self, now: float) -> None:
        try:
            reply = self.planner.receive()
        except PlannerError as error:
            self._failed(error.kind, str(error))
            return
        if reply is None:
            return
        self.plan_seconds = now - self._requested_at
        try:
            self._ready = self._judge(reply)
        except ValueError as error:
            self._failed("garbage", f"its placement is refused: {error}")
            return
        self.succeeded += 1
        self._failed_in_a_row = 0
        self._success_at = now
        self.predicted = reply.predicted

    def _judge(self, reply: PlanReply) -> tuple[Placement, PlacementInfo] | None:
        """The placement to publish, or None if it is not worth it; ValueError when it is not one for this job."""
        view = self._core.view
        if view is None or reply.placement is None:
            raise ValueError("reply without a placement" if view is not None else "the job is gone")
        placement = unpack_placement(reply.placement, view.job)
        moves = np.frombuffer(reply.moves, "<i8").astype(np.int64)
        if len(moves) != placement.num_layers or moves.min(initial=0) < 0:
            raise ValueError(f"moves: {len(moves)} numbers found, expected {placement.num_layers} at least 0")
        gain = (reply.predicted or 0.0) - (self.before_total or 0.0)
        live = self._core.live_placement()
        if live is not None and live.digest() == placement.digest():
            self.placements["unchanged"] += 1
            return None
        if gain < self.settings.min_gain:
            self.placements["not_worth_it"] += 1
            logger.info(
                "cycle %d: gain %.4f is below min_gain %.4f", self.cycle, gain, self.settings.min_gain
            )
            return None
        info = PlacementInfo(moves, reply.policy, reply.reason, self.before_total, reply.predicted)
        return placement, info

    def _failed(self, kind: str, text: str) -> None:
        self.errors[kind] += 1
        self._failed_in_a_row += 1
        self.last_error = f"cycle {self.cycle}: {kind}: {text}"
        logger.error("plan failed, the placement in use stays: %s", self.last_error)

    def _publish(self, now: float) -> list[Outgoing]:
        if self._ready is None or not self._core.may_publish(now):
            return []
        (placement, info), self._ready = self._ready, None
        published = self._core.counters.placements_published
        try:
            out = self._core.publish(placement, info, now)
        except ValueError as error:
            self.placements["refused"] += 1
            logger.error("cycle %d: not published: %s", self.cycle, error)
            return []
        if self._core.counters.placements_published > published:
            self.placements["published"] += 1
            before, predicted = _text(info.balancedness_before), _text(info.balancedness_predicted)
            logger.info(
                "version %d published: %s, %d slots move, balancedness %s -> %s (%s)",
                self._core.version,
                info.policy,
                int(info.moves.sum()),
                before,
                predicted,
                info.reason,
            )
        else:
            self.placements["not_kept"] += 1
        return out

    def close(self) -> None:
        """End the planner's process."""
        self.planner.close()


def _text(value: float | None) -> str:
    return "no data" if value is None else f"{value:.4f}"


def _whole_windows(view: LoadView) -> int:
    """Windows that every reporting rank has delivered."""
    return 0 if view.missing_ranks or not view.ranks else min(rank.num_windows for rank in view.ranks)


def _most_windows(view: LoadView) -> int:
    return max((rank.num_windows for rank in view.ranks), default=0)


def _short(ranks: tuple[int, ...] | list[int]) -> str:
    names = ", ".join(map(str, ranks[:8]))
    return names if len(ranks) <= 8 else f"{names} and {len(ranks) - 8} more"
