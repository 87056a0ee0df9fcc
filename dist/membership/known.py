"""What the rebalancer knows of a job's members in one life, and whom the next record may count on. No I/O, no clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from evenroute.dist.membership.changes import Changes
from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.types import Heard, MemberLimits, MemberOutgoing
from evenroute.dist.protocol.types import Notice
from evenroute.dist.wire.membership import MemberOrder, MemberReport, MembershipRecord


class KnownMembers:
    """One life. ``heard``: members by number; ``joiners``: processes that ask to join, by identity.

    ``served``: memberships that somebody serves in, as far as this life has heard. ``end``: the job can't go on.
    """

    changes: Changes

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
        self._random_bits = random_bits
        self._stamp = stamp
        self._gone: set[int] = set()

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
