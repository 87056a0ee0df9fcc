"""Temporary folders and child processes that go with the process that made them, also after its kill -9."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "evenroute-run-"
_OWNER = "owner.lock"


class RunFolder:
    """A temporary folder; `remove` takes it away, or the next `RunFolder` of this user once its maker is dead.

    The maker holds a lock inside, which the kernel drops however it ends.
    """

    def __init__(self) -> None:
        remove_left_folders()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        new = self.path / "owner.new"
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _OWNER)  # never there without its lock

    def remove(self) -> None:
        """Remove it with all that is in it; may be called twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def remove_left_folders() -> list[Path]:
    """Remove this user's folders whose makers are dead; returns them."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another process was faster, or it is not ours
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and _is_left(path / _OWNER):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _is_left(owner: Path) -> bool:
    lock = os.open(owner, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def end_with_parent() -> None:
    """As `preexec_fn` of a child: SIGTERM when its parent is gone, however it ended (Linux: PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
