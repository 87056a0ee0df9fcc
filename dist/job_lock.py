"""One rebalancer at a time: an flock beside the store and one beside the ipc endpoint, each naming its holder."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType


class LockHeldError(OSError):
    """Another process holds the lock; `pid` is its number, 0 when it cannot be told."""

    def __init__(self, what: str, path: Path, pid: int) -> None:
        holder = f"pid {pid}" if pid else "an unknown process"
        super().__init__(
            f"{what}: a rebalancer is running already ({holder}, lock {path}); stop it, or give --take-over"
        )
        self.pid = pid


def lock_path(path: Path) -> Path:
    """Where the lock of a store or of an ipc socket lies; symbolic links lead to one and the same."""
    path = path.resolve()
    return path.with_name(path.name + ".lock")


class FileLock:
    """An exclusive flock on `path`, with the holder's pid inside. The kernel drops it when the holder dies.

    The file stays after release: removing it would let a third process lock a new file of the same name.
    """

    def __init__(self, what: str, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise OSError(f"{what}: lock {path} cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = self._holder()
            os.close(self._descriptor)
            raise LockHeldError(what, path, pid) from None
        # Best effort: on a full disk the lock still holds, only its holder's number is not told.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def _holder(self) -> int:
        text = os.pread(self._descriptor, 32, 0)
        return int(text) if text.isdigit() else 0

    def release(self) -> None:
        """Let the lock go; harmless when repeated."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


class JobLock:
    """The locks of one rebalancer, all or none. `take_over` ends the present holder first (see `_end_holder`)."""

    def __init__(
        self, paths: Sequence[tuple[str, Path]], *, take_over: bool = False, limit_s: float = 10.0
    ) -> None:
        self._locks: list[FileLock] = []
        try:
            for what, path in paths:
                self._locks.append(self._acquire(what, lock_path(path), take_over, limit_s))
        except OSError:
            self.release()
            raise

    @staticmethod
    def _acquire(what: str, path: Path, take_over: bool, limit_s: float) -> FileLock:
        try:
            return FileLock(what, path)
        except LockHeldError as held:
            if not take_over or not held.pid:
                raise
            return _end_holder(what, path, held.pid, limit_s)

    def release(self) -> None:
        """Let all locks go."""
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def __enter__(self) -> JobLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _end_holder(what: str, path: Path, pid: int, limit_s: float) -> FileLock:
    """SIGTERM, half the time limit for a clean end, then SIGKILL (a frozen process needs it); take the lock."""
    deadline = time.monotonic() + limit_s
    for number, until in ((signal.SIGTERM, deadline - limit_s / 2), (signal.SIGKILL, deadline)):
        with suppress(ProcessLookupError):
            os.kill(pid, number)
        while time.monotonic() < until:
            try:
                return FileLock(what, path)
            except LockHeldError as held:
                if held.pid not in (0, pid):  # somebody else was faster
                    raise
            time.sleep(0.05)
    raise LockHeldError(what, path, pid)
