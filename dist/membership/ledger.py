"""The membership records of a job as the rebalancer's store keeps them: each behind the last one, or not at all."""

from __future__ import annotations

from typing import Protocol

from evenroute.dist.wire.membership import MembershipRecord, record_from_text, record_to_text

MEMBERSHIP_EVENT = "membership"
"""Kind of the events that hold a record, as JSON."""


class MembershipStore(Protocol):
    """The part of the history store that the ledger needs."""

    def events_of(self, kind: str) -> list[str]:
        """Texts of all events of a kind, oldest first."""

    def add_event_after(self, kind: str, text: str, after: str | None, *, epoch: int, now: float) -> bool:
        """In one transaction: note an event if the last one of its kind has the text ``after`` (None = there is none).
        False if it has not. Raises StaleEpochError and StoreError."""


class Ledger:
    """The newest job's records, oldest first; empty before there is an elastic job."""

    def __init__(self, store: MembershipStore) -> None:
        self._store = store
        self.records: list[MembershipRecord] = []
        self._last: str | None = None
        self.load()

    def load(self) -> None:
        """Read what the store has. Raises StoreError; MessageError for a record that it can't have kept."""
        texts = self._store.events_of(MEMBERSHIP_EVENT)
        self._last = texts[-1] if texts else None
        records = [record_from_text(text) for text in texts]
        self.records = [record for record in records if record.job == records[-1].job] if records else []

    @property
    def head(self) -> MembershipRecord | None:
        """The highest record."""
        return self.records[-1] if self.records else None

    def find(self, number: int) -> MembershipRecord | None:
        """The record with this number."""
        first = self.records[0].number if self.records else 0
        place = number - first
        return self.records[place] if 0 <= place < len(self.records) else None

    def add(self, record: MembershipRecord, *, epoch: int, now: float) -> bool:
        """Keep a record behind the last one; False where the store has another one there."""
        text = record_to_text(record)
        if not self._store.add_event_after(MEMBERSHIP_EVENT, text, self._last, epoch=epoch, now=now):
            self.load()
            return False
        self._last = text
        if self.records and self.records[-1].job != record.job:
            self.records = []
        self.records.append(record)
        return True
