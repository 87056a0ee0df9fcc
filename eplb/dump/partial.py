"""Unfinished dumps: `.NAME.PID-HEX.partial` beside the target NAME, until they are whole and renamed.

A writer holds a lock on its file, so that a reader can distinguish a file that is being written from what a killed
process left (process numbers mean nothing across containers). What was left is kept and reported, and only
removed on request: it may be all that there is of a recording.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_NAME = re.compile(r"\.(?P<target>.+)\.(?P<pid>\d+)-[0-9a-f]+\.partial", re.DOTALL)
_OF_RECORDING = re.compile(r"(?P<name>.+)-rank\d+(\.part\d+)?\.evd", re.DOTALL)


@dataclass(frozen=True)
class Unfinished:
    """A file that was never finished; `target` is the name that it would have got."""

    path: Path
    target: str
    num_bytes: int
    being_written: bool

    def told(self) -> str:
        """One line for a person."""
        what = "is being written" if self.being_written else "was left by a process that ended"
        return f"{self.path}: unfinished, {self.num_bytes:,} bytes, {what}"


def partial_path(target: Path, writer: object) -> Path:
    """Where the dump that becomes `target` is written."""
    return target.with_name(f".{target.name}.{os.getpid()}-{id(writer):x}.partial")


def target_of(name: str) -> str | None:
    """The target's name, from an unfinished file's name; None for any other name."""
    match = _NAME.fullmatch(name)
    return None if match is None else match["target"]


def hold(file: IO[bytes]) -> None:
    """Mark an open file as being written, until it is closed or its process ends."""
    with suppress(OSError):  # a file system without locks: then all look like left ones
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


def _held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def unfinished_in(folder: Path) -> list[Unfinished]:
    """The folder's unfinished dumps in the order of their names; OSError if it cannot be listed."""
    found = []
    for path in sorted(folder.iterdir()):
        target = target_of(path.name)
        if target is None:
            continue
        with suppress(
            OSError
        ):  # finished or removed just now, or not ours to look into: then it is not listed
            if path.is_file():
                found.append(Unfinished(path, target, path.stat().st_size, _held(path)))
    return found


def unfinished_of(target: Path) -> list[Unfinished]:
    """Unfinished files of `target`, and of the other ranks and parts if it is named as a recording's file."""
    match = _OF_RECORDING.fullmatch(target.name)

    def same(other: str) -> bool:
        theirs = _OF_RECORDING.fullmatch(other)
        if match is None or theirs is None:
            return other == target.name
        return theirs["name"] == match["name"]

    with suppress(OSError):
        return [found for found in unfinished_in(target.parent) if same(found.target)]
    return []


def remove_left(target: Path) -> None:
    """Remove what ended processes left of `target`: what can be made again, never a rank's recording."""
    if _OF_RECORDING.fullmatch(target.name):
        return
    for found in unfinished_of(target):
        if not found.being_written:
            with suppress(OSError):
                found.path.unlink()
