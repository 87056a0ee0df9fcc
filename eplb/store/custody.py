"""Whether the store's files are as this writer left them, and what it has acknowledged: so that damage is noticed.

SQLite reads neither its log nor its file again while it writes: a file that is cut or overwritten by another process
would keep taking windows that cannot be read after a crash.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

from evenroute.eplb.store.connection import connect
from evenroute.eplb.store.schema import StoreError

_MARK = "evenroute-acknowledged 1"
_LENGTH = 128  # bytes of the note: one write of a fixed length, in place


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Size, time of the last write and inode; None for a missing or empty file (a log before its first write)."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_size, found.st_mtime_ns, found.st_ino) if found.st_size else None


class Custody:
    """Compares the stamps of file and log with those after this writer's last write.

    ``lock`` is held while the log is moved into the file; the file's stamp is noted then. The log's stamp is the
    writer's alone: no thread overwrites what another has noted.
    """

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self._path = path
        self._file, self._log = str(path.resolve()), f"{path.resolve()}-wal"
        self._file_stamp, self._log_stamp = _stamp(self._file), _stamp(self._log)

    def note(self) -> None:
        """This writer has written."""
        if self.lock.acquire(blocking=False):
            self.note_file()
            self.lock.release()
        self._log_stamp = _stamp(self._log)

    def note_file(self) -> None:
        """The log was moved into the file; with the lock."""
        self._file_stamp = _stamp(self._file)

    def changed(self) -> bool:
        """Whether another process wrote to file or log (or removed them) since."""
        if _stamp(self._log) != self._log_stamp:
            return True
        if not self.lock.acquire(blocking=False):
            return False  # the log is being moved into the file: looked at the next time
        try:
            return _stamp(self._file) != self._file_stamp
        finally:
            self.lock.release()

    def damage(self) -> str | None:
        """What is wrong with files that `changed`, though no other writer committed anything; None if all is readable.

        A checkpoint of another process changes the file alone, and nothing in it.
        """
        file, log = self._file_stamp, self._log_stamp
        now, log_now = _stamp(self._file), _stamp(self._log)
        if now is None or (log is not None and log_now is None):
            return f"its {'file' if now is None else 'log'} was removed or emptied"
        if file is not None and (now[0] < file[0] or now[2] != file[2]):
            return f"its file was cut or replaced ({now[0]} bytes, {file[0]} were written)"
        if log_now != log:
            return "its log was overwritten by somebody else"
        return self._misread()

    def _misread(self) -> str | None:
        try:
            with closing(connect(self._path, read_only=True, timeout_s=1.0)) as fresh:
                (found,) = fresh.execute("PRAGMA quick_check(1)").fetchone()
        except (sqlite3.Error, StoreError) as error:
            return f"its file was overwritten by somebody else: {error}"
        return None if found == "ok" else f"its file was overwritten by somebody else: {found}"


class Acknowledged:
    """How many windows and tokens were acknowledged, in a small file beside the store: what a restart compares with."""

    def __init__(self, path: Path) -> None:
        self.windows = self.tokens = 0
        self._path = Path(f"{path}-acknowledged")
        self._file = -1

    def read(self) -> bool:
        """Take the numbers of the file; False without one."""
        try:
            words = self._path.read_text(encoding="ascii", errors="replace").removeprefix(_MARK).split()
            self.windows, self.tokens = (int(word) for word in words)
        except (OSError, ValueError):
            return False
        return True

    def add(self, windows: int, tokens: int) -> None:
        """`windows` and `tokens` more are committed; raises OSError."""
        self.windows, self.tokens = self.windows + windows, self.tokens + tokens
        if self._file < 0:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(self._file, f"{_MARK} {self.windows} {self.tokens}".ljust(_LENGTH - 1).encode() + b"\n", 0)

    def start(self, windows: int, tokens: int) -> str | None:
        """The store holds this many; returns what is lost of what was acknowledged, None = nothing."""
        lost = None
        if self.read() and (windows < self.windows or tokens < self.tokens):
            lost = (
                f"{max(0, self.windows - windows)} windows with {max(0, self.tokens - tokens)} tokens that were "
                f"acknowledged are not in it (damaged, replaced, or a power cut)"
            )
        self.windows, self.tokens = windows, tokens
        self.add(0, 0)
        return lost

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
