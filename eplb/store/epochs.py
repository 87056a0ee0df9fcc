"""The store opened for writing: transactions, each of which checks whose store it is.

Every write checks inside its own transaction that the writer's epoch is still the store's last, so a frozen rebalancer
that wakes up after another took over cannot write. `synchronous=NORMAL`: a power cut may take the last commits, never
the file.
"""

from __future__ import annotations

import socket
import sqlite3
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from evenroute.eplb.store.checkpoint import Checkpointer
from evenroute.eplb.store.connection import check_format, connect
from evenroute.eplb.store.custody import Acknowledged, Custody
from evenroute.eplb.store.reader import StoreReader
from evenroute.eplb.store.schema import APPLICATION_ID, FORMAT_VERSION, SCHEMA, StaleEpochError, StoreError


class EpochStore(StoreReader):
    """Epochs, events and settings. One writer at a time holds the file (the rebalancer locks it); the epoch check is
    the second fence.

    ``damage``: what another process did to the files meanwhile, None = nothing. ``loss``: what was acknowledged in an
    earlier life and is not in the store, None = nothing.

    Raises StoreError when the file cannot be made, opened or written, StaleEpochError from any write once another
       epoch has been registered.
    """

    def __init__(
        self, path: str | Path, *, timeout_s: float = 5.0, background_checkpoint: bool = False
    ) -> None:
        self.path = Path(path)
        self._checkpointer: Checkpointer | None = None
        self._acknowledged = Acknowledged(self.path)
        self.damage: str | None = None
        self._connection = connect(self.path, read_only=False, timeout_s=timeout_s)
        try:
            with self._write_errors():
                if not self._connection.execute("PRAGMA schema_version").fetchone()[0]:
                    self._create()
                check_format(self._connection, self.path)
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._custody = Custody(self.path)
                self._data_version = self._version_of_data()
                self.loss = self._start_note()
                if background_checkpoint:
                    # Only a log of 100 MB, which the thread has not kept up with, is moved by the writer itself.
                    self._connection.execute("PRAGMA wal_autocheckpoint = 25000")
                    self._checkpointer = Checkpointer(self.path, self._custody)
        except StoreError as error:
            self._connection.close()
            if self._acknowledged.read():
                known = f"{self._acknowledged.windows} windows with {self._acknowledged.tokens} tokens"
                raise StoreError(f"{error}; {known} had been acknowledged") from error
            raise

    def _start_note(self) -> str | None:
        (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise StoreError(f"store {self.path}: truncated or damaged: {' '.join(found.split())}")
        query = "SELECT counts, crc FROM windows"
        unreadable = sum(zlib.crc32(counts) != crc for counts, crc in self._connection.execute(query))
        states = self.rank_states()
        windows, tokens = sum(state.num_windows for state in states), sum(state.tokens for state in states)
        lost = self._acknowledged.start(windows, tokens)
        if unreadable:
            lost = f"{unreadable} rows of windows can't be read (overwritten)" + (
                "" if lost is None else f"; {lost}"
            )
        return None if lost is None else f"store {self.path}: {lost}"

    def log_file(self) -> tuple[int, int] | None:
        """Device and inode of the write-ahead log, which holds what is not moved into the file yet; None without one.

        SQLite keeps one as long as the store is open."""
        try:
            found = Path(f"{self.path.resolve()}-wal").stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        self._acknowledged.close()
        super().close()

    def _create(self) -> None:
        self._connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._connection.executescript(
            f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id = {APPLICATION_ID};"
            f"PRAGMA user_version = {FORMAT_VERSION}; COMMIT;"
        )

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"store {self.path}: cannot be written: {error}") from error

    @contextmanager
    def _transaction(self, epoch: int | None) -> Iterator[sqlite3.Connection]:
        with self._write_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if epoch is not None and epoch != (last := self.last_epoch()):
                    raise StaleEpochError(
                        f"store {self.path}: epoch {last} has taken over from epoch {epoch}"
                    )
                self._check_files()
                yield self._connection
                self._connection.execute("COMMIT")
                self._custody.note()
            except BaseException:
                self._rolled_back()
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                if self.damage is None:
                    self._custody.note()
                raise

    def _check_files(self) -> None:
        """In a transaction, so that no other writer is at work: StoreError once the files were damaged from outside."""
        if self.damage is None and self._custody.changed():
            version, known = self._version_of_data(), self._data_version
            self._data_version = version
            if version == known:  # else another writer committed: its epoch says whether it may
                self.damage = self._custody.damage()
        if self.damage is not None:
            raise StoreError(
                f"store {self.path}: {self.damage}; nothing is stored or acknowledged until the rebalancer is "
                "started again"
            )

    def _version_of_data(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _rolled_back(self) -> None:
        """Nothing of the transaction was kept: what was remembered of it has to go."""

    def last_epoch(self) -> int:
        """The highest epoch that was ever registered; 0 in a new store."""
        with self._errors():
            return int(self._connection.execute("SELECT coalesce(max(epoch), 0) FROM epochs").fetchone()[0])

    def begin_epoch(self, epoch: int, *, pid: int, now: float) -> None:
        """Register a life of the rebalancer; ValueError unless it is above all earlier ones."""
        with self._transaction(None) as connection:
            if epoch <= (last := self.last_epoch()):
                raise ValueError(f"epoch: {epoch} found, expected above the store's last, {last}")
            connection.execute(
                "INSERT INTO epochs VALUES (?, ?, ?, ?)", (epoch, now, pid, socket.gethostname())
            )

    def add_event(self, kind: str, text: str, *, epoch: int | None, now: float) -> None:
        """Note something for the operator."""
        with self._transaction(epoch) as connection:
            values = (now, self.last_epoch(), kind, text)
            connection.execute("INSERT INTO events (time, epoch, kind, text) VALUES (?, ?, ?, ?)", values)

    def add_event_after(self, kind: str, text: str, after: str | None, *, epoch: int, now: float) -> bool:
        """Note an event if the last one of its kind has the text ``after`` (None: there is none); False if not."""
        with self._transaction(epoch) as connection:
            query = "SELECT text FROM events WHERE kind = ? ORDER BY id DESC LIMIT 1"
            row = connection.execute(query, (kind,)).fetchone()
            if (None if row is None else row[0]) != after:
                return False
            values = (now, epoch, kind, text)
            connection.execute("INSERT INTO events (time, epoch, kind, text) VALUES (?, ?, ?, ?)", values)
        return True

    def events_of(self, kind: str) -> list[str]:
        """Texts of all events of a kind, oldest first."""
        with self._errors():
            query = "SELECT text FROM events WHERE kind = ? ORDER BY id"
            return [str(row[0]) for row in self._connection.execute(query, (kind,))]

    def set_setting(self, name: str, value: str, *, epoch: int | None) -> None:
        """Keep a value over restarts."""
        with self._transaction(epoch) as connection:
            connection.execute("INSERT OR REPLACE INTO settings VALUES (?, ?)", (name, value))
