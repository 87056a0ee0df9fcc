"""What a member hears and says: the half of `MemberCore` that its own thread drives. No I/O, no clock, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from evenroute.dist.membership.types import joiners_of
from evenroute.dist.wire.membership import (
    CaughtVote,
    Member,
    MemberDown,
    MemberOrder,
    MemberReport,
    MembershipRecord,
    MemberUp,
    RecordMessage,
    RecordRequest,
)


class HearingMember:
    """One process. ``record``: the membership it has installed, None for one that asks to join.

    ended      why it takes no part any more, None = it does
    finished   it has left as it should: what it computed counts
    offered    a change that it may prepare for, None = none
    """

    def __init__(
        self,
        me: Member,
        record: MembershipRecord | None = None,
        *,
        resend_s: float = 0.25,
        heartbeat_s: float = 1.0,
    ) -> None:
        self.me = me
        self.record = record
        self.job = 0 if record is None else record.job
        self.fence = 0
        self.seen = 0 if record is None else record.number
        self.halted = False
        self.serving = False
        self.completed = -1 if record is None else record.done
        self.attempts: list[tuple[int, int]] = []
        self.votes: dict[int, CaughtVote] = {}
        self.offered: MembershipRecord | None = None
        self.ready = 0
        self.go = 0
        self.refused = 0
        self.left = 0
        self.ended: str | None = None
        self.finished = False
        self.leaving = False
        self.trouble = ""
        self.missing: tuple[int, ...] = ()
        self.unfit = False
        self._offer_order = (0, 0)
        self._offers: dict[
            int, MembershipRecord
        ] = {}  # of what is installed: votes under way may decide any of them
        self._pending: list[MembershipRecord] = []
        self._due = True
        self._seq = 0
        self._sent_at = 0.0
        self._resend_s = resend_s
        self._heartbeat_s = heartbeat_s

    @property
    def installed(self) -> int:
        """Number of the membership whose rows it has; 0 = none yet."""
        return 0 if self.record is None else self.record.number

    @property
    def heard(self) -> int:
        """The highest record received."""
        return self._pending[-1].number if self._pending else self.seen

    @property
    def pending(self) -> bool:
        """Whether `apply` has something to do."""
        return bool(self._pending)

    def receive(self, message: MemberDown, now: float) -> list[MemberUp]:
        """Take a message of the rebalancer. Returns what to send, in order."""
        if message.epoch < self.fence or self.ended is not None:
            return []
        if message.epoch > self.fence:
            self.fence, self._due = message.epoch, True
        match message:
            case RecordMessage():
                self._take(message.record)
            case MemberOrder():
                self._obey(message)
            case RecordRequest():
                self._due = True
                if self.record is not None and message.job == self.job:
                    return [self.record, *self.tick(now)]
        return self.tick(now)

    def _obey(self, order: MemberOrder) -> None:
        if order.job != self.job or self.record is None:
            return
        if order.end:
            self.ended = order.end
            return
        if order.halt >= self.seen and order.halt and not self.halted and not self.pending:
            self.halt("another member halted")
        if self.left and order.served == self.left:
            self.finished, self.ended = True, f"left the job as membership {self.left} serves"
            return
        if not self.halted and self.ready and self.go < order.go == self.ready:
            self.go = order.go

    def _take(self, record: MembershipRecord) -> None:
        if self.record is None:
            self._take_as_joiner(record)
        elif record.job == self.job and record.number == self.heard + 1:
            self._pending.append(record)
            self._pass_changes()
            if self._pending and not self.halted:
                self.halt(f"membership {self._pending[0].number} follows")
            self._due = True

    def _pass_changes(self) -> None:
        """An announced change is only noted: it counts once a vote says so."""
        while self._pending and self._pending[0].kind == "change":
            record = self._pending.pop(0)
            self.seen = record.number
            if (
                not self.halted and record.prev == self.installed
            ):  # else it follows one that others serve in by now
                self.offered, self.ready = record, 0
                self._offers[record.number] = record

    def _take_as_joiner(self, record: MembershipRecord) -> None:
        mine = next((one for one in joiners_of(record) if one.identity == self.me.identity), None)
        if self.job and record.job != self.job:
            return
        follows = self.offered is not None and record.prev == self.offered.number == self.ready
        if follows and self.me.number in record.numbers:
            if record.number == self.heard + 1:
                self._pending.append(record)  # others serve already in what this one is about to
            return
        order = (self.fence, record.number)  # after a lost store numbers may begin again
        if record.kind == "change" and mine is not None and order > self._offer_order:
            self.job, self.me, self.offered, self.ready = record.job, mine, record, 0
            self.seen, self._due, self._offer_order = record.number, True, order
        elif self.offered is not None and record.number > self.offered.number:
            self.give_up()

    def give_up(self) -> None:
        """A joiner whose change came to nothing asks again."""
        if self.record is None:
            self.refused = self.refused if self.offered is None else self.offered.number
            self.job, self.offered, self.ready, self.seen, self._due = 0, None, 0, 0, True
            self._pending = []

    def halt(self, trouble: str, missing: Sequence[int] = (), *, unfit: bool = False) -> None:
        """Nothing of this membership goes on. Final until the next record is applied."""
        if self.record is None:
            self.give_up()
            return
        if not self.halted:
            self.trouble = trouble[:500]
        self.halted, self.offered, self._due = True, None, True
        self.serving = False
        self.missing = tuple(missing) or self.missing
        self.unfit = self.unfit or unfit

    def tick(self, now: float) -> list[MemberUp]:
        """The report, if something changed or it is time."""
        every = self._resend_s if self.halted or self.offered is not None or self.left else self._heartbeat_s
        if self.ended is not None or not (self._due or now - self._sent_at >= every):
            return []
        self._due, self._sent_at = False, now
        self._seq += 1
        return [self.report()]

    def reconnected(self) -> None:
        """A connection is new: the report is due."""
        self._due = True

    def report(self) -> MemberReport:
        """All that this member is."""
        return MemberReport(
            job=self.job,
            me=self.me,
            fence=self.fence,
            seq=self._seq,
            installed=self.installed,
            seen=self.seen,
            heard=self.heard,
            halted=self.halted,
            serving=self.serving,
            completed=self.completed,
            votes=tuple(self.votes[one] for one in sorted(self.votes)),
            ready=self.ready,
            ready_run=self.offered.run if self.ready and self.offered is not None else 0,
            go=self.go,
            refused=self.refused,
            missing=self.missing,
            trouble=self.trouble if self.halted else "",
            unfit=self.unfit,
            leaving=self.leaving,
        )
