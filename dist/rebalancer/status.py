"""The rebalancer's state as a `control.RebalancerStatus`, and when it is degraded."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from evenroute.dist.config import RebalancerConfig
from evenroute.dist.membership.service import problems as membership_problems
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.types import Phase
from evenroute.dist.rebalancer.plan_cycle import PlanCycle
from evenroute.dist.rebalancer.recording import Recorder
from evenroute.dist.wire.control import RankHealth, RankRecording, RebalancerStatus
from evenroute.dist.wire.membership import MembershipView
from evenroute.dist.wire.messages import NO_KEY
from evenroute.eplb.store.schema import IN_USE_EVENT, encode_in_use
from evenroute.eplb.store.writer import HistoryStore, StoreError

_SHOWN_S = 60.0  # how long an error or a flagged window is shown; a lasting one comes again
_IN_USE_EVERY_S = 1.0


class StatusBuilder:
    """Makes the status; what each rank delivered is read from the store."""

    def __init__(
        self,
        config: RebalancerConfig,
        core: RebalancerCore,
        plans: PlanCycle,
        store: HistoryStore,
        now: float,
    ) -> None:
        self._config = config
        self._store = store
        self._core = core
        self._plans = plans
        self._started_at = now
        self._store_errors = 0
        self._store_error_at: float | None = None
        self._version = (NO_KEY, now)

    def build(
        self,
        now: float,
        *,
        address: str,
        lag_s: float,
        extra_counters: Mapping[str, int],
        problems: Sequence[str],
        recorder: Recorder,
        rank_recordings: Mapping[int, RankRecording],
        ended: Collection[int],
        membership: MembershipView,
    ) -> RebalancerStatus:
        """The status of this moment."""
        core, plans, planner = self._core, self._plans, self._config.planner
        ranks = self._ranks(now, rank_recordings, ended)
        newest = core.newest.key if core.newest is not None else NO_KEY
        live_lowest, live_highest = core.view.live_range() if core.view is not None else (NO_KEY, NO_KEY)
        job = core.job
        finished = bool(ranks) and all(rank.ended for rank in ranks) and core.phase is Phase.SERVING
        counters = {**asdict(core.counters), **extra_counters}
        costs, savings = plans.costs.costs(), plans.costs.savings()
        return RebalancerStatus(
            state="finished" if finished else core.phase.value,
            degraded=[*self._degraded(now, ranks, finished), *problems, *membership_problems(membership)],
            pid=os.getpid(),
            uptime_s=now - self._started_at,
            address=address,
            store=self._config.rebalancer.store,
            epoch=core.epoch,
            version=core.version,
            run=0 if core.view is None else core.view.run,
            model="" if job is None else job.model,
            ep_size=0 if job is None else job.ep_size,
            num_layers=0 if job is None else job.num_layers,
            num_logical_experts=0 if job is None else job.num_logical_experts,
            num_slots=0 if job is None else job.num_slots,
            newest=newest,
            live_lowest=live_lowest,
            live_highest=live_highest,
            settled=core.settled(),
            ranks=ranks,
            interval=planner.interval,
            interval_unit=planner.interval_unit,
            until_next_plan=plans.until_next(now),
            plan_cycle=plans.cycle,
            plan_seconds=plans.plan_seconds,
            plans_succeeded=plans.succeeded,
            plan_errors=dict(plans.errors),
            last_plan_error=plans.last_error,
            placements=dict(plans.placements),
            balancedness_total=plans.before_total,
            balancedness_per_layer=plans.before_per_layer,
            balancedness_predicted=plans.predicted,
            counters={name: value for name, value in counters.items() if isinstance(value, int)},
            lag_s=lag_s,
            recording=recorder.active,
            recording_per_rank=recorder.per_rank,
            recording_mode=recorder.mode,
            recording_name=recorder.name,
            paused=plans.paused,
            last_action=plans.last_action,
            last_reason=plans.last_reason,
            costs=costs.told(),
            slot_seconds=costs.seconds_per_slot * costs.slowdown if costs.source == "measured" else None,
            step_seconds=plans.costs.step_seconds,
            saved_gpu_seconds=None if savings is None else savings.saved,
            cost_gpu_seconds=None if savings is None else savings.cost,
            worth="" if savings is None else savings.told(),
            shared_counts=job is not None and job.shared_counts,
            membership=membership,
            plans_overdue=plans.overdue(now) and not finished,
            rank_load=plans.loads.rank_load,
            hottest_rank=plans.loads.hottest_rank,
            hottest_expert=plans.loads.hottest_expert,
            hottest_expert_load=plans.loads.hottest_expert_load,
        )

    def _ranks(
        self, now: float, recordings: Mapping[int, RankRecording], ended: Collection[int]
    ) -> list[RankHealth]:
        core = self._core
        if core.view is None:
            return []
        stored = {}
        with suppress(StoreError):
            stored = {state.rank: state for state in self._store.rank_states(core.view.run)}
        newest = core.newest.key if core.newest is not None else NO_KEY
        found = []
        for number in range(core.view.job.ep_size):
            view, state = core.view.ranks.get(number), stored.get(number)
            found.append(
                RankHealth(
                    rank=number,
                    heard_s_ago=None if view is None else max(0.0, now - view.heard_at),
                    vote=0 if view is None else view.vote,
                    held=NO_KEY if view is None else view.held,
                    fence=0 if view is None else view.fence,
                    last_seq=0 if state is None else state.last_seq,
                    missing_windows=0 if state is None else state.missing,
                    first_step=None if state is None else state.first_step,
                    last_step=None if state is None else state.last_step,
                    tokens=0 if state is None else state.tokens,
                    behind=number not in ended and (view is None or view.held < newest),
                    ended=number in ended,
                    shadow=view is not None and view.shadow,
                    recording=recordings.get(number),
                )
            )
        return found

    def _degraded(self, now: float, ranks: list[RankHealth], finished: bool) -> list[str]:
        core, settings = self._core, self._config.rebalancer
        reasons = []
        if core.phase is Phase.ENDED:
            reasons.append(f"this life has ended: {core.ended}")
        listening = core.phase is Phase.WAITING and now - self._started_at < settings.listen_s
        silent = [
            rank.rank
            for rank in ranks
            if not rank.ended
            and (
                (rank.heard_s_ago is None and not listening)
                or (rank.heard_s_ago or 0.0) > settings.max_rank_silence_s
            )
        ]
        if silent:
            reasons.append(f"not heard for {settings.max_rank_silence_s:g} s: {_ranks_text(silent)}")
        if not finished:
            reasons += self._version_reasons(now, ranks)
        if core.view is not None:
            gone = {rank.rank for rank in ranks if rank.ended}
            troubled = [
                f"rank {rank}: {view.trouble}"
                for rank, view in sorted(core.view.ranks.items())
                if view.trouble and rank not in gone and now - view.trouble_at < _SHOWN_S
            ]
            reasons += troubled[:8]
        if self._plans.overdue(now) and not finished:
            running = (
                "the plan that runs has not ended" if self._plans.planner.busy else "no plan was due in time"
            )
            why = self._plans.last_error or self._plans.waiting_for or running
            intervals = self._config.planner.degraded_after
            reasons.append(f"no successful plan for {intervals} intervals ({why})")
        if core.counters.store_errors > self._store_errors:
            self._store_errors, self._store_error_at = core.counters.store_errors, now
        if self._store_error_at is not None and now - self._store_error_at < _SHOWN_S:
            reasons.append(f"store: {core.counters.store_errors} errors, the last one lately")
        return reasons

    def _version_reasons(self, now: float, ranks: list[RankHealth]) -> list[str]:
        core = self._core
        if core.newest is None or core.view is None:
            return []
        key = core.newest.key
        if self._version[0] != key:
            self._version = (key, now)
        reasons = []
        lowest, highest = core.view.live_range()
        if core.view.given_up() >= key and (lowest, highest) != (key, key):
            reasons.append(f"version {key} was refused, failed or is in conflict; the placement before stays")
        elif not core.settled() and now - self._version[1] > self._config.rebalancer.version_limit_s:
            behind = [rank.rank for rank in ranks if rank.behind]
            who = (
                f"{_ranks_text(behind)} did not get it"
                if behind
                else "all ranks hold it, the switch is under way"
            )
            reasons.append(
                f"version {key} is not in use everywhere after {now - self._version[1]:.0f} s: {who}"
            )
        return reasons


def _ranks_text(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


class InUseLog:
    """Keeps in the store what the ranks route with, so that a window's rank loads can be computed later.

    An event is added when the agreed live rows or their keys change, at most one a second (the last one always).
    """

    def __init__(self, core: RebalancerCore, add_event: Callable[[str, str, float], None]) -> None:
        self._core = core
        self._add_event = add_event
        self._added: tuple[int, bytes, bytes] = (0, b"", b"")
        self._added_at = float("-inf")

    def note(self, now: float, stamp: float) -> None:
        """`now`: a monotonic clock, `stamp`: seconds since 1970; both in seconds."""
        core = self._core
        view = core.view
        if core.phase is not Phase.SERVING or view is None or view.newest_status is None:
            return
        status = view.newest_status
        found = (view.run, status.live_digests, status.live_keys)
        if found == self._added or now - self._added_at < _IN_USE_EVERY_S or view.missing_rows():
            return
        lowest, highest = view.live_range()
        text = encode_in_use(view.run, lowest if lowest == highest else NO_KEY, status.live_digests)
        self._add_event(IN_USE_EVENT, text, stamp)
        self._added, self._added_at = found, now
