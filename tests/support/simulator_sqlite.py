"""The production store (SQLite) inside the simulator, with the record that the checks need."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenroute.dist.protocol.store import RankWindowRow, Receipt, StoreError
from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.store.writer import HistoryStore
from support.failing_connection import FailingConnection
from support.simulator_history import History, SealRecord, WriteRecord

_FAILURES = 0.1


class SqliteSimStore(HistoryStore):
    """As `SimStore`: ``contents``, ``failing``, ``missing`` and a record of all writes, over a file of its own."""

    def __init__(self, number: int, history: History, job: JobShape) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="evenroute-simulator-")
        self.failing = False
        super().__init__(Path(self._folder.name) / "store.db", background_checkpoint=True)
        self.number = number
        self.contents: set[tuple[int, int, int]] = set()
        self._history = history

        self._draws = random.Random(number)
        self._failing_connection = FailingConnection(self._connection)
        self._connection = self._failing_connection  # type: ignore[assignment]

    @contextmanager
    def _transaction(self, epoch: int | None) -> Iterator[Any]:
        if getattr(self, "failing", False):
            raise StoreError("store: disk full")
        failing = getattr(self, "_failing_connection", None)
        if failing is not None:
            # The disk is full at any statement of a transaction, BEGIN and COMMIT among them.
            failing.heal()
            if self._draws.random() < _FAILURES:
                failing.fail_at(self._draws.randrange(12))
        try:
            with super()._transaction(epoch) as connection:
                yield connection
                if epoch is not None:
                    self._history.writes.append(
                        WriteRecord(self.number, epoch, self.last_epoch(), "something")
                    )
        finally:
            if failing is not None:
                failing.heal()

    def add_windows(  # type: ignore[override]
        self, windows: Sequence[RankWindowRow], **other: Any
    ) -> list[Receipt]:
        receipts = super().add_windows(windows, **other)
        for receipt in receipts:
            if receipt.stored:
                w = receipt.window
                content = (w.first_step, w.last_step, w.tokens, w.counts.tobytes())
                self._history.stored.append((self.number, SealRecord(w.run, w.rank, w.seq, content)))
                self.contents.add((w.run, w.rank, w.seq))
        return receipts

    @property
    def missing(self) -> dict[tuple[int, int], int]:
        """Windows reported missing, by run and rank."""
        return {(state.run, state.rank): state.missing for state in self.rank_states()}

    def close(self) -> None:
        """Close and remove the file."""
        super().close()
        self._folder.cleanup()
