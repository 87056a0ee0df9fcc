"""The rebalancer core of a job whose ranks come and go: each membership is a run of its own to the switch protocol.

What is published, acknowledged and viewed belongs to one run; a membership's run follows another without the exchange
of tokens, for the rebalancer itself has decided it. Statuses of a membership that is over become nothing; its windows
are still stored for members that live, or have left, and refused for those that were taken for dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.receipt import window_row
from evenroute.dist.protocol.store import job_row
from evenroute.dist.protocol.types import Outgoing, Peer, Phase
from evenroute.dist.protocol.view import RunView
from evenroute.dist.wire.membership import MembershipRecord
from evenroute.dist.wire.messages import Ack, Key, MessageError, RankStatus, RankWindow, Refusal
from evenroute.dist.wire.received import check_window

_VIEWS_KEPT = 8


class ElasticRebalancerCore(RebalancerCore):
    """``changing``: an announced change is under way; no placement is published before somebody serves in it."""

    changing = False
    outbox: list[Outgoing] = []  # noqa: RUF012 - replaced by `follow`
    _ledger: Ledger | None = None
    _earlier: dict[int, RunView]
    _removed: frozenset[int]

    def follow(self, ledger: Ledger) -> None:
        """The records of the job, which the membership core keeps."""
        self._ledger = ledger
        self._earlier = {}
        self.outbox = []
        self._note_removed()

    def _note_removed(self) -> None:
        records = [] if self._ledger is None else self._ledger.records
        numbers = {record.number: set(record.numbers) for record in records}
        gone: set[int] = set()
        for record in records:
            if record.kind == "death":
                gone |= numbers.get(record.prev, set()) - numbers[record.number]
        self._removed = frozenset(gone)

    def begin_life(self, fences: Iterable[int], now: float) -> bool:
        """Begin though not all ranks of the run were heard: some can't be any more. True if the life began."""
        return self._begin(now, fences)

    def take_outbox(self) -> list[Outgoing]:
        """Placements that the membership core has published, to be sent."""
        out, self.outbox = self.outbox, []
        return out

    def end(self, reason: str) -> None:
        """This life is over."""
        self._end(reason)

    def reserve_key(self) -> Key:
        """A key above all earlier ones, for the rows that a membership begins with."""
        self._published.version += 1
        return self.epoch, self._published.version

    def take_membership(self, record: MembershipRecord) -> None:
        """From here on the record's run is the current one."""
        self._note_removed()
        if self.view is not None and self.view.run == record.run:
            return
        if self.view is not None:
            self._earlier[self.view.run] = self.view
            for old in list(self._earlier)[:-_VIEWS_KEPT]:
                del self._earlier[old]
        self._adopt(record.run, record.shape)
        self._published.newest = self._published.wire = None  # what it begins with is the ranks' to say

    def align(self, fact: MembershipRecord | None, head: MembershipRecord | None) -> None:
        """A life that begins may have heard ranks that are thought dead: the last death record is a fact, and only a
        change after it may serve meanwhile."""
        if fact is None or head is None or (self.view is not None and self.view.run in (fact.run, head.run)):
            return
        known = self._ledger is not None and self.view is not None
        if self.view is None or (known and any(one.run == self.view.run for one in self._ledger.records)):  # type: ignore[union-attr]
            self.take_membership(fact)

    def _take_newest_of_store(self) -> None:
        super()._take_newest_of_store()
        head = None if self._ledger is None else self._ledger.head
        if head is not None and self._published.key < head.key:
            self._published.newest = self._published.wire = None  # of an earlier membership

    # ------------------------------------------------------------------------------------- receipt

    def _receive_status(self, peer: Peer, status: RankStatus, now: float) -> list[Outgoing]:
        if self._is_over(status.run):
            return []
        return super()._receive_status(peer, status, now)

    def _is_over(self, run: int) -> bool:
        """Whether a run is one of the job's that nobody is to be led in now: over, or decided and not serving yet."""
        records = [] if self._ledger is None else self._ledger.records
        if all(record.run != run for record in records):
            return False
        if self.view is not None and any(record.run == self.view.run for record in records):
            return run != self.view.run
        # A life that begins: a change may have come to serve without its knowledge.
        head = records[-1]
        before = self._ledger.find(head.prev) if self._ledger is not None and head.kind == "change" else None
        return run not in (head.run, None if before is None else before.run)

    def _receive_windows(self, windows: Sequence[tuple[Peer, RankWindow]]) -> list[Outgoing]:
        if self.phase is not Phase.SERVING or self.view is None or self._ledger is None:
            return super()._receive_windows(windows)
        records = {record.run: record for record in self._ledger.records}
        current = [one for one in windows if one[1].run == self.view.run or one[1].run not in records]
        out = super()._receive_windows(current) if current else []
        for peer, window in windows:
            if window.run != self.view.run and window.run in records:
                out += self._receive_earlier(peer, window, records[window.run])
        return out

    def _receive_earlier(self, peer: Peer, window: RankWindow, record: MembershipRecord) -> list[Outgoing]:
        """A window of a membership that is over."""
        try:
            check_window(window, record.shape)
        except MessageError as error:
            return self._refuse_window(peer, window, str(error))
        number = record.numbers[window.rank]
        if number in self._removed:
            return self._refuse_window(
                peer, window, f"member {number} was taken for dead; its stream is closed"
            )
        if not self._speaks_for(peer, window, number):
            self.counters.windows_ignored += 1
            return []
        row = window_row(window, record.shape)
        about = {"epoch": self.epoch, "now": self._stamp()}
        self._store.set_job(window.run, job_row(record.shape), **about)  # type: ignore[arg-type]
        (receipt,) = self._store.add_windows(
            [row],
            epoch=self.epoch,
            now=self._stamp(),
            keep_rank_detail=self.keep_rank_detail,
        )
        if receipt.stored:
            self.counters.windows_stored += 1
            self.counters.windows_missing += receipt.missing_before
            if self.windows.loads is not None:
                self.windows.loads.add_counts(row.counts)
        else:
            self.counters.windows_duplicate += 1
        return [Outgoing(peer, Ack(window.run, self.epoch, window.seq))]

    def _refuse_window(self, peer: Peer, window: RankWindow, reason: str) -> list[Outgoing]:
        self.counters.windows_rejected += 1
        return [Outgoing(peer, Refusal(window.run, self.epoch, "window", window.seq, reason))]

    def _speaks_for(self, peer: Peer, window: RankWindow, number: int) -> bool:
        """By the connection it had then, or as the rank that it is now."""
        before = self._earlier.get(window.run)
        if before is not None and before.speaks_for(peer, window.rank):
            return True
        assert self._ledger is not None
        assert self.view is not None
        run = self.view.run
        now = next((record for record in self._ledger.records if record.run == run), None)
        if now is None or number not in now.numbers:
            return False
        return self.view.speaks_for(peer, now.numbers.index(number))

    # ---------------------------------------------------------------------------------- placements

    def may_publish(self, now: float) -> bool:
        """See `RebalancerCore`; not while an announced change is under way."""
        return not self.changing and super().may_publish(now)
