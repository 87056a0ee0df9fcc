"""The rebalancer's side of the membership rules: it alone decides who is in the job. No I/O, no clock.

Driver: `receive` for each message, `tick` often; what is returned is sent. Every record is kept in the store behind the
last one before anybody hears of it; whatever is repeated is the same.
"""

from __future__ import annotations

from collections.abc import Callable

from evenroute.dist.membership.changes import Changes
from evenroute.dist.membership.death import death_record, shape_of, too_few, top_of
from evenroute.dist.membership.known import KnownMembers
from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.take_up import Strangers
from evenroute.dist.membership.types import Heard, MemberLimits, MemberOutgoing, Peer
from evenroute.dist.protocol.store import StaleEpochError, StoreError
from evenroute.dist.protocol.types import Notice, Phase
from evenroute.dist.wire.membership import (
    Gone,
    Member,
    MemberReport,
    MembershipRecord,
    MemberUp,
    RecordMessage,
)


class MembershipCore(KnownMembers):
    """One life: it hears, and decides; what it knows: `KnownMembers`."""

    def __init__(
        self,
        core: ElasticRebalancerCore,
        ledger: Ledger,
        limits: MemberLimits,
        *,
        random_bits: Callable[[int], int],
        stamp: Callable[[], float],
    ) -> None:
        super().__init__(core, ledger, limits, random_bits=random_bits, stamp=stamp)
        self.changes = Changes(self)
        self._epoch = 0
        self._seqs: dict[int, int] = {}  # of the last report, by identity
        self._strangers = Strangers(core, ledger, self._taken_up, stamp)
        core.follow(ledger)

    # ------------------------------------------------------------------------------------- receipt

    def receive(self, peer: Peer, message: MemberUp, now: float) -> list[MemberOutgoing]:
        """Take one message. Returns what to send, in order."""
        match message:
            case MemberReport():
                return self._guarded(lambda: self._report(peer, message, now))
            case MembershipRecord():
                return self._guarded(lambda: self._strangers.offer(message))
            case Gone():
                self._gone.add(message.identity)
                self.joiners.pop(message.identity, None)
        return self.tick(now)

    def tick(self, now: float) -> list[MemberOutgoing]:
        """What is due by time."""
        return self._guarded(lambda: self._turn(now))

    def _guarded(self, act: Callable[[], list[MemberOutgoing]]) -> list[MemberOutgoing]:
        if self.core.phase is Phase.ENDED:
            return []
        try:
            self._catch_up()
            return act()
        except StaleEpochError as error:
            self.core.end(str(error))
        except StoreError as error:
            self.core.counters.store_errors += 1
            self.notices.append(Notice("store", f"membership not kept: {error}"))
        return []

    def _catch_up(self) -> None:
        """Until this life has its epoch, the one before may still have written."""
        if self.core.epoch != self._epoch:
            self.ledger.load()
            self.core.follow(self.ledger)
            self._epoch = self.core.epoch
            facts = [record for record in self.ledger.records if record.kind != "change"]
            self.core.align(facts[-1] if facts else None, self.head)

    def _report(self, peer: Peer, report: MemberReport, now: float) -> list[MemberOutgoing]:
        if report.seq < self._seqs.get(report.me.identity, 0):
            return []  # overtaken
        self._seqs[report.me.identity] = report.seq
        if report.job == 0:
            self.joiners[report.me.identity] = Heard(report, peer, now)
            self.changes.asked_again(report)
            return self._turn(now)
        if self.head is None or report.job != self.head.job:
            return self._strangers.hear(peer, report, now)
        if not self._is_member(report):
            return []
        number = report.me.number
        if self.core.phase is Phase.WAITING and report.seen > self.head.number:
            self.ledger.load()
        self.joiners.pop(report.me.identity, None)
        self.heard[number] = Heard(report, peer, now)
        out = [
            MemberOutgoing(peer, RecordMessage(self.core.epoch, record))
            for record in self.ledger.records
            if self.core.epoch and (record.number > report.heard or self._is_other(report, record))
        ]
        if report.refused == self.head.number and self.head.kind == "change":
            self._give_up_change("it would have left an expert without a slot")
        if report.serving and report.installed not in self.served:
            out += self._is_served(report.installed, now)
        return [*out, *self._order(number), *self._turn(now)]

    def _is_member(self, report: MemberReport) -> bool:
        """Of some record, with the identity that it has there: nobody else speaks for it."""
        return any(one == report.me for record in self.ledger.records for one in record.members)

    def _is_other(self, report: MemberReport, record: MembershipRecord) -> bool:
        """A joiner may stand by a record of a store that was lost, with the same number."""
        return (
            record is self.head
            and not report.installed
            and bool(report.ready)
            and report.ready_run != record.run
        )

    def _taken_up(self, record: MembershipRecord, heard: dict[int, Heard]) -> list[MemberOutgoing]:
        self.heard, self.served = heard, {record.number}
        text = f"membership {record.number} taken up: {len(record.members)} ranks"
        self.notices.append(Notice("membership", text))
        return self._orders()

    def _is_served(self, number: int, now: float) -> list[MemberOutgoing]:
        record = self.ledger.find(number)
        self.served.add(number)
        if record is None or record is not self.base():
            return []
        self.failures = 0
        self.core.take_membership(record)
        self.notices.append(Notice("membership", f"membership {number} serves: {len(record.members)} ranks"))
        return self._orders()

    # ------------------------------------------------------------------------------------- decisions

    def _turn(self, now: float) -> list[MemberOutgoing]:
        head = self.head
        if head is None or self.end:
            return []
        if self.core.phase is Phase.WAITING and not self._begin_life(now):
            return []
        out: list[MemberOutgoing] = []
        if self.halting_since is None and (self.got() or self.changes.stuck(now)):
            self.halting_since = now
            out += self._orders()
        if self.halting_since is not None:
            return [*out, *self._decide(now)]
        return [*out, *self.changes.turn(now)]

    def _begin_life(self, now: float) -> bool:
        """A dead rank can't report to a life that begins; with the job's records in the store, those that halted do."""
        head = self.head
        assert head is not None
        reports = {one: known.report for one, known in self.heard.items()}
        if not any(report.halted for report in reports.values()):
            self.halting_since = None
            return False
        self.halting_since = now if self.halting_since is None else self.halting_since
        if self._waits_for(head, reports, now):
            return False
        self.halting_since = None
        return self.core.begin_life((report.fence for report in reports.values()), now)

    def _decide(self, now: float) -> list[MemberOutgoing]:
        """The death record, once everybody that lives has reported."""
        got, head = self.got(), self.head
        if not got or head is None:
            return []
        top = top_of(self.ledger, got)
        if self._waits_for(top, got, now) or self._may_serve_without(top, got):
            return []
        numbers = self._fit(top, got)
        if not numbers:
            return self._end_job("no rank is left whose source gives it its experts")
        number, run = head.number + 1, self._random_bits(62) or 1
        record = death_record(
            self.ledger, top, numbers, got, number=number, run=run, key=self.core.reserve_key()
        )
        if record is None:
            return self._end_job(too_few(top, len(numbers)))
        if not self.ledger.add(record, epoch=self.core.epoch, now=self._stamp()):
            return []
        self.deaths += len(top.members) - len(record.members)
        self.failures += 1
        self.halting_since = None
        self.core.take_membership(record)
        self.changes.dropped()
        self.notices.append(Notice("membership", record.text))
        listeners = dict.fromkeys((*self.concerned(), *top.numbers, *got))
        return [
            MemberOutgoing(self.heard[one].peer, RecordMessage(self.core.epoch, record))
            for one in listeners
            if one in self.heard
        ]

    def new_record(self, members: tuple[Member, ...], columns: bytes, text: str) -> MembershipRecord:
        """A record of kind "change" behind the head."""
        assert self.head is not None
        base = self.base()
        return MembershipRecord(
            job=base.job,
            number=self.head.number + 1,
            prev=base.number,
            kind="change",
            run=self._random_bits(62) or 1,
            key=self.core.reserve_key(),
            members=members,
            shape=shape_of(base, members),
            columns=columns,
            text=text,
        )

    def keep(self, record: MembershipRecord) -> bool:
        """Keep a record of kind "change"."""
        if not self.ledger.add(record, epoch=self.core.epoch, now=self._stamp()):
            return False
        self.notices.append(Notice("membership", record.text))
        return True

    def _give_up_change(self, why: str) -> None:
        assert self.head is not None
        if self.head.number not in self.void:
            self.void.add(self.head.number)
            self.changes.dropped()
            self.notices.append(Notice("membership", f"membership {self.head.number} is given up: {why}"))

    def _end_job(self, text: str) -> list[MemberOutgoing]:
        self.end = text
        self.notices.append(Notice("membership", f"the job ends: {text}"))
        return self._orders()
