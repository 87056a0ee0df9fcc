"""What keeps one store to one rebalancer and one rebalancer to one job, and notices files that are removed under it.

Locks: one file beside the store and one beside the ipc endpoint, each naming its holder, and a lock on the store's file
itself, which is the same under all of its names (hard links).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evenroute.dist.log import LimitedLog
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.wire.link import RouterLink
from evenroute.dist.wire.messages import JobShape, RankStatus
from evenroute.eplb._io import visible
from evenroute.eplb.store.writer import HistoryStore

LIVE_S = 3.5  # a rank that was heard so lately is alive: three heartbeats
_LOOK_S = 0.5
_TELL_S = 30.0  # `status` names a refused job for this long
_STORE_LOCK_S = 2.0  # the holder that was just ended lets its locks go one by one


@dataclass(frozen=True)
class Holder:
    """A process, distinguished from those of other hosts and containers and from later ones with its number."""

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
        """Signal this process and no other. ProcessLookupError if it has ended, even if its number was reused."""
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
    """Another process holds the lock; `holder` is who, None when unknown, and `pid` its number or 0."""

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
        # On a full disk the lock still holds, only without its holder's name.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, Holder.of(os.getpid()).text().encode(), 0)

    def release(self) -> None:
        """Let the lock go; may be called again."""
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
        """Let the lock go; may be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _flock_holder(path: Path) -> str:
    """Who has the flock on this file, if /proc/locks names it."""
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
                if held.holder not in (None, holder):  # another process was faster
                    raise
            time.sleep(0.05)
    raise LockHeldError(what, path, holder)


class JobGate:
    """Drops statuses that would make another run the current one while every rank of the present one is alive.

    To the protocol that is a lost message. A job that was started anew is let in: the ranks it replaces are not all
    alive any more.
    """

    def __init__(self, core: RebalancerCore, log: LimitedLog) -> None:
        self.refused = 0
        self._core = core
        self._log = log
        self._run = 0
        self._since = self._looked_at = float("-inf")
        self._all_live = False
        self._logged: tuple[int, int] | None = None
        self._last: tuple[float, str] | None = None

    def refuses(self, message: object, now: float) -> bool:
        """Whether to drop this message of a rank (counted)."""
        view = self._core.view
        if not isinstance(message, RankStatus) or view is None:
            return False
        if view.run != self._run:
            self._run, self._since, self._looked_at = view.run, now, float("-inf")
            self._last = None  # a restarted job waited for its old ranks to be given up
        if message.run == view.run:
            return False
        if message.fence > self._core.epoch or not self._is_alive(now):
            return False  # the core ends a life that is fenced; the run of dead ranks is given up
        self.refused += 1
        text = (
            f"{_name(message.run, message.job)} is turned away: the ranks of {_name(view.run, view.job)} are alive; "
            "each job needs a rebalancer and a store of its own"
        )
        self._last = (now, text)
        if self._logged != (view.run, message.run):  # once, not at each heartbeat
            self._logged = (view.run, message.run)
            self._log.log(logging.WARNING, "job", text)
        return True

    def _is_alive(self, now: float) -> bool:
        if now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            view = self._core.view
            assert view is not None
            ranks = view.ranks.values()
            self._all_live = view.heard_all() and all(now - rank.heard_at < LIVE_S for rank in ranks)
        # The ranks of a run that has just been taken up are still to be heard, one after the other.
        return self._all_live or now - self._since < LIVE_S

    def problems(self, now: float) -> list[str]:
        """What `evenroute status` says of it."""
        return [self._last[1]] if self._last is not None and now - self._last[0] < _TELL_S else []


def _name(run: int, job: JobShape) -> str:
    model = f" ({visible(job.model)})" if job.model else ""
    return f"job {run:x}{model} of {job.ep_size} ranks"


class FileWatch:
    """`problems`: one line for each file that is missing or damaged."""

    def __init__(self, lock: JobLock, link: RouterLink, store: HistoryStore, log: LimitedLog) -> None:
        self.problems: list[str] = []
        self._lock = lock
        self._link = link
        self._store = store
        self._log = log
        self._logged: set[str] = set()
        self._log_file: tuple[int, int] | None = None

    def look(self) -> int:
        """Look after them; returns how many errors of the store are new."""
        found, new = [], 0
        store, log_file = self._lock.store, self._store.log_file()
        self._log_file = self._log_file or log_file
        if log_file != self._log_file or (store is not None and not store.in_place()):
            found.append(
                f"store {self._store.path}: its file was removed or replaced while in use; counts are not stored, and "
                "wait at the ranks: start the rebalancer again"
            )
        if not self._link.in_place():
            found.append(
                f"address {self._link.endpoint}: its socket file was removed or replaced; no rank can connect anew: "
                "start the rebalancer again"
            )
        if self._store.loss is not None:
            found.append(self._store.loss)
        if self._store.damage is not None:
            found.append(f"store {self._store.path}: {self._store.damage}")
        for text in found:
            if text not in self._logged:
                self._logged.add(text)
                new += text.startswith("store")
                self._log.log(logging.ERROR, "file", text)
        self.problems = found
        return new
