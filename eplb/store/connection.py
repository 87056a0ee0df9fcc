"""The store's file: opened, and checked for its format."""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from pathlib import Path

from evenroute.eplb._io import open_input
from evenroute.eplb.store.schema import APPLICATION_ID, FORMAT_VERSION, StoreError


def connect(path: Path, *, read_only: bool, timeout_s: float) -> sqlite3.Connection:
    """Open the file in autocommit mode, a new one for this user alone; StoreError when that is impossible."""
    if not read_only:
        with suppress(OSError):  # it exists, or SQLite says what is wrong
            path.touch(mode=0o600, exist_ok=False)
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
    _check_tables(connection, path)


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    """A store holds plain tables. Views, triggers and computed columns are code, which may run for ever."""
    kinds = [(row[1], row[2]) for row in connection.execute("PRAGMA main.table_list")]
    kinds += connection.execute("SELECT name, type FROM sqlite_master").fetchall()
    for name, kind in kinds:
        if kind not in ("table", "index"):
            raise StoreError(f"store {path}: {name!r} is a {kind}, expected a table")
    for name in {name for name, kind in kinds if kind == "table"}:
        columns = connection.execute(
            "SELECT name FROM pragma_table_xinfo(?) WHERE hidden", (name,)
        ).fetchall()
        if columns:
            raise StoreError(
                f"store {path}: column {columns[0][0]!r} of {name!r} is computed, expected kept values"
            )


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
