"""A member's side of the membership rules: what it reports, when it halts, and what a record means for it. No I/O, no
clock, no torch.

The driver holds ONE lock around each call, the same as for the rank core (`protocol.rank`): `receive`, `tick` and
`halt` come from the member's thread too, the rest from the forward thread. Rules, and the promises that they keep:
docs/membership.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evenroute.dist.membership.hearing import HearingMember
from evenroute.dist.membership.rows import Rows, covers, kept_rows, refilled
from evenroute.dist.membership.types import Applied, HaltedError, Outcome, columns_array
from evenroute.dist.protocol.agreement import Switch
from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.wire.membership import CaughtVote, MembershipRecord

_VOTES_KEPT = 4


class MemberCore(HearingMember):
    """One process, in its forward thread; what it hears and says: `HearingMember`."""

    def begin(self, step: int) -> None:
        """A step begins. Raises HaltedError."""
        self.check()
        self.attempts.append((self.installed, step))

    def check(self) -> None:
        """Raises HaltedError once the member has halted."""
        if self.halted or self.ended is not None:
            raise HaltedError(self.ended or self.trouble)

    def complete(self, step: int) -> None:
        """The step's collectives are complete here. Raises HaltedError: then it was not complete in time."""
        self.check()
        self.completed = step

    def decided(self, vote: int, vector: Sequence[int]) -> None:
        """Before a vote is decided: it is noted for those who have not got its result. Raises HaltedError."""
        self.check()
        self._note_vote(vote, vector)

    def _note_vote(self, vote: int, vector: Sequence[int]) -> None:
        number = self.installed
        self.votes[number] = CaughtVote(number, vote, tuple(int(value) for value in vector))
        for old in sorted(self.votes)[:-_VOTES_KEPT]:
            del self.votes[old]

    def confirm(self, step: int) -> list[Outcome]:
        """A collective that every member posts after ``step`` is complete here: steps up to it count."""
        done = [one for one in self.attempts if one[1] <= step]
        self.attempts = [one for one in self.attempts if one[1] > step]
        return [Outcome(number, step, True) for number, step in done]

    def formed(self, number: int) -> None:
        """The groups of the change ``number`` are there (joiners: and their columns filled)."""
        if self.offered is not None and self.offered.number == number and not self.halted:
            self.ready, self._due = number, True

    def form_failed(self, number: int) -> None:
        """The groups of a change could not be formed: a joiner asks again, a member serves on."""
        if self.offered is not None and self.offered.number == number:
            self.offered = None
            self.give_up()

    def switch(self, number: int, rows: Rows, num_experts: int) -> Rows | None:
        """The vote says that all go on in the change ``number``; ``rows``: live now. Its rows, or None: refused (the
        same on all), the membership stays."""
        assert self.record is not None
        record = self._offers.pop(number)
        added = columns_array(record)
        found = kept_rows(rows, self.record.numbers, record.numbers, added)
        if not covers(found, num_experts):
            self.refused, self._due = number, True
            self.go = self.go if self.go > number else 0
            if self.offered is record:
                self.offered, self.ready = None, 0
            return None
        self.record, self.serving, self.offered, self.ready, self.go = record, False, None, 0, 0
        self._offers.clear()
        if self.me.number not in record.numbers:
            self.left = number
        self._due = True
        return found

    def joined(self, record: MembershipRecord, completed: int) -> None:
        """A joiner has the rows of ``record`` and stands with the others behind step ``completed``."""
        self.record, self.seen, self.completed = record, record.number, completed
        self.offered, self.ready, self._due = None, 0, True
        self._pass_changes()
        if self._pending:
            self.halt(f"membership {self._pending[0].number} follows")

    def served(self) -> None:
        """A collective of the installed membership is complete here. Raises HaltedError."""
        self.check()
        self.serving, self.trouble, self.missing, self._due = True, "", (), True

    def apply(self, rank: RankCore | None, rows: Rows) -> Applied | None:
        """The next record that waits, of kind "death"; ``rank``: the core of the membership installed, ``rows``: its
        live rows ``[L, P]`` (with ``rank`` of an earlier one if that could not be served). None: this member has
        ended."""
        assert self.record is not None
        record = self._pending.pop(0)
        self.seen, self._due = record.number, True
        if not self.halted:
            self.halt(f"membership {record.number} follows")
        if self.me.number not in record.numbers:
            self.attempts = []  # it is no survivor: it neither delivers nor declares
            self.ended = (
                f"member {self.me.number} is not in membership {record.number}: it was taken for dead or could not be "
                "reached"
            )
            return None
        applied = Applied(record, rows, record.key)
        for caught in record.catch:
            rows = self._catch_up(caught, rank, rows, applied)
        assert self.installed == record.prev, (
            f"membership {record.number} follows {record.prev}, not {self.installed}"
        )
        for number, step in self.attempts:
            applied.outcomes.append(Outcome(number, step, step <= record.done and step <= self.completed))
        self.attempts = []
        found = kept_rows(rows, self.record.numbers, record.numbers)
        num_experts = record.shape.num_logical_experts
        if not covers(found, num_experts):
            found = refilled(found, num_experts, len(record.members))
        applied.rows = found
        self.record, self.completed = record, record.done
        self.halted = self.serving = False
        self.ready = self.go = self.left = 0
        self.offered = None
        self._offers.clear()
        self._pass_changes()
        if self._pending:
            self.halt(f"membership {self._pending[0].number} follows")
        return applied

    def _catch_up(self, caught: CaughtVote, rank: RankCore | None, rows: Rows, applied: Applied) -> Rows:
        """Decide a vote that others had decided and this member had only posted."""
        if rank is None or caught.membership != self.installed or rank.state.membership != self.installed:
            return rows
        if not rank.outstanding(caught.vote):
            return rows
        self._note_vote(caught.vote, caught.vector)
        actions = rank.decide(caught.vote, caught.vector)
        applied.actions += [action for action in actions if not isinstance(action, Switch)]
        rows = np.stack([row.slots for row in rank.state.live_rows])
        for action in actions:
            if isinstance(action, Switch):
                switched = self.switch(action.number, rows, rank.job.num_logical_experts)
                rows = rows if switched is None else switched
        return rows
