"""Files of a live store that somebody damages: noticed at the next write, and what is lost is said at the restart."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.schema import PublishedPlacement
from evenroute.eplb.store.writer import (
    HistoryStore,
    JobRow,
    RankWindowRow,
    StaleEpochError,
    StoreError,
    StoreReader,
)

L, E, R = 3, 8, 2
JOB = JobRow("m", "prefill", L, E, 10, R, 1, 4, False)


def window(seq: int, rank: int = 0) -> RankWindowRow:
    return RankWindowRow(7, rank, seq, 10 * seq, 10 * seq + 9, 5, np.full((L, E), seq, np.int64))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    made = HistoryStore(tmp_path / "run.db")
    made.begin_epoch(5, pid=1, now=0.0)
    made.set_job(7, JOB, epoch=5, now=0.0)
    for seq in range(1, 30):
        made.add_windows([window(seq)], epoch=5, now=float(seq))
    yield made
    made.close()


def cut(path: Path, part: float) -> None:
    os.truncate(path, int(path.stat().st_size * part))


def garbage(path: Path) -> None:
    size = path.stat().st_size
    time.sleep(0.02)  # file times have the grain of a clock tick
    with path.open("r+b") as file:
        file.seek(size // 3)
        file.write(os.urandom(size // 3))


DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "log cut to half": ("-wal", lambda path: cut(path, 0.5)),
    "log cut to nothing": ("-wal", lambda path: cut(path, 0.0)),
    "log overwritten": ("-wal", garbage),
    "log removed": ("-wal", Path.unlink),
    "file cut to half": ("", lambda path: cut(path, 0.5)),
    "file cut to nothing": ("", lambda path: cut(path, 0.0)),
    "file overwritten": ("", garbage),
    "file removed": ("", Path.unlink),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_noticed_at_the_next_write_and_told_at_the_restart(
    store: HistoryStore, tmp_path: Path, name: str
) -> None:
    if name.startswith("file"):  # what is in the log only needs no file
        store._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        store.add_windows([window(30)], epoch=5, now=30.0)
    suffix, damage = DAMAGES[name]
    damage(Path(f"{store.path}{suffix}"))
    for _ in range(2):
        with pytest.raises(StoreError, match=r"cannot|log|file"):
            store.add_windows([window(31)], epoch=5, now=31.0)
    # As after a crash: file, log and note, whatever the dead process had in memory.
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for path in (store.path, Path(f"{store.path}-wal"), Path(f"{store.path}-acknowledged")):
        if path.exists():
            shutil.copy(path, crashed / path.name)
    said = restarted(crashed / "run.db")
    assert said is not None
    assert re.search(r"[1-9]\d* (windows with [1-9]\d* tokens|rows of windows)", said)


def restarted(path: Path) -> str | None:
    """What a restart says of what was acknowledged: in its refusal to start, or as a loss; None = all is there."""
    try:
        with HistoryStore(path) as again:
            return again.loss
    except StoreError as error:
        return str(error)


def test_what_is_acknowledged_is_there_after_a_crash_at_any_time(store: HistoryStore, tmp_path: Path) -> None:
    for seq in range(30, 40):
        store.add_windows([window(seq)], epoch=5, now=float(seq))
        crashed = tmp_path / f"crashed{seq}"
        crashed.mkdir()
        for path in (store.path, Path(f"{store.path}-wal"), Path(f"{store.path}-acknowledged")):
            shutil.copy(path, crashed / path.name)
        with HistoryStore(crashed / "run.db") as again:
            assert again.loss is None
            assert again.last_seq(7, 0) == seq


def test_a_store_that_was_replaced_by_an_older_copy_says_what_is_missing(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "run.db") as first:
        first.begin_epoch(5, pid=1, now=0.0)
        first.set_job(7, JOB, epoch=5, now=0.0)
        first.add_windows([window(1)], epoch=5, now=1.0)
    shutil.copy(tmp_path / "run.db", tmp_path / "backup.db")
    with HistoryStore(tmp_path / "run.db") as second:
        assert second.loss is None
        second.add_windows([window(2), window(3)], epoch=5, now=2.0)
    shutil.copy(tmp_path / "backup.db", tmp_path / "run.db")
    with HistoryStore(tmp_path / "run.db") as third:
        assert third.loss is not None
        assert "2 windows with 10 tokens that were acknowledged are not in it" in third.loss
    with HistoryStore(tmp_path / "run.db") as fourth:
        assert fourth.loss is None  # said once


def test_what_others_may_do_is_no_damage(store: HistoryStore) -> None:
    with StoreReader(store.path) as reader:
        assert len(list(reader.windows())) == 29
        store.add_windows([window(30)], epoch=5, now=30.0)
    outside = sqlite3.connect(store.path)
    outside.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()  # changes the file, and nothing in it
    store.add_windows([window(31)], epoch=5, now=31.0)
    outside.execute("INSERT INTO settings VALUES ('a', 'b')")
    outside.commit()
    outside.close()
    store.add_windows([window(32)], epoch=5, now=32.0)
    for _ in range(4):
        store.roll_up(before=1e9, span_s=10.0, epoch=5)
        store.add_windows([window(store.last_seq(7, 0) + 1)], epoch=5, now=33.0)
    assert store.damage is None
    with HistoryStore(store.path) as other:
        other.begin_epoch(6, pid=2, now=0.0)
    with pytest.raises(StaleEpochError):
        store.add_windows([window(90)], epoch=5, now=34.0)


def test_a_transaction_that_fails_is_no_damage(store: HistoryStore) -> None:
    placement = Placement.initial(L, E, 10, Topology(R))
    published = PublishedPlacement(1.0, 5, 1, placement, np.zeros(L, np.int64), "", "")
    store.add_placement(published)
    with pytest.raises(StoreError):
        store.add_placement(published)  # the same key
    store.add_windows([window(30)], epoch=5, now=30.0)
    assert store.damage is None


def test_a_crash_has_at_most_the_last_commits_to_lose(store: HistoryStore) -> None:
    (level,) = store._connection.execute("PRAGMA synchronous").fetchone()
    assert level >= 1, "synchronous=OFF lets a power cut take the whole file"
