"""The rebalancer's side of the membership rules: it alone decides who is in the job. No I/O, no clock.

Driver: `receive` for each message, `tick` often; what is returned is sent. Every record is kept in the store behind the
last one before anybody hears of it; whatever is repeated is the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from evenroute.dist.membership.changes import Changes
from evenroute.dist.membership.death import death_record, shape_of, too_few, top_of
from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.take_up import Strangers
from evenroute.dist.membership.types import Heard, MemberLimits, MemberOutgoing, Peer
from evenroute.dist.protocol.store import StaleEpochError, StoreError
from evenroute.dist.protocol.types import Notice, Phase
from evenroute.dist.wire.membership import (
    Gone,
    Member,
    MemberOrder,
    MemberReport,
    MembershipRecord,
    MemberUp,
    RecordMessage,
)


class MembershipCore:
    """One life. ``heard``: members by number; ``joiners``: processes that ask to join, by identity.

    ``served``: memberships that somebody serves in, as far as this life has heard. ``end``: the job can't go on.
    """

    def __init__(
        self,
        core: ElasticRebalancerCore,
        ledger: Ledger,
        limits: MemberLimits,
        *,
        random_bits: Callable[[int], int],
        stamp: Callable[[], float],
    ) -> None:
        self.core = core
        self.ledger = ledger
        self.limits = limits
        self.heard: dict[int, Heard] = {}
        self.joiners: dict[int, Heard] = {}
        self.served: set[int] = set()
        self.void: set[int] = set()
        self.end = ""
        self.notices: deque[Notice] = deque(maxlen=100)
        self.halting_since: float | None = None
        self.failures = 0  # death records in a row that nobody came to serve in
        self.deaths = 0
        self.changes = Changes(self)
        self._random_bits = random_bits
        self._stamp = stamp
        self._epoch = 0
        self._seqs: dict[int, int] = {}  # of the last report, by identity
        self._gone: set[int] = set()
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
        record, head = self.ledger.find(number), self.head
        self.served.add(number)
        if record is None or head is None or number != head.number:
            return []
        self.failures = 0
        self.core.take_membership(record)
        self.notices.append(Notice("membership", f"membership {number} serves: {len(record.members)} ranks"))
        return self._orders()

    # ------------------------------------------------------------------------------------- decisions

    @property
    def head(self) -> MembershipRecord | None:
        """The highest record; None before there is an elastic job."""
        return self.ledger.head

    def base(self) -> MembershipRecord:
        """What the next record is built on: a change only once somebody is known to serve in it."""
        record = self.head
        assert record is not None
        while record.kind == "change" and record.number not in self.served:
            if (before := self.ledger.find(record.prev)) is None:
                break
            record = before
        return record

    def concerned(self) -> list[int]:
        """Numbers of the members of the head and of its prev."""
        assert self.head is not None
        before = self.ledger.find(self.head.prev)
        return list(dict.fromkeys((*self.head.numbers, *(() if before is None else before.numbers))))

    def got(self) -> dict[int, MemberReport]:
        """Reports that count: halted, about the head, heard in this life."""
        if self.head is None:
            return {}
        number = self.head.number
        reports = {one: self.heard[one].report for one in sorted(self.heard)}
        known = {record.number for record in self.ledger.records}
        return {
            one: r for one, r in reports.items() if r.halted and r.seen == number and r.installed in known
        }

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

    def _waits_for(self, top: MembershipRecord, got: dict[int, MemberReport], now: float) -> list[int]:
        """Members that may still report."""
        assert self.halting_since is not None
        waiting = []
        for member in top.members:
            if member.number in got or member.identity in self._gone:
                continue
            known = self.heard.get(member.number)
            spoke = self.halting_since if known is None else max(known.at, self.halting_since)
            if now - spoke < self.limits.silent_s and now - self.halting_since < self.limits.busy_s:
                waiting.append(member.number)
        return waiting

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

    def _may_serve_without(self, top: MembershipRecord, got: dict[int, MemberReport]) -> bool:
        """Whether all who reported are to leave by the change at the head, and have voted for it: those who stay may
        serve in it by now. One of them, halted before it, would prove that they don't."""
        assert self.head is not None
        number = self.head.number
        if self.head.kind != "change" or top is self.head:
            return False
        return all(one not in self.head.numbers and report.go >= number for one, report in got.items())

    def _fit(self, top: MembershipRecord, got: dict[int, MemberReport]) -> list[int]:
        """Members that reported and can take their place; one less where they have failed to form too often."""
        numbers = [one for one in top.numbers if one in got]
        fit = [one for one in numbers if not got[one].unfit]
        if len(fit) == len(numbers) and self.failures >= self.limits.failures and len(fit) > 1:
            self.failures = 0
            blame = Counter(one for report in got.values() for one in report.missing if one in fit)
            fit.remove(max(fit, key=lambda one: (blame[one], fit.index(one))))
        return fit

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

    # --------------------------------------------------------------------------------------- orders

    def _order(self, number: int) -> list[MemberOutgoing]:
        known, head = self.heard[number], self.head
        if head is None or not self.core.epoch:
            return []
        installed = known.report.installed
        order = MemberOrder(
            job=head.job,
            epoch=self.core.epoch,
            head=head.number,
            halt=head.number if self.halting_since is not None else 0,
            go=head.number if self.changes.go == head.number else 0,
            served=installed if installed in self.served else 0,
            end=self.end,
        )
        return [MemberOutgoing(known.peer, order)]

    def _orders(self) -> list[MemberOutgoing]:
        return self.orders(self.concerned())

    def orders(self, numbers: Iterable[int]) -> list[MemberOutgoing]:
        """Where the job stands, for these members as far as they were heard."""
        return [one for number in numbers if number in self.heard for one in self._order(number)]
