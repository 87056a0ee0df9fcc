"""A SQLite connection that fails at a statement of a transaction, as a full disk does."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any


class FailingConnection:
    """Passes everything on to ``real``; a chosen statement raises ``sqlite3.OperationalError`` instead.

    ``before_begin`` is called once, before the next transaction begins.
    """

    def __init__(self, real: sqlite3.Connection) -> None:
        self.real = real
        self.before_begin: Callable[[], None] | None = None
        self.count = 0  # statements of this transaction
        self._at: int | None = None
        self._on: str | None = None

    def fail_at(self, number: int) -> None:
        """Fail at statement ``number`` of the next transaction (0 = BEGIN)."""
        self.count, self._at = 0, number

    def fail_on(self, start: str) -> None:
        """Fail at each statement that starts so."""
        self._on = start

    def heal(self) -> None:
        """Fail no more."""
        self._at = self._on = None

    def _pass(self, query: str) -> None:
        if query == "ROLLBACK" or query.startswith("PRAGMA"):
            return  # the latter are no part of a transaction
        if query.startswith("BEGIN") and self.before_begin is not None:
            act, self.before_begin = self.before_begin, None
            act()
        self.count += 1
        if self.count - 1 == self._at or (self._on is not None and query.startswith(self._on)):
            raise sqlite3.OperationalError("database or disk is full")

    def execute(self, query: str, *arguments: Any) -> sqlite3.Cursor:
        """As the connection's."""
        self._pass(query)
        return self.real.execute(query, *arguments)

    def executemany(self, query: str, *arguments: Any) -> sqlite3.Cursor:
        """As the connection's."""
        self._pass(query)
        return self.real.executemany(query, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
