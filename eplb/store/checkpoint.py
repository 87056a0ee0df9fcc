"""Moves the store's write-ahead log into its file from a thread of its own: a slow disk never holds the writer up."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from evenroute.eplb.store.connection import connect
from evenroute.eplb.store.custody import Custody

EVERY_S = 2.0


class Checkpointer:
    """A thread with a connection of its own; passive checkpoints neither wait for readers nor block them."""

    def __init__(self, path: Path, custody: Custody, *, every_s: float = EVERY_S) -> None:
        self.failures = 0  # tried again the next time; meanwhile the log grows
        self._every_s = every_s
        self._custody = custody
        self._connection = connect(path, read_only=False, timeout_s=1.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenroute-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            with self._custody.lock:
                try:
                    self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                except sqlite3.Error:
                    self.failures += 1
                self._custody.note_file()

    def close(self, limit_s: float = 2.0) -> None:
        """Stop; a checkpoint under way is waited for up to `limit_s`."""
        self._stop.set()
        self._thread.join(limit_s)
        if not self._thread.is_alive():
            self._connection.close()
