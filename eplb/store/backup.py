"""A store copied while a rebalancer writes to it."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from evenroute.eplb.store.reader import StoreReader
from evenroute.eplb.store.schema import StoreError


@dataclass(frozen=True)
class BackedUp:
    """What the copy holds; ``windows`` as they were received from ranks."""

    windows: int
    placements: int
    runs: int
    num_bytes: int


def back_up(source: Path, target: Path) -> BackedUp:
    """Copy a consistent snapshot of ``source`` to the new file ``target``; the writer never waits.

    The copy is made beside its name, checked, and renamed. Raises FileNotFoundError for an absent source,
    FileExistsError for a target that is there, StoreError for a source that is no store or is damaged, OSError where
    nothing can be written.
    """
    if target.exists():
        raise FileExistsError(f"{target}: exists; a backup is a new file")
    partial = target.parent / f".{target.name}.{os.getpid()}-0.partial"
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with StoreReader(source) as reader:
            reader.copy_to(partial)
        with StoreReader(partial) as copy:
            found = (
                sum(state.num_windows for state in copy.rank_states()),
                sum(1 for _ in copy.placements()),
                len(copy.jobs()),
            )
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(target)
    except sqlite3.Error as error:
        raise StoreError(f"store {source}: cannot be copied: {error}") from error
    finally:
        for name in (partial, Path(f"{partial}-wal"), Path(f"{partial}-shm"), Path(f"{partial}-journal")):
            name.unlink(missing_ok=True)
    return BackedUp(*found, target.stat().st_size)
