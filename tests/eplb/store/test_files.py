"""A store's files: let go, shrunk; what a checkpoint or a write that is taken back leaves in them is no damage."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.store.custody import Custody
from evenroute.eplb.store.writer import HistoryStore, JobRow, RankWindowRow, StoreReader

L, E = 3, 64
JOB = JobRow("m", "prefill", L, E, 66, 2, 1, 4, False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    made = HistoryStore(tmp_path / "run.db", background_checkpoint=True)
    made.begin_epoch(5, pid=1, now=0.0)
    made.set_job(7, JOB, epoch=5, now=0.0)
    yield made
    made.close()


def held_open(folder: Path) -> list[str]:
    """Files of the folder that this process has open."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            continue
    return [name for name in found if name.startswith(str(folder))]


def test_a_closed_store_holds_no_file_and_no_thread(store: HistoryStore, tmp_path: Path) -> None:
    before = threading.active_count()
    reader = StoreReader(store.path)
    assert held_open(tmp_path)
    reader.close()
    store.close()
    store.close()
    assert held_open(tmp_path) == []
    assert threading.active_count() == before - 1


def test_a_roll_up_gives_room_back(store: HistoryStore) -> None:
    noise = np.random.default_rng(1)
    for seq in range(1, 200):
        counts = noise.integers(0, 2**40, (L, E))
        window = RankWindowRow(7, 0, seq, 10 * seq, 10 * seq + 9, int(counts.sum()), counts)
        store.add_windows([window], epoch=5, now=float(seq))
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    while store.roll_up(before=1e6, span_s=1000.0, epoch=5):
        pass
    assert store._connection.execute("PRAGMA page_count").fetchone()[0] < pages / 2
    store.add_event("after", "all is well", epoch=5, now=300.0)
    assert store.damage is None


def test_a_write_that_is_taken_back_after_it_reached_the_log_is_no_damage(store: HistoryStore) -> None:
    """A transaction larger than the cache is written to the log before its end."""
    store._connection.execute("PRAGMA cache_size = 10")
    log = store.path.with_name("run.db-wal")
    size = log.stat().st_size

    def large() -> None:
        with store._transaction(5) as connection:
            for _ in range(200):
                values = (0.0, 5, "large", "x" * 4000)
                connection.execute("INSERT INTO events (time, epoch, kind, text) VALUES (?, ?, ?, ?)", values)
            assert log.stat().st_size > size
            raise RuntimeError("taken back")

    with pytest.raises(RuntimeError, match="taken back"):
        large()
    store.add_event("after", "all is well", epoch=5, now=1.0)
    assert store.damage is None
    assert store.events_of("large") == []


def test_an_event_without_an_epoch_is_of_the_last_one(store: HistoryStore) -> None:
    store.add_event("note", "by an operator", epoch=None, now=1.0)
    assert store._connection.execute("SELECT epoch FROM events WHERE kind = 'note'").fetchall() == [(5,)]


def test_a_checkpoint_under_way_is_not_taken_for_damage(store: HistoryStore) -> None:
    custody = Custody(store.path)
    store.path.write_bytes(store.path.read_bytes())
    with custody.lock:
        assert not custody.changed()
    assert custody.changed()


def test_shared_counts_come_from_one_rank() -> None:
    assert JOB.num_sources == 2
    assert JobRow("m", "prefill", L, E, 66, 2, 1, 4, True).num_sources == 1
