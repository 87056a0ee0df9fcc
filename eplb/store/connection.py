"""The store's file: opened, and checked for its format."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from evenroute.eplb._io import open_input
from evenroute.eplb.store.schema import APPLICATION_ID, FORMAT_VERSION, StoreError


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
