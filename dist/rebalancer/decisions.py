"""The policy in the daemon: its settings, its questions to the planner's process, and its state in the store.

`RebalancePolicy` decides here as in `replay`. What it remembers is kept in the store, a ring of settings of one window
each, and shown to a new policy at the next start.
"""

from __future__ import annotations

import base64
import itertools
import logging
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from evenroute.dist.config import PlannerSettings
from evenroute.dist.protocol.publication import fits
from evenroute.dist.protocol.receipt import LoadView
from evenroute.dist.protocol.types import PlacementInfo
from evenroute.dist.wire.messages import JobShape, RankCosts, WirePlacement
from evenroute.dist.wire.placement import pack_placement, unpack_placement
from evenroute.eplb.loads.balance import placement_balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.classes.times import given_times
from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.full import check_hierarchical
from evenroute.eplb.planner.plan import Plan
from evenroute.eplb.planner.policy import Decision, PolicySettings, Question, RebalancePolicy
from evenroute.eplb.planner.price.measured import MeasuredCosts, RankTimes
from evenroute.eplb.planner.price.worth import Savings, Worth
from evenroute.eplb.store.schema import PRICE_SETTING as PRICE
from evenroute.eplb.store.writer import HistoryStore, StoreError

logger = logging.getLogger("evenroute.dist.rebalancer")

REMEMBERED = 32  # windows; what came before them weighs less than 4 % (`memory.FADING` ** 32)
_START = "start-placement"
_SETTING = "policy-window-{}"
_LOOK_BACK = 16  # placements: each life takes one up
_NOT_PLANNED = ("taken-up", "rollback")


def policy_settings(settings: PlannerSettings, job: JobShape) -> PolicySettings:
    """The policy that the planner settings describe, for this job; ValueError naming what does not fit it.

    ``auto``: shares and few moves, a full plan at the start. ``weighted``: the same without the full plan.
    ``incremental``: few moves, even shares. ``global`` and ``hierarchical``: a full plan at every interval, even
    shares. `num_groups` above 1 keeps groups on their node where there are several nodes.
    """
    kept = settings.policy == "hierarchical" or (settings.num_groups > 1 and job.num_nodes > 1)
    if job.num_logical_experts % settings.num_groups:
        raise ValueError(
            f"planner.num_groups {settings.num_groups} does not divide its {job.num_logical_experts} experts"
        )
    if kept:
        topology = Topology(job.ep_size, job.num_nodes)
        check_hierarchical(job.num_logical_experts, job.num_slots, settings.num_groups, topology)
    given: dict[str, float | int] = {}
    if settings.target is not None:
        given["target"] = settings.target
    if (
        settings.max_moves is not None
    ):  # of one plan: no burst, and the half makes int() give the number itself
        slots = job.num_layers * job.num_slots
        given["max_move_fraction"] = (
            min(1.0, (settings.max_moves + 0.5) / slots) if settings.max_moves else 0.0
        )
        given["move_burst"] = 1
    if settings.min_gain:
        given["share_mean_gain"] = max(settings.min_gain, PolicySettings.share_mean_gain)
    return PolicySettings(
        costs=given_costs(settings),
        life_seconds=settings.life_s,
        uneven_shares=settings.policy in ("auto", "weighted"),
        hierarchical=kept,
        num_groups=settings.num_groups,
        top_k=job.top_k if settings.small_batches else None,
        expert_times=given_times(settings.expert_us, settings.token_us),
        **given,  # type: ignore[arg-type]
    )


def given_costs(settings: PlannerSettings) -> TimeCosts:
    """What moves and imbalance cost until the ranks have measured it: given, else the defaults."""
    costs = TimeCosts()
    if settings.slot_s is not None:
        costs = replace(costs, seconds_per_slot=settings.slot_s, source="given")
    if settings.load_fraction is not None:
        costs = replace(costs, load_fraction=settings.load_fraction, step_source="given")
    return costs


class _Window(Struct, frozen=True, forbid_unknown_fields=True):
    """A remembered window: counts int64 [L, E] (raw little-endian, zlib, base 85) and what was decided after it."""

    number: int
    shape: tuple[int, int]
    counts: str
    action: str
    moves: int


class LivePolicy:
    """The policy of one job shape. `ask` and `settle` come in pairs; a question that is never answered is forgotten."""

    def __init__(self, store: HistoryStore, settings: PlannerSettings, job: JobShape) -> None:
        self.settings = policy_settings(settings, job)
        self.policy = RebalancePolicy(Topology(job.ep_size, job.num_nodes), job.num_slots, self.settings)
        self._store = store
        self._always_full = settings.policy in ("global", "hierarchical")
        self._min_gain = settings.min_gain
        self._number = 0
        self._counts: NDArray[np.int64] | None = None
        few = settings.policy in ("weighted", "incremental") or settings.max_moves is not None
        if few or self._was_planned(job):
            self.policy.skip_start()

    def _was_planned(self, job: JobShape) -> bool:
        """Whether a plan for this job is among the store's newest placements."""
        rows = itertools.islice(self._store.placements(newest_first=True), _LOOK_BACK)
        return any(fits(row.placement, job) and row.policy not in _NOT_PLANNED for row in rows)

    def restore(self, live: Placement) -> int:
        """Show the policy what an earlier life remembered; returns the number of windows."""
        shape = (live.num_layers, live.num_logical_experts)
        found = []
        for place in range(REMEMBERED):
            with suppress(StoreError, msgspec.DecodeError):
                text = self._store.setting(_SETTING.format(place))
                if text is not None:
                    found.append(msgspec.json.decode(text, type=_Window))
        found = sorted((w for w in found if w.shape == shape), key=lambda window: window.number)
        for window in found:
            raw = zlib.decompress(base64.b85decode(window.counts))
            counts = np.frombuffer(raw, "<i8").reshape(shape)
            self.policy.remember([counts])
            self._settle(window.action, window.moves, live)
            self._number = window.number + 1
        if found:
            self.policy.skip_start()
        return len(found)

    def _settle(self, action: str, moves: int, live: Placement) -> None:
        """Take a decision's moves off the budget."""
        as_it_was = placement_balancedness(np.zeros((live.num_layers, live.num_logical_experts)), live)
        plan = Plan(live, action, "", as_it_was, as_it_was, np.array([moves]))
        self.policy.settle(Decision(action, "", plan))

    def ask(
        self, counts: NDArray[np.int64], live: Placement, costs: TimeCosts | None = None
    ) -> Question | None:
        """What the planner's process is to answer after this window; None if it holds no load.

        costs: measured ones, if there are any.
        """
        self.policy.costs = costs or self.settings.costs
        if self._always_full:
            self.policy.request_full_plan()
        self._counts = counts
        return self.policy.observe(counts, live)

    def settle(
        self, action: str, reason: str, *, moves: int, gain: float, live: Placement, epoch: int
    ) -> tuple[str, str]:
        """The action that is carried out and why, kept in the store; a gain below `planner.min_gain` stays."""
        if action != "stay" and gain < self._min_gain:
            reason = f"stay: gain {gain:.4f} is below planner.min_gain {self._min_gain:g} ({reason})"
            action, moves = "stay", 0
        self._settle(action, moves, live)
        self._keep(action, moves, epoch)
        return action, reason

    def _keep(self, action: str, moves: int, epoch: int) -> None:
        counts, self._counts = self._counts, None
        assert counts is not None
        packed = base64.b85encode(zlib.compress(counts.astype("<i8").tobytes(), 1)).decode()
        window = _Window(self._number, (len(counts), counts.shape[1]), packed, action, moves)
        if _kept(
            self._store, _SETTING.format(self._number % REMEMBERED), window, epoch, "the policy remembers"
        ):
            self._number += 1


def _kept(store: HistoryStore, name: str, value: Struct, epoch: int, what: str) -> bool:
    """Keep a setting; whether it is kept. A store that can't be written is logged, one taken over raises."""
    try:
        store.set_setting(name, msgspec.json.encode(value).decode(), epoch=epoch)
    except StoreError as error:
        logger.warning("what %s is not kept: %s", what, error)
        return False
    return True


class _Price(Struct, frozen=True, forbid_unknown_fields=True):
    """What the ranks measured and what rebalancing was worth, of jobs of one shape."""

    shape: tuple[int, int, int, int]
    measured: dict[str, Any]
    worth: dict[str, Any]


def _shape(job: JobShape) -> tuple[int, int, int, int]:
    return job.num_layers, job.num_logical_experts, job.num_slots, job.ep_size


class LiveCosts:
    """The ranks' figures, what they come to and what rebalancing was worth; kept in the store."""

    def __init__(self, store: HistoryStore, settings: PlannerSettings) -> None:
        self._store = store
        self._given = given_costs(settings)
        self._measured = MeasuredCosts()
        self._worth = Worth()
        self._shape: tuple[int, ...] | None = None
        self._job: JobShape | None = None
        self._start: Placement | None = None
        self.step_seconds: float | None = None  # of the last interval
        with suppress(StoreError, msgspec.DecodeError, TypeError, ValueError):
            text = store.setting(PRICE)
            if text is not None:
                kept = msgspec.json.decode(text, type=_Price)
                measured, worth = MeasuredCosts(kept.measured), Worth(**kept.worth)
                self._measured, self._worth, self._shape = measured, worth, kept.shape

    def report(self, message: RankCosts) -> None:
        """A rank's figures."""
        times = RankTimes(
            message.steps,
            message.step_s,
            message.lost_s,
            message.transfer_s,
            message.slots,
            float(message.slot_bytes),
        )
        self._measured.add(message.run, message.rank, times)

    def costs(self) -> TimeCosts:
        """Measured figures, given or default ones where there are none yet."""
        return self._given if self._job is None else self._measured.costs(self._given, self._job.ep_size)

    def savings(self) -> Savings | None:
        """What rebalancing has saved and cost this run so far; None before an interval whose steps were measured."""
        if self._job is None:
            return None
        return self._worth.savings(self._measured, self.costs(), self._job.ep_size)

    def moved(self, num_moves: int, epoch: int) -> None:
        """A version is published that moves ``num_moves`` slots."""
        self._worth.moves += num_moves
        self._keep(epoch)

    def end_interval(self, view: LoadView, live: Placement, job: JobShape, run: int, epoch: int) -> None:
        """The counts of an interval are whole: how long its steps took, and how long they would have."""
        if job != self._job:
            if self._shape not in (None, _shape(job)):
                self._measured = MeasuredCosts()
            self._job, self._shape = job, _shape(job)
            self._start = start_placement(self._store, job) or live
        if run != self._worth.run:
            self._worth = Worth(run)
        steps = max(rank.last_step for rank in view.ranks) - min(rank.first_step for rank in view.ranks) + 1
        loads = rank_loads(view.counts, live)
        mean, hottest = float(loads.mean(axis=1).sum()) / steps, float(loads.max(axis=1).sum()) / steps
        self.step_seconds = self._measured.end_interval(mean, hottest)
        if self.step_seconds is None:
            return
        assert self._start is not None
        first = float(rank_loads(view.counts, self._start).max(axis=1).sum()) / steps
        self._worth.served(steps, first, hottest, mean, self.step_seconds, self.costs())
        self._keep(epoch)

    def _keep(self, epoch: int) -> None:
        job = self._job
        if job is None:
            return
        price = _Price(_shape(job), self._measured.state, self._worth.state)
        _kept(self._store, PRICE, price, epoch, "the ranks measured")


def keep_start(store: HistoryStore, live: Placement, epoch: int) -> None:
    """Keep what a job routes with before its first version, to roll back to."""
    with suppress(StoreError):
        store.set_setting(_START, msgspec.json.encode(pack_placement(live)).decode(), epoch=epoch)


def earlier_placements(store: HistoryStore, job: JobShape) -> Iterator[tuple[str, Placement]]:
    """(name, placement) of what a job of this shape was given, the newest first; last what it started with."""
    for row in store.placements(newest_first=True):
        if fits(row.placement, job):
            yield f"version {row.epoch:x}/{row.version} ({row.policy})", row.placement
    start = start_placement(store, job)
    if start is not None:
        yield "the placement that the job started with", start


def start_placement(store: HistoryStore, job: JobShape) -> Placement | None:
    """What the first job of this shape started with, if the store has it (`keep_start`)."""
    with suppress(StoreError, ValueError, msgspec.DecodeError):  # of a job of another shape
        text = store.setting(_START)
        if text is not None:
            return unpack_placement(msgspec.json.decode(text, type=WirePlacement), job)
    return None


def told(info: PlacementInfo) -> dict[str, object]:
    """What a log's line about a placement says in fields."""
    return {
        "policy": info.policy,
        "moved_slots": int(info.moves.sum()),
        "before": info.balancedness_before,
        "predicted": info.balancedness_predicted,
        "reason": info.reason,
    }
