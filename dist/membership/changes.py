"""Announced changes: ranks that join and leave while the others serve. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.rows import columns_of, covers, joiner_columns, kept_rows, refilled
from evenroute.dist.membership.types import Heard, MemberLimits, MemberOutgoing, Peer
from evenroute.dist.protocol.types import PlacementInfo
from evenroute.dist.wire.membership import Member, MemberReport, MembershipRecord, RecordMessage
from evenroute.eplb.placement.placement import Placement


class Deciding(Protocol):
    """The part of the membership core that changes need."""

    core: ElasticRebalancerCore
    ledger: Ledger
    limits: MemberLimits
    heard: dict[int, Heard]
    joiners: dict[int, Heard]
    served: set[int]
    void: set[int]

    @property
    def head(self) -> MembershipRecord | None: ...
    def concerned(self) -> list[int]: ...
    def new_record(self, members: tuple[Member, ...], columns: bytes, text: str) -> MembershipRecord: ...
    def keep(self, record: MembershipRecord) -> bool: ...
    def orders(self, numbers: Iterable[int]) -> list[MemberOutgoing]: ...


class Changes:
    """One change at a time. ``wanted``: ranks that the operator wants, None = whoever comes. ``go``: the change that
    all are ready for, 0 = none."""

    def __init__(self, deciding: Deciding) -> None:
        self._all = deciding
        self.wanted: int | None = None
        self.go = 0
        self._since: float | None = None
        self._failed = 0  # the change that a joiner could not join

    @property
    def open(self) -> bool:
        """Whether a change is under way."""
        head, deciding = self._all.head, self._all
        if head is None or head.kind != "change":
            return False
        return head.number not in deciding.served and head.number not in deciding.void

    def dropped(self) -> None:
        """The change under way came to nothing."""
        self.go, self._since = 0, None
        self._all.core.changing = False

    def asked_again(self, report: MemberReport) -> None:
        """A joiner of the change under way could not join, and asks anew."""
        head = self._all.head
        if head is None or not self.open or report.refused != head.number:
            return
        if any(member.identity == report.me.identity for member in head.members):
            self._failed = head.number

    def stuck(self, now: float) -> bool:
        """Whether not all are ready for the change in its time: then all halt, and a record of those there follows."""
        if not self.open:
            return False
        self._since = now if self._since is None else self._since
        if self._failed == self._all.head.number:  # type: ignore[union-attr]
            return True
        return now - self._since >= self._all.limits.change_s

    def turn(self, now: float) -> list[MemberOutgoing]:
        """What is due: go for a change that all are ready for, or a new change."""
        if self.open:
            return self._advance(now)
        self._since = None
        head = self._all.head
        assert head is not None
        if head.kind == "change" and head.number in self._all.void:
            self._all.core.changing = False
        settled = head.number in self._all.served or (head.kind == "change" and head.number in self._all.void)
        if not settled:
            return []
        leavers = self._leavers()
        if leavers:
            return self._leave(leavers, now)
        self._all.core.changing = False
        return self._join(now)

    def _advance(self, now: float) -> list[MemberOutgoing]:
        head, heard = self._all.head, self._all.heard
        assert head is not None
        self._all.core.changing = True
        concerned = self._all.concerned()
        if self.go == head.number:
            return []
        if any(one not in heard or heard[one].report.ready_run != head.run for one in concerned):
            return []
        self.go = head.number
        return self._all.orders(concerned)

    # ---------------------------------------------------------------------------------------- join

    def _current(self) -> tuple[MembershipRecord, Placement] | None:
        """Whose ranks route with what now; None while not known or while a version is under way."""
        core, records = self._all.core, self._all.ledger.records
        live = core.live_placement()
        if core.view is None or live is None:
            return None
        run = core.view.run
        record = next((one for one in records if one.run == run), None)
        return None if record is None else (record, live)

    def _join(self, now: float) -> list[MemberOutgoing]:
        current = self._current()
        waiting = [
            one
            for one in self._all.joiners.values()
            if now - one.at < 4 * max(1.0, self._all.limits.silent_s)
        ]
        if current is None or not waiting:
            return []
        record, live = current
        known = {member.identity for member in record.members}
        waiting = [one for one in waiting if one.report.me.identity not in known]
        room = len(waiting) if self.wanted is None else max(0, self.wanted - len(record.members))
        waiting = sorted(waiting, key=lambda one: (one.report.me.node, one.report.me.identity))[:room]
        if not waiting:
            return []
        first = self._numbers()
        joined = tuple(
            Member(
                first + place,
                one.report.me.identity,
                one.report.me.host,
                one.report.me.port,
                one.report.me.node,
            )
            for place, one in enumerate(waiting)
        )
        loads = self._all.core.loads()
        shape = (live.num_layers, live.num_logical_experts)
        counts = np.zeros(shape) if loads is None else loads.counts.astype(np.float64)
        columns = joiner_columns(counts, live.physical_to_logical, len(joined), record.num_local_slots)
        names = ", ".join(str(one.number) for one in joined)
        head = self._all.head
        assert head is not None
        text = f"membership {head.number + 1}: member{'s' if len(joined) > 1 else ''} {names} join"
        made = self._all.new_record((*record.members, *joined), columns.astype("<i4").tobytes(), text)
        return self._begin(made, [one.peer for one in waiting])

    def _numbers(self) -> int:
        """The next number that no process of this job ever had."""
        return 1 + max(number for record in self._all.ledger.records for number in record.numbers)

    def _begin(self, record: MembershipRecord, joiners: list[Peer]) -> list[MemberOutgoing]:
        if not self._all.keep(record):
            return []
        self._all.core.changing = True
        self.go, self._since = 0, None
        message = RecordMessage(self._all.core.epoch, record)
        heard = self._all.heard
        peers = [heard[one].peer for one in self._all.concerned() if one in heard]
        return [MemberOutgoing(peer, message) for peer in [*peers, *joiners]]

    # --------------------------------------------------------------------------------------- leave

    def _leavers(self) -> list[int]:
        """Members that are to leave: those that ask to, then the last ones above what is wanted."""
        current = self._current()
        if current is None:
            return []
        record, _ = current
        heard = self._all.heard
        asked = [one for one in record.numbers if one in heard and heard[one].report.leaving]
        above = 0 if self.wanted is None else len(record.members) - len(asked) - self.wanted
        rest = [one for one in record.numbers if one not in asked]
        return asked + (rest[-above:] if above > 0 else [])

    def _leave(self, leavers: list[int], now: float) -> list[MemberOutgoing]:
        """First a placement in which the others hold every expert, live in all layers; then the change."""
        current = self._current()
        assert current is not None
        record, live = current
        stay = tuple(one for one in record.members if one.number not in leavers)
        experts, core = live.num_logical_experts, self._all.core
        if len(stay) * record.num_local_slots < experts:
            return []
        core.changing = True  # no plan may uncover what is covered now
        numbers = [one.number for one in stay]
        kept = kept_rows(live.physical_to_logical, record.numbers, numbers)
        if covers(kept, experts):
            if not core.settled():
                return []
            head = self._all.head
            assert head is not None
            who = f"member{'s' if len(leavers) > 1 else ''} {', '.join(map(str, leavers))}"
            text = f"membership {head.number + 1}: {who} leave"
            return self._begin(self._all.new_record(stay, b"", text), [])
        filled = columns_of(refilled(kept, experts, len(stay)), len(stay))
        rows = columns_of(live.physical_to_logical, len(record.members)).copy()
        for place, number in enumerate(numbers):
            rows[:, record.numbers.index(number)] = filled[:, place]
        self._publish(Placement(rows.reshape(len(rows), -1), experts, live.topology), live, now)
        return []

    def _publish(self, placement: Placement, live: Placement, now: float) -> None:
        core = self._all.core
        core.changing = False
        try:
            if core.may_publish(now):
                moves = live.moved_slots(placement)
                info = PlacementInfo(moves, "hand-over", "the ranks that stay hold every expert")
                core.outbox += core.publish(placement, info, now)
        finally:
            core.changing = True
