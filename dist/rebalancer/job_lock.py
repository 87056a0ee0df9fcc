"""One rebalancer at a time: a lock beside the store and one beside the ipc endpoint, each naming its holder, and one on
the store's file itself, which is the same under any of its names (hard links)."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_STORE_LOCK_S = 2.0  # the holder that was just ended lets its locks go one by one


@dataclass(frozen=True)
class Holder:
    """A process, told apart from those of other hosts and containers, and from a later one of the same number."""

    pid: int
    host: str
    boot: str  # id of this life of the host
    space: int  # number of its pid namespace
    started: int  # clock ticks after the boot

    @classmethod
    def of(cls, pid: int) -> Holder:
        """A process of this host and namespace. ProcessLookupError when there is none."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/pid").st_ino
        return cls(pid, socket.gethostname() or "-", boot, space, _started(pid))

    @classmethod
    def parse(cls, text: str) -> Holder | None:
        """What `text` says; None where it says nothing (an empty or foreign file)."""
        words = text.split()
        if len(words) != 5 or not all(word.isdigit() for word in (words[0], *words[3:])):
            return None
        return cls(int(words[0]), words[1], words[2], int(words[3]), int(words[4]))

    def text(self) -> str:
        """The line that `parse` reads."""
        return f"{self.pid} {self.host} {self.boot} {self.space} {self.started}\n"

    def is_here(self) -> bool:
        """Whether its number means the same process here: same host, not booted since, same container."""
        own = Holder.of(os.getpid())
        return (self.boot, self.space) == (own.boot, own.space)

    def send(self, number: int) -> None:
        """Signal it, and nobody else. ProcessLookupError when it has ended, also if another has its number now."""
        descriptor = os.pidfd_open(self.pid)
        try:
            if _started(self.pid) != self.started:
                raise ProcessLookupError(errno.ESRCH, "ended", str(self.pid))
            signal.pidfd_send_signal(descriptor, number)
        finally:
            os.close(descriptor)


def _started(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except FileNotFoundError:
        raise ProcessLookupError(errno.ESRCH, "no such process", str(pid)) from None


class LockHeldError(OSError):
    """Another process holds the lock; `holder` is who, None when it cannot be told, and `pid` its number or 0."""

    def __init__(self, what: str, path: Path, holder: Holder | None) -> None:
        who, advice = "an unknown process", "stop it"
        if holder is not None:
            here = holder.is_here()
            who = f"pid {holder.pid}" + ("" if here else f" of host {holder.host}")
            advice = (
                "stop it, or give --take-over" if here else "stop it there (--take-over ends none of others)"
            )
        super().__init__(f"{what}: a rebalancer is running already ({who}, lock {path}); {advice}")
        self.holder = holder
        self.pid = 0 if holder is None else holder.pid


def lock_path(path: Path) -> Path:
    """Where the lock of a store or of an ipc socket lies; symbolic links lead to one and the same."""
    path = resolved(path)
    return path.with_name(path.name + ".lock")


def resolved(path: Path) -> Path:
    """The path without symbolic links. Raises OSError for a loop of them (a RuntimeError to Python before 3.13)."""
    try:
        return path.resolve()
    except RuntimeError as error:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


class FileLock:
    """An exclusive flock on `path`, with the holder inside. The kernel drops it when the holder dies.

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
            holder = Holder.parse(os.pread(self._descriptor, 512, 0).decode(errors="replace"))
            os.close(self._descriptor)
            raise LockHeldError(what, path, holder) from None
        # Best effort: on a full disk the lock still holds, only its holder is not told.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, Holder.of(os.getpid()).text().encode(), 0)

    def release(self) -> None:
        """Let the lock go; harmless when repeated."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


class StoreLock:
    """An exclusive flock on the store's file itself; nothing is written. SQLite's own locks are of another kind.

    To be made before SQLite opens the file and released after it has closed it: closing any descriptor of a file drops
    the locks that SQLite holds on it.
    """

    def __init__(self, what: str, path: Path, *, limit_s: float = _STORE_LOCK_S) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        deadline = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() >= deadline:
                    os.close(self._descriptor)
                    raise OSError(
                        f"{what}: {path} is in use by another rebalancer ({_flock_holder(path)}) that has it under "
                        "another name (a hard link) or whose lock file was removed; stop that one"
                    ) from None
            time.sleep(0.05)

    def in_place(self) -> bool:
        """Whether the path still leads to the file that is locked, and so written."""
        try:
            found, own = os.stat(self._path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def release(self) -> None:
        """Let the lock go; harmless when repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _flock_holder(path: Path) -> str:
    """Who has the flock on this file, as far as the kernel's list of locks tells."""
    with suppress(OSError):
        found = path.stat()
        file = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == file and int(words[4]) > 0:
                return f"pid {words[4]}"
    return "an unknown process"


class JobLock:
    """The locks of one rebalancer, all or none. `take_over` ends the present holder first (see `_end_holder`)."""

    def __init__(
        self, paths: Sequence[tuple[str, Path]], *, take_over: bool = False, limit_s: float = 10.0
    ) -> None:
        self._locks: list[FileLock] = []
        self.store: StoreLock | None = None
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
            if not take_over or held.holder is None or not held.holder.is_here():
                raise
            return _end_holder(what, path, held.holder, limit_s)

    def hold_store(self, what: str, path: Path) -> None:
        """Lock the store's file under all of its names, if there is one yet. OSError in one line when it is held."""
        if self.store is None and path.exists():
            self.store = StoreLock(what, path)

    def release(self) -> None:
        """Let all locks go."""
        if self.store is not None:
            self.store.release()
        for lock in self._locks:
            lock.release()
        self._locks.clear()

    def __enter__(self) -> JobLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def _end_holder(what: str, path: Path, holder: Holder, limit_s: float) -> FileLock:
    """SIGTERM, half the time limit for a clean end, then SIGKILL (a frozen process needs it); take the lock."""
    deadline = time.monotonic() + limit_s
    for number, until in ((signal.SIGTERM, deadline - limit_s / 2), (signal.SIGKILL, deadline)):
        with suppress(ProcessLookupError):
            holder.send(number)
        while time.monotonic() < until:
            try:
                return FileLock(what, path)
            except LockHeldError as held:
                if held.holder not in (None, holder):  # somebody else was faster
                    raise
            time.sleep(0.05)
    raise LockHeldError(what, path, holder)
