"""A job that the store does not know: it starts, or the store was lost."""

from __future__ import annotations

from collections.abc import Callable

from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.types import Heard, MemberOutgoing, Peer
from evenroute.dist.protocol.types import Phase
from evenroute.dist.wire.membership import MemberReport, MembershipRecord, RecordRequest


class Strangers:
    """A membership is taken up once all of its members report it, led by this epoch: then no other can be meant.

    Until then no rank is replaced: with one of them dead the job waits, and ends as it would without a rebalancer.
    """

    def __init__(
        self,
        core: ElasticRebalancerCore,
        ledger: Ledger,
        taken_up: Callable[[MembershipRecord, dict[int, Heard]], list[MemberOutgoing]],
        stamp: Callable[[], float],
    ) -> None:
        self._core = core
        self._ledger = ledger
        self._taken_up = taken_up
        self._stamp = stamp
        self._candidate: MembershipRecord | None = None
        self._heard: dict[int, Heard] = {}

    def hear(self, peer: Peer, report: MemberReport, now: float) -> list[MemberOutgoing]:
        """A report of a job that is not the ledger's. Raises StoreError and StaleEpochError."""
        if self._core.phase is not Phase.SERVING or self._core.view is None:
            return []
        self._heard[report.me.number] = Heard(report, peer, now)
        record = self._candidate
        known = record is not None and (record.job, record.number) == (report.job, report.installed)
        if record is None or not known or report.fence != self._core.epoch:
            return [MemberOutgoing(peer, RecordRequest(self._core.epoch, report.job))]
        return self.offer(record)

    def offer(self, record: MembershipRecord) -> list[MemberOutgoing]:
        """A member sends the record that it has installed."""
        view, head = self._core.view, self._ledger.head
        if self._core.phase is not Phase.SERVING or view is None or view.run != record.run:
            return []
        if head is not None and head.job == record.job:
            return []
        self._candidate = record
        for member in record.members:
            known = self._heard.get(member.number)
            if known is None or known.report.me != member or known.report.job != record.job:
                return []
            report = known.report
            if report.heard != record.number or report.halted or report.fence != self._core.epoch:
                return []
        if not self._ledger.add(record, epoch=self._core.epoch, now=self._stamp()):
            return []
        heard, self._heard = self._heard, {}
        self._core.follow(self._ledger)
        return self._taken_up(record, heard)
