"""Planted faults of the membership rules: each is caught by some schedule, or the simulator does not look at it."""

from __future__ import annotations

from typing import Any

from evenroute.dist.membership import death as death_module
from evenroute.dist.membership import decider as decider_module
from evenroute.dist.membership import member as member_module
from evenroute.dist.membership.decider import MembershipCore
from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.member import MemberCore
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.types import Applied, Outcome
from evenroute.dist.wire.membership import MemberOrder, MemberReport, MembershipRecord, record_to_text
from support.elastic_ambush import LeaverStops
from support.elastic_world import Parts, World
from support.protocol_helpers import replace


class _NoCatchUp(MemberCore):
    def _catch_up(self, caught: Any, rank: Any, rows: Any, applied: Applied) -> Any:
        return rows


class _NoFreeze(MemberCore):
    def check(self) -> None:
        pass


class _AllDone(MemberCore):
    def apply(self, rank: Any, rows: Any) -> Applied | None:
        applied = super().apply(rank, rows)
        if applied is not None:
            applied.outcomes = [Outcome(one.membership, one.step, True) for one in applied.outcomes]
        return applied


class _NothingDone(MemberCore):
    def apply(self, rank: Any, rows: Any) -> Applied | None:
        applied = super().apply(rank, rows)
        if applied is not None:
            applied.outcomes = [Outcome(one.membership, one.step, False) for one in applied.outcomes]
        return applied


class _GhostDelivers(MemberCore):
    def apply(self, rank: Any, rows: Any) -> Applied | None:
        attempts = list(self.attempts)
        applied = super().apply(rank, rows)
        if applied is None:
            self.ended, self.finished, self.attempts = "left", True, attempts
            return Applied(self.record, rows, self.record.key)  # type: ignore[arg-type,union-attr]
        return applied


class _NoRefill(MemberCore):
    def apply(self, rank: Any, rows: Any) -> Applied | None:
        saved = member_module.refilled
        member_module.refilled = lambda found, experts, ranks: found  # type: ignore[assignment]
        try:
            return super().apply(rank, rows)
        finally:
            member_module.refilled = saved


class _OldKey(MemberCore):
    """Rows of a membership under the key that was live before."""

    def apply(self, rank: Any, rows: Any) -> Applied | None:
        applied = super().apply(rank, rows)
        if applied is not None:
            key = rank.state.live_keys[0]
            applied.record = self.record = replace(applied.record, key=key)
        return applied


class _Gaps(MemberCore):
    """Takes a record though it has not heard the one before it."""

    def _take(self, record: MembershipRecord) -> None:
        if self.record is not None and record.job == self.job and record.number > self.heard + 1:
            self.seen = record.number - 1
        super()._take(record)


class _LeaverAtOnce(MemberCore):
    """Lets go before anybody serves in the membership that it is not in."""

    def switch(self, number: int, rows: Any, num_experts: int) -> Any:
        found = super().switch(number, rows, num_experts)
        if self.left:
            self.finished, self.ended = True, "left"
        return found


class _AnyServed(MemberCore):
    """A leaver lets go for a later membership too."""

    def _obey(self, order: MemberOrder) -> None:
        if self.left and order.head > self.left and order.job == self.job:
            self.finished, self.ended = True, "left"
        else:
            super()._obey(order)


class _Unhalts(MemberCore):
    """Goes on by itself after a report."""

    def report(self) -> MemberReport:
        found = super().report()
        if self.halted and not self.pending:
            self.halted = False
        return found


class _DoneMax(MembershipCore):
    def _decide(self, now: float) -> Any:
        saved = death_module.last_done
        reports = self.got()
        most = max((report.completed for report in reports.values()), default=-1)
        death_module.last_done = lambda ledger, top, report: most  # type: ignore[assignment]
        try:
            return super()._decide(now)
        finally:
            death_module.last_done = saved


class _DoneOwn(MembershipCore):
    """Deaths that one who comes late has not heard of do not bound what it has done."""

    def _decide(self, now: float) -> Any:
        saved = death_module.last_done
        death_module.last_done = lambda ledger, top, report: report.completed + 1  # type: ignore[assignment]
        try:
            return super()._decide(now)
        finally:
            death_module.last_done = saved


class _StaleReports(MembershipCore):
    def got(self) -> dict[int, MemberReport]:
        reports = {one: self.heard[one].report for one in sorted(self.heard)}
        return {
            one: r for one, r in reports.items() if (r.halted or r.seen < self.head.number) and r.installed
        }  # type: ignore[union-attr]


class _NotHalted(MembershipCore):
    """Decides from reports of members that have not halted."""

    def got(self) -> dict[int, MemberReport]:
        reports = {one: self.heard[one].report for one in sorted(self.heard)}
        found = {one: r for one, r in reports.items() if r.seen == self.head.number and r.installed}  # type: ignore[union-attr]
        return found if any(r.halted for r in found.values()) else {}


class _TopIsFact(MembershipCore):
    """A change that somebody has installed is forgotten."""

    def _decide(self, now: float) -> Any:
        saved = decider_module.top_of
        facts = [record for record in self.ledger.records if record.kind != "change"]
        decider_module.top_of = lambda ledger, got: facts[-1]  # type: ignore[assignment]
        try:
            return super()._decide(now)
        finally:
            decider_module.top_of = saved


class _SendFirst(MembershipCore):
    """Everybody hears of a record that the store does not have."""

    def _decide(self, now: float) -> Any:
        ledger = self.ledger
        self.ledger = _Forgetful(ledger)  # type: ignore[assignment]
        try:
            return super()._decide(now)
        finally:
            self.ledger = ledger


class _Forgetful:
    def __init__(self, ledger: Ledger) -> None:
        self.records, self.find = list(ledger.records), ledger.find

    @property
    def head(self) -> MembershipRecord:
        return self.records[-1]

    def add(self, record: MembershipRecord, **_: Any) -> bool:
        self.records.append(record)
        return True


class _NoCompare(Ledger):
    """A record is kept whatever the store has, by whichever life."""

    def add(self, record: MembershipRecord, *, epoch: int, now: float) -> bool:
        del epoch, now
        self._store.events.append(("membership", record_to_text(record)))  # type: ignore[attr-defined]
        self.records.append(record)
        return True


class _GhostWindows(ElasticRebalancerCore):
    def _note_removed(self) -> None:
        self._removed = frozenset()


class _OldRuns(ElasticRebalancerCore):
    """Statuses of memberships that are over count."""

    def _is_over(self, run: int) -> bool:
        return False


class _SurvivorsRefused(ElasticRebalancerCore):
    """Windows of a membership that is over are refused for all."""

    def _note_removed(self) -> None:
        super()._note_removed()
        records = [] if self._ledger is None else self._ledger.records
        if len(records) > 1:
            self._removed = frozenset(records[0].numbers)


class _KeyAgain(ElasticRebalancerCore):
    def reserve_key(self) -> tuple[int, int]:
        return self.epoch, max(1, self._published.version)


PLANTED: dict[str, Parts] = {
    "deliver-now": Parts(deliver_now=True),
    "no-catch-up": Parts(member=_NoCatchUp),
    "no-freeze": Parts(member=_NoFreeze, no_freeze=True),
    "all-done": Parts(member=_AllDone),
    "nothing-done": Parts(member=_NothingDone),
    "ghost-delivers": Parts(member=_GhostDelivers),
    "no-refill": Parts(member=_NoRefill),
    "old-key": Parts(member=_OldKey),
    "gaps": Parts(member=_Gaps),
    "unhalts": Parts(member=_Unhalts),
    "leaver-at-once": Parts(member=_LeaverAtOnce),
    "any-served": Parts(member=_AnyServed),
    "tables-only": Parts(tables_only=True),
    "restart-stream": Parts(restart_stream=True),
    "local-switch": Parts(local_switch=True),
    "done-max": Parts(decider=_DoneMax),
    "done-own": Parts(decider=_DoneOwn),
    "stale-reports": Parts(decider=_StaleReports),
    "not-halted": Parts(decider=_NotHalted),
    "top-is-fact": Parts(decider=_TopIsFact),
    "send-first": Parts(decider=_SendFirst),
    "no-compare": Parts(ledger=_NoCompare),
    "ghost-windows": Parts(core=_GhostWindows),
    "old-runs": Parts(core=_OldRuns),
    "survivors-refused": Parts(core=_SurvivorsRefused),
    "key-again": Parts(core=_KeyAgain),
}

AMBUSHED: dict[str, type[World]] = {"any-served": LeaverStops}
"""Faults that a random schedule hits in one case of tens of thousands, and where to look for them."""


def schedule_of(seed: int, name: str = "") -> World:
    """A schedule that may show the planted fault ``name``; "" = none is planted."""
    return AMBUSHED.get(name, World)(seed, PLANTED.get(name))
