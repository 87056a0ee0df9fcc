"""The store's file: opened, checked, and its write-ahead log moved into it by a thread of its own."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from evenroute.eplb._io import open_input
from evenroute.eplb.store.schema import APPLICATION_ID, FORMAT_VERSION, StoreError

EVERY_S = 2.0


def connect(path: Path, *, read_only: bool, timeout_s: float) -> sqlite3.Connection:
    """Open the file in autocommit mode; StoreError when that is impossible."""
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    try:
        return sqlite3.connect(
            uri, uri=True, timeout=timeout_s, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise StoreError(f"store {path}: cannot be opened: {error}") from error


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """StoreError unless the file is a whole store of this format."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != APPLICATION_ID:
        raise StoreError(f"store {path}: not an evenroute store (application_id {application})")
    if version != FORMAT_VERSION:
        raise StoreError(f"store {path}: format version {version} found, expected {FORMAT_VERSION}")


def check_length(path: Path) -> None:
    """StoreError when the file is shorter than its header says; a log beside it may hold the rest."""
    log = Path(f"{path}-wal")
    if log.exists() and log.stat().st_size:
        return
    with open_input(path) as file:
        header = file.read(32)
    page_size = int.from_bytes(header[16:18], "big")
    expected = int.from_bytes(header[28:32], "big") * (65536 if page_size == 1 else page_size)
    if len(header) < 32 or path.stat().st_size < expected:
        raise StoreError(
            f"store {path}: truncated or damaged: {path.stat().st_size} bytes of {expected or 'any'}"
        )


class Checkpointer:
    """A thread with a connection of its own; passive checkpoints wait for nobody and hold nobody up."""

    def __init__(self, path: Path, *, every_s: float = EVERY_S) -> None:
        self.failures = 0  # tried again the next time; meanwhile the log grows
        self._every_s = every_s
        self._connection = connect(path, read_only=False, timeout_s=1.0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evenroute-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            try:
                self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            except sqlite3.Error:
                self.failures += 1

    def close(self, limit_s: float = 2.0) -> None:
        """Stop; a checkpoint under way is waited for up to `limit_s`."""
        self._stop.set()
        self._thread.join(limit_s)
        if not self._thread.is_alive():
            self._connection.close()
