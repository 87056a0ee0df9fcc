"""A store read as a source: whose windows and placements, and what is told of those left out; what a roll-up keeps."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store import checkpoint, custody
from evenroute.eplb.store.checkpoint import Checkpointer
from evenroute.eplb.store.custody import Custody
from evenroute.eplb.store.schema import IN_USE_EVENT, PublishedPlacement, StoreError, encode_in_use
from evenroute.eplb.store.source import read_store
from evenroute.eplb.store.writer import HistoryStore, JobRow, RankWindowRow, StoreReader
from support.control_plane import patience

L, E, P, R = 2, 4, 6, 2
JOB = JobRow("m", "decode", L, E, P, R, 1, 2, False)
OTHER = JobRow("m", "decode", L, E + 2, P, R, 1, 2, False)
START = Placement.initial(L, E, P, Topology(R))


@pytest.fixture
def store(tmp_path: Path) -> HistoryStore:
    made = HistoryStore(tmp_path / "run.db")
    made.begin_epoch(5, pid=1, now=0.0)
    made.set_job(7, JOB, epoch=5, now=0.0)
    return made


def window(seq: int, *, run: int = 7, experts: int = E, steps: int = 10, rank: int = 0) -> RankWindowRow:
    counts = np.full((L, experts), seq, np.int64)
    return RankWindowRow(run, rank, seq, 10 * seq, 10 * seq + steps - 1, 4 * seq, counts)


def in_use(store: HistoryStore, placement: Placement, key: tuple[int, int], now: float, run: int = 7) -> None:
    for layer, digest in enumerate(placement.row_digests().tolist()):
        store.keep_row(digest, placement.row(layer), epoch=5)
    text = encode_in_use(run, key, placement.row_digests().astype("<i8").tobytes())
    store.add_event(IN_USE_EVENT, text, epoch=5, now=now)


def publish(store: HistoryStore, placement: Placement) -> None:
    moves = np.zeros(L, np.int64)
    store.add_placement(PublishedPlacement(2.0, 5, 1, placement, moves, "global", "a plan"))


def test_runs_of_another_shape_are_left_out_and_told(store: HistoryStore, tmp_path: Path) -> None:
    store.add_windows([window(1)], epoch=5, now=1.0)
    assert [note for note in read_store(store.path).notes if "shape" in note] == []
    store.set_job(8, OTHER, epoch=5, now=2.0)
    store.add_windows([window(1, run=8, experts=E + 2)], epoch=5, now=2.0)
    store.set_job(9, JOB, epoch=5, now=3.0)  # the last one: its shape counts
    store.add_windows([window(2, run=9), window(1, run=9, rank=1)], epoch=5, now=3.0)
    source = read_store(store.path)
    assert f"1 runs of another shape than [{L}, {E}] are left out" in source.notes
    assert [int(found.counts[0, 0]) for found in source.windows()] == [1, 1, 2]
    assert source.ranks == (0, 1)


def test_placements_in_use_come_from_what_the_store_knows(store: HistoryStore) -> None:
    swapped = Placement(START.physical_to_logical[:, ::-1].copy(), E, Topology(R))
    mixed = Placement.from_rows([swapped.row(0), START.row(1)], E, Topology(R))
    publish(store, swapped)
    told = "when the placements came into use is not recorded: they count from their publication"
    assert told in read_store(store.path).notes
    assert read_store(store.path).placements_are == "published"
    unknown = encode_in_use(7, (5, 1), np.full(L, 12345, "<i8").tobytes())
    store.add_event(IN_USE_EVENT, unknown, epoch=5, now=2.5)  # rows that a lost store had
    half = np.array([START.row_digests()[0], 12345], "<i8").tobytes()
    store.add_event(IN_USE_EVENT, encode_in_use(7, (5, 1), half), epoch=5, now=2.6)
    in_use(store, swapped, (0, 0), 2.7, run=99)  # of a run that is not known here
    in_use(store, START, (0, 0), 3.0)
    in_use(store, mixed, (0, 0), 4.0)
    in_use(store, swapped, (5, 1), 5.0)
    in_use(store, START, (4, 3), 6.0)  # published by a store that was lost
    source = read_store(store.path)
    assert told not in source.notes
    assert source.placements_are == "in use"
    assert [(p.epoch, p.version, p.time, p.reason) for p in source.placements] == [
        (0, 0, 3.0, "the job's start placement"),
        (0, 0, 4.0, "layers of several versions"),
        (5, 1, 5.0, "a plan"),
        (4, 3, 6.0, "layers of several versions"),
    ]
    digests = [p.placement.digest() for p in source.placements]
    assert digests == [START.digest(), mixed.digest(), swapped.digest(), START.digest()]


def test_a_rolled_up_row_has_the_span_and_the_sums_of_its_windows(store: HistoryStore) -> None:
    store.add_windows([window(1), window(1, rank=1)], epoch=5, now=1.0)
    store.add_windows([window(2, steps=6)], epoch=5, now=2.0)
    store.begin_epoch(6, pid=2, now=2.5)
    store.add_windows([window(3), window(2, rank=1, steps=6)], epoch=6, now=3.0)
    while store.roll_up(before=1000.0, span_s=100.0, epoch=6):
        pass
    columns = (
        "first_step, last_step, time, epoch, tokens, rank_steps, num_rank_windows, num_sources, rolled_up"
    )
    with sqlite3.connect(store.path) as connection:
        rows = connection.execute(f"SELECT {columns} FROM windows").fetchall()
    assert rows == [(10, 39, 3.0, 6, 4 + 4 + 8 + 12 + 8, 10 + 10 + 6 + 10 + 6, 5, R, 3)]


def test_a_writer_alone_has_no_thread_and_syncs_the_log_at_checkpoints(store: HistoryStore) -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert "evenroute-checkpoint" not in names
    (level,) = store._connection.execute("PRAGMA synchronous").fetchone()
    assert level == 1  # NORMAL


def test_a_reader_cannot_write(store: HistoryStore) -> None:
    with StoreReader(store.path) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._connection.execute("DELETE FROM epochs")


def test_rows_that_cannot_be_read_are_told_alone(store: HistoryStore) -> None:
    store.add_windows([window(1)], epoch=5, now=1.0)
    store.close()
    with sqlite3.connect(store.path) as connection:
        connection.execute("UPDATE windows SET crc = crc + 1")
    connection.close()
    again = HistoryStore(store.path)
    assert again.loss == f"store {store.path}: 1 rows of windows can't be read (overwritten)"
    again.close()


def test_damage_is_named_by_what_happened_to_the_file(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "run.db") as made:
        for number in range(1, 9):
            made.begin_epoch(number, pid=1, now=0.0)
    path = tmp_path / "run.db"
    whole = path.read_bytes()

    def after(change: Callable[[], object]) -> str | None:
        path.write_bytes(whole)
        made = Custody(path)
        assert not made.changed()
        change()
        assert made.changed()
        return made.damage()

    cut = f"its file was cut or replaced ({len(whole) - 4096} bytes, {len(whole)} were written)"
    assert after(lambda: path.write_bytes(whole[:-4096])) == cut
    (tmp_path / "copy").write_bytes(whole)
    moved = f"its file was cut or replaced ({len(whole)} bytes, {len(whole)} were written)"
    assert after(lambda: (tmp_path / "copy").replace(path)) == moved
    garbled = after(lambda: path.write_bytes(b"\0" * len(whole)))
    assert garbled is not None
    assert garbled.startswith("its file was overwritten by somebody else: ")
    assert after(lambda: os.utime(path, (1, 1))) is None  # as a checkpoint: all is readable
    assert after(path.unlink) == "its file was removed or emptied"


@pytest.mark.parametrize("first", ["the writer", "the checkpoint"])
def test_writer_and_checkpoint_note_at_the_same_time_and_nothing_looks_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """One is between looking at a file and remembering what it saw while the other does both."""
    file, log = tmp_path / "run.db", tmp_path / "run.db-wal"
    file.write_bytes(b"file")
    log.write_bytes(b"log")
    made, look = Custody(file), custody._stamp

    def write() -> None:
        with log.open("ab") as out:
            out.write(b"more")
        made.note()

    def move() -> None:
        with made.lock, file.open("ab") as out:
            out.write(b"more")
            out.flush()
            made.note_file()

    def between(path: str) -> object:
        seen = look(path)
        monkeypatch.setattr(custody, "_stamp", look)
        (move if first == "the writer" else write)()
        return seen

    if first == "the writer":
        made.lock.acquire()  # as while the log is moved: the writer notes the log alone
        with log.open("ab") as out:
            out.write(b"more")
        monkeypatch.setattr(custody, "_stamp", lambda path: (made.lock.release(), between(path))[1])
        made.note()
    else:
        with made.lock, file.open("ab") as out:
            out.write(b"more")
            out.flush()
            monkeypatch.setattr(custody, "_stamp", between)
            made.note_file()
    assert not made.changed()


def test_a_checkpoint_that_fails_is_counted_and_tried_again(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    third = threading.Event()

    class Failing:
        tries = 0

        def execute(self, text: str) -> None:
            self.tries += 1
            if self.tries == 3:
                third.set()
            raise sqlite3.OperationalError("disk I/O error")

        def close(self) -> None:
            pass

    monkeypatch.setattr(checkpoint, "connect", lambda *_, **__: Failing())
    made = Checkpointer(store.path, Custody(store.path), every_s=0.001)
    assert third.wait(60.0 * patience())
    made.close(60.0 * patience())
    assert made.failures >= 3
    assert checkpoint.EVERY_S == 2.0


def test_a_damaged_store_stays_closed_until_the_restart_also_if_its_file_comes_back(
    store: HistoryStore,
) -> None:
    store.add_windows([window(1)], epoch=5, now=1.0)
    log = store.path.with_name("run.db-wal")
    whole = log.read_bytes()
    log.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        with pytest.raises(StoreError, match="nothing is stored or acknowledged until"):
            store.add_windows([window(2)], epoch=5, now=2.0)
        log.write_bytes(whole)
