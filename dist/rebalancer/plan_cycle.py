"""When to plan, from what, and what becomes of the plan: the policy between the protocol core and the planner process.

No socket and no thread; `now` is a monotonic clock given by the caller. A plan is made from the counts of a whole
interval: all reporting ranks, no window missing; otherwise it waits and says for whom.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.config import PlannerSettings
from evenroute.dist.log import event
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.receipt import LoadView
from evenroute.dist.protocol.types import Outgoing, PlacementInfo
from evenroute.dist.rebalancer.decisions import LiveCosts, LivePolicy, earlier_placements, keep_start, told
from evenroute.dist.rebalancer.interval_loads import IntervalLoads
from evenroute.dist.rebalancer.intervals import lacking, most_windows, whole_windows
from evenroute.dist.rebalancer.planner import PlannerError, PlannerProcess, decide_request, plan_request
from evenroute.dist.rebalancer.planner_child import DecideRequest, PlanReply, PlanRequest
from evenroute.dist.spans import span
from evenroute.dist.wire.messages import JobShape
from evenroute.dist.wire.placement import unpack_placement
from evenroute.eplb.loads.balance import balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.store.writer import HistoryStore

logger = logging.getLogger("evenroute.dist.rebalancer")

_PAUSED = "paused"  # setting of the store: "yes" while an operator has stopped the plans


class PlanCycle:
    """One planner, one cycle at a time. `planner.receive` is driven by `turn`."""

    def __init__(
        self, core: RebalancerCore, store: HistoryStore, settings: PlannerSettings, now: float
    ) -> None:
        self.settings = settings
        self.costs = LiveCosts(store, settings)
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
        self.loads = IntervalLoads()
        self.waiting_for = ""
        self.last_action = ""  # of the last decision: stay, shares, moves or full
        self.last_reason = ""
        self.paused = store.setting(_PAUSED) == "yes"
        self._core = core
        self._store = store
        self._run: int | None = None
        self._policy: LivePolicy | None = None
        self._policy_job: JobShape | None = None
        self._asked_from: Placement | None = None
        self._dropped = 0  # cycle whose plan is not wanted any more
        self._interval_from = now
        self._success_at = now
        self._requested_at = now
        self._logged_at = -math.inf
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
        return max(0.0, self.settings.interval - (0 if view is None else whole_windows(view)))

    def overdue(self, now: float) -> bool:
        """Whether `degraded_after` intervals went by without a plan that succeeded, with load to plan from."""
        if not self.settings.enabled or self.paused or not self._core.has_view():
            return False
        if self.settings.interval_unit == "windows":
            view = self._core.loads()
            late = view is not None and view.tokens and most_windows(view) >= self._limit_windows()
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
        if self.settings.enabled and not self.paused and not self.planner.busy and self._ready is None:
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
        if self.settings.interval_unit == "windows" and most_windows(view) < self.settings.interval:
            return
        self.waiting_for = lacking(view, self.settings)
        if self.waiting_for:
            self._log_waiting(now)
            if any(rank.num_missing for rank in view.ranks):
                self._core.clear_loads()  # an interval with a hole never gets whole; begin a new one
                self._interval_from = now
            return
        self._request(view, now)

    def _log_waiting(self, now: float) -> None:
        if now - self._logged_at > max(
            10.0, self.settings.interval if self.settings.interval_unit == "seconds" else 0
        ):
            self._logged_at = now
            logger.info("plan waits: %s", self.waiting_for, extra=event("plan-waits"))

    def _request(self, view: LoadView, now: float) -> None:
        live = self._core.live_placement()
        assert live is not None
        self.cycle += 1
        loads = view.counts.astype(np.float64)
        self._measure(loads, live)
        assert self._core.job is not None
        assert self._core.view is not None
        self.costs.end_interval(view, live, self._core.job, self._core.view.run, self._core.epoch)
        self._core.clear_loads()
        self._interval_from = self._requested_at = now
        request = self._question(view.counts, live)
        if request is None:
            return
        try:
            self.planner.request(request)
        except OSError as error:
            self._failed("crash", f"planner process cannot be started: {error}")

    def _question(self, counts: NDArray[np.int64], live: Placement) -> PlanRequest | DecideRequest | None:
        if self.settings.function:
            return plan_request(self.settings, self.cycle, counts.astype(np.float64), live)
        job = self._core.job
        assert job is not None
        if self._policy is None or job != self._policy_job:
            self._policy, self._policy_job = LivePolicy(self._store, self.settings, job), job
            restored = self._policy.restore(live)
            if restored:
                logger.info("the policy remembers %d windows of the store", restored)
        question = self._policy.ask(counts, live, self.costs.costs())
        self._asked_from = live
        return None if question is None else decide_request(question, self._policy.settings, self.cycle, live)

    def _measure(self, loads: NDArray[np.float64], live: Placement) -> None:
        self.loads = IntervalLoads.of(loads, live)
        found = balancedness(self.loads.rank_loads)
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
        span("evenroute.plan", time.time() - self.plan_seconds, time.time(), cycle=self.cycle)
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
        if view is None:
            raise ValueError("the job is gone")
        if reply.cycle == self._dropped:  # paused or rolled back meanwhile
            if reply.action:
                self._decided("stay", "stay: an operator stopped this plan", 0, 0.0)
            return None
        if reply.placement is None:
            if reply.action != "stay":
                raise ValueError("reply without a placement")
            self._decided("stay", reply.reason, 0, 0.0)
            return None
        placement = unpack_placement(reply.placement, view.job)
        moves = np.frombuffer(reply.moves, "<i8").astype(np.int64)
        if len(moves) != placement.num_layers or moves.min(initial=0) < 0:
            raise ValueError(f"moves: {len(moves)} numbers found, expected {placement.num_layers} at least 0")
        if reply.action:
            gain = (reply.mean_predicted or 0.0) - (reply.mean_before or 0.0)
            if self._decided(reply.action, reply.reason, int(moves.sum()), gain) == "stay":
                return None
        else:
            gain = (reply.predicted or 0.0) - (self.before_total or 0.0)
            if gain < self.settings.min_gain:
                reason = f"gain {gain:.4f} is below planner.min_gain {self.settings.min_gain:g}"
                self._stays(reason)
                return None
            self.last_action, self.last_reason = reply.policy, reply.reason
        live = self._core.live_placement()
        if live is not None and live.digest() == placement.digest():
            self.placements["unchanged"] += 1
            return None
        info = PlacementInfo(moves, reply.policy, reply.reason, self.before_total, reply.predicted)
        return placement, info

    def _decided(self, action: str, reason: str, moves: int, gain: float) -> str:
        """Give the policy the answer to its question; returns the action that is carried out."""
        assert self._policy is not None
        assert self._asked_from is not None
        action, reason = self._policy.settle(
            action, reason, moves=moves, gain=gain, live=self._asked_from, epoch=self._core.epoch
        )
        if action == "stay":
            self._stays(reason)
        self.last_action, self.last_reason = action, reason
        return action

    def _stays(self, reason: str) -> None:
        self.placements["not_worth_it"] += 1
        self.last_action, self.last_reason = "stay", reason
        logger.info("cycle %d: %s", self.cycle, reason, extra=event("stay", cycle=self.cycle, reason=reason))

    def _failed(self, kind: str, text: str) -> None:
        self.errors[kind] += 1
        self._failed_in_a_row += 1
        self.last_error = f"cycle {self.cycle}: {kind}: {text}"
        about = event("plan-failed", cycle=self.cycle, kind=kind)
        logger.error("plan failed, the placement in use stays: %s", self.last_error, extra=about)

    def _publish(self, now: float) -> list[Outgoing]:
        if self._ready is None or not self._core.may_publish(now):
            return []
        (placement, info), self._ready = self._ready, None
        live = self._core.live_placement()
        if self._core.newest is None and live is not None:
            keep_start(self._store, live, self._core.epoch)
        published, began = self._core.counters.placements_published, time.time()
        try:
            out = self._core.publish(placement, info, now)
        except ValueError as error:
            self.placements["refused"] += 1
            logger.error("cycle %d: not published: %s", self.cycle, error)
            return []
        if self._core.counters.placements_published > published:
            self.placements["published"] += 1
            span("evenroute.publish", began, time.time(), version=self._core.version, policy=info.policy)
            self.costs.moved(int(info.moves.sum()), self._core.epoch)
            before, predicted = _text(info.balancedness_before), _text(info.balancedness_predicted)
            logger.info(
                "version %d published: %s, %d slots move, balancedness %s -> %s (%s)",
                self._core.version,
                info.policy,
                int(info.moves.sum()),
                before,
                predicted,
                info.reason,
                extra=event("published", version=self._core.version, cycle=self.cycle, **told(info)),
            )
        else:
            self.placements["not_kept"] += 1
        return out

    def pause(self, paused: bool) -> None:
        """Stop plans, or go on with them; kept over restarts. What is being planned is not published."""
        self._store.set_setting(_PAUSED, "yes" if paused else "no", epoch=self._core.epoch)
        self.paused = paused
        self._drop_plan()
        self._interval_from = self._success_at = time.monotonic()

    def roll_back(self) -> str:
        """Publish the placement before the newest as a new version, once that may follow; returns what was done.

        ValueError in one line when there is none.
        """
        live, job = self._core.live_placement(), self._core.job
        newest = live if self._core.newest is None else self._core.newest.placement
        if newest is None or job is None:
            raise ValueError("rollback: what the ranks route with is not known yet; try again")
        earlier = earlier_placements(self._store, job)
        found = next((one for one in earlier if one[1].digest() != newest.digest()), None)
        if found is None:
            raise ValueError("rollback: the store holds no earlier placement of this job that differs")
        name, placement = found
        self._drop_plan()
        moves = newest.moved_slots(placement)
        text = f"back to {name}"
        self.last_action, self.last_reason = "rollback", text
        self._ready = (placement, PlacementInfo(moves, "rollback", text))
        after = "plans are stopped"
        if not self.paused:
            after = "plans go on at the next interval (`evenroute pause` stops them)"
        return f"{text}, {int(moves.sum())} slots move; {after}"

    def _drop_plan(self) -> None:
        self._ready = None
        self._dropped = self.cycle if self.planner.busy else 0

    def close(self) -> None:
        """End the planner's process."""
        self.planner.close()


def _text(value: float | None) -> str:
    return "no data" if value is None else f"{value:.4f}"
