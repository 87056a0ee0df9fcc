"""The history store: exactly-once receipt, fencing inside the transaction, retention, damage, kill -9."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
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


@pytest.fixture
def store(tmp_path):
    made = HistoryStore(tmp_path / "run.db")
    made.begin_epoch(5, pid=1, now=0.0)
    made.set_job(7, JOB, epoch=5, now=0.0)
    yield made
    made.close()


def window(rank, seq, first, last, value=1, run=7):
    counts = np.full((L, E), value, np.int64)
    counts[0, rank] += seq
    return RankWindowRow(run, rank, seq, first, last, value * E // 2, counts)


def test_each_window_is_counted_once(store):
    both = [window(0, 1, 0, 9), window(1, 1, 0, 9)]
    receipts = store.add_windows(both, epoch=5, now=1.0)
    assert [r.stored for r in receipts] == [True, True]
    again = store.add_windows([both[0]], epoch=5, now=2.0)
    assert [r.stored for r in again] == [False]
    (row,) = store.windows()
    assert row.complete
    assert (row.first_step, row.last_step, row.tokens) == (0, 9, 8)
    np.testing.assert_array_equal(row.counts, both[0].counts + both[1].counts)


def test_the_same_seq_of_another_run_is_another_window(store):
    store.add_windows([window(0, 1, 0, 9)], epoch=5, now=1.0)
    store.set_job(8, JOB, epoch=5, now=1.0)
    receipts = store.add_windows([window(0, 1, 0, 9, run=8)], epoch=5, now=1.0)
    assert receipts[0].stored
    assert len(list(store.windows())) == 2


def test_a_duplicate_inside_one_batch_is_counted_once(store):
    receipts = store.add_windows([window(0, 1, 0, 9)] * 3, epoch=5, now=1.0)
    assert [r.stored for r in receipts] == [True, False, False]
    assert store.total_counts()[0] == 4


def test_a_hole_is_named_and_the_row_is_not_whole(store):
    store.add_windows([window(0, 1, 0, 9), window(1, 1, 0, 9)], epoch=5, now=1.0)
    (receipt,) = store.add_windows([window(0, 4, 30, 39)], epoch=5, now=2.0)
    assert receipt.missing_before == 2
    assert [w.complete for w in store.windows()] == [True, False]
    assert [(s.rank, s.missing, s.last_seq) for s in store.rank_states()] == [(0, 2, 4), (1, 0, 1)]


def test_a_writer_whose_epoch_is_not_the_last_cannot_write(store, tmp_path):
    other = HistoryStore(tmp_path / "run.db")
    other.begin_epoch(6, pid=2, now=1.0)
    placement = Placement.initial(L, E, 10, Topology(R))
    writes = [
        lambda: store.add_windows([window(0, 1, 0, 9)], epoch=5, now=2.0),
        lambda: store.add_event("x", "y", epoch=5, now=2.0),
        lambda: store.keep_row(1, placement.row(0), epoch=5),
        lambda: store.add_placement(
            PublishedPlacement(2.0, 5, 1, placement, np.zeros(L, np.int64), "p", "r")
        ),
    ]
    for write in writes:
        with pytest.raises(StaleEpochError, match="epoch 6 has taken over from epoch 5"):
            write()
    assert list(other.windows()) == []
    assert list(other.placements()) == []
    assert other.events() == []
    with pytest.raises(ValueError, match="epoch: 6 found, expected above"):
        other.begin_epoch(6, pid=3, now=3.0)
    other.close()


def test_placements_come_back_with_shares_and_in_key_order(store):
    placement = Placement.initial(L, E, 10, Topology(R))
    shares = np.array(
        [[65535 if (row == e).sum() == 1 else 0 for e in row] for row in placement.physical_to_logical],
        np.uint16,
    )
    for layer, row in enumerate(placement.physical_to_logical):
        for expert in np.unique(row):
            slots = np.flatnonzero(row == expert)
            if len(slots) == 2:
                shares[layer, slots] = [60000, 5535]
    uneven = Placement(placement.physical_to_logical, E, placement.topology, shares)
    moves = np.arange(L, dtype=np.int64)
    for version, target in ((2, placement), (1, uneven)):
        store.add_placement(
            PublishedPlacement(1.0, 5, version, target, moves, "global", "r", balancedness_before=0.5)
        )
    first, second = store.placements()
    assert (first.version, second.version) == (1, 2)
    assert first.placement.digest() == uneven.digest()
    assert second.placement.digest() == placement.digest()
    newest = store.newest_placement()
    assert newest is not None
    assert newest.version == 2
    assert newest.balancedness_predicted is None
    kept = store.row(int(uneven.row_digests()[0]))
    assert kept is not None
    np.testing.assert_array_equal(kept.slots, uneven.row(0).slots)
    np.testing.assert_array_equal(kept.shares, shares[0])
    assert store.row(12345) is None


def test_retention_sums_rows_and_loses_nothing(store):
    for k in range(10):
        batch = [window(r, k + 1, 10 * k, 10 * k + 9, value=k + 1) for r in range(R)]
        store.add_windows(batch, epoch=5, now=100.0 + 30.0 * k)
    tokens, total = store.total_counts()
    while store.roll_up(before=310.0, span_s=100.0, epoch=5, max_rows=3):
        pass
    rows = list(store.windows())
    # Spans 100..199 and 200..299 hold four and three windows, the span of the bound itself is left alone.
    assert [row.rolled_up for row in rows] == [4, 3, 0, 0, 0]
    assert all(row.complete for row in rows)
    after_tokens, after = store.total_counts()
    assert after_tokens == tokens
    np.testing.assert_array_equal(after, total)
    # Receipt stays idempotent for windows whose row is rolled up.
    assert not store.add_windows([window(0, 1, 0, 9)], epoch=5, now=999.0)[0].stored


def test_a_run_keeps_its_shape_and_another_run_may_have_another(store):
    wide = replace(JOB, num_logical_experts=16, num_slots=20)
    with pytest.raises(ValueError, match="run 7 has shape"):
        store.set_job(7, wide, epoch=5, now=1.0)
    store.set_job(8, wide, epoch=5, now=2.0)
    store.add_windows([window(0, 1, 0, 9)], epoch=5, now=1.0)
    store.add_windows([RankWindowRow(8, 0, 1, 0, 9, 5, np.ones((L, 16), np.int64))], epoch=5, now=2.0)
    assert [row.counts.shape for row in store.windows()] == [(L, E), (L, 16)]
    assert store.job() == wide
    assert store.job(7) == JOB


def test_rank_detail_is_kept_on_request_only(store):
    store.add_windows([window(0, 1, 0, 9)], epoch=5, now=1.0)
    store.add_windows([window(0, 2, 10, 19)], epoch=5, now=1.0, keep_rank_detail=True)
    (detail,) = store.rank_windows()
    assert (detail.rank, detail.seq) == (0, 2)
    store.clear_rank_windows(epoch=5)
    assert list(store.rank_windows()) == []


def test_the_log_is_moved_into_the_file_from_a_thread(tmp_path):
    made = HistoryStore(tmp_path / "run.db", background_checkpoint=True)
    made._checkpointer._every_s = 0.0
    made.begin_epoch(5, pid=1, now=0.0)
    made.set_job(7, JOB, epoch=5, now=0.0)
    before = made.path.stat().st_size
    deadline = time.monotonic() + 60
    seq = 0
    while made.path.stat().st_size == before and time.monotonic() < deadline:
        seq += 1
        made.add_windows([window(0, seq, seq, seq)], epoch=5, now=1.0)
        time.sleep(0.01)
    assert made.path.stat().st_size > before
    assert made._checkpointer.failures == 0
    made.close()
    made.close()
    with StoreReader(tmp_path / "run.db") as reader:
        assert reader.rank_states()[0].num_windows == seq


def test_a_reader_reads_while_the_writer_writes(store):
    with StoreReader(store.path) as reader:
        assert list(reader.windows()) == []
        store.add_windows([window(0, 1, 0, 9)], epoch=5, now=1.0)
        assert len(list(reader.windows())) == 1
        assert reader.job() == JOB
        assert [e.epoch for e in reader.epochs()] == [5]


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_a_damaged_file_is_one_clear_error(store, keep, tmp_path):
    store.add_windows([window(0, 1, 0, 9)], epoch=5, now=1.0)
    store.close()
    data = store.path.read_bytes()
    size = int(len(data) * keep) if isinstance(keep, float) else keep
    damaged = tmp_path / "cut.db"
    damaged.write_bytes(data[:size])

    def read_all():
        with StoreReader(damaged) as reader:
            reader.job(), reader.epochs(), list(reader.windows()), list(reader.placements()), reader.events()

    with pytest.raises(StoreError, match=r"cut\.db"):
        read_all()


def test_overwritten_bytes_are_found_not_shown_as_counts(store):
    store.add_windows([window(0, 1, 0, 9, value=0x1122334455)], epoch=5, now=1.0)
    store.close()
    data = bytearray(store.path.read_bytes())
    at = data.index((0x1122334455).to_bytes(8, "little"))
    data[at : at + 8] = b"\x01" * 8
    store.path.write_bytes(data)
    with StoreReader(store.path) as reader, pytest.raises(StoreError, match="truncated or damaged"):
        list(reader.windows())


def test_absent_unwritable_or_foreign_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        StoreReader(tmp_path / "no.db")
    with pytest.raises(StoreError, match="cannot be opened"):
        HistoryStore(tmp_path / "no" / "run.db")
    foreign = tmp_path / "foreign.db"
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE t (x)")
    connection.commit()
    connection.close()
    for kind in (HistoryStore, StoreReader):
        with pytest.raises(StoreError, match="not an evenroute store"):
            kind(foreign)


def test_a_full_disk_is_an_error_and_the_transaction_is_undone(store):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    wal = Path(f"{store.path}-wal")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (wal.stat().st_size, hard))
        with pytest.raises(StoreError, match="cannot be written"):
            store.add_windows([window(0, 1, 0, 9)], epoch=5, now=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert store.last_seq(7, 0) == 0
    assert store.add_windows([window(0, 1, 0, 9)], epoch=5, now=2.0)[0].stored
    assert store.total_counts()[0] == 4


WRITER = """
import sys, numpy as np
from evenroute.eplb.store.writer import HistoryStore, JobRow, RankWindowRow
store = HistoryStore(sys.argv[1])
epoch = store.last_epoch() + 1
store.begin_epoch(epoch, pid=1, now=0.0)
store.set_job(7, JobRow("m", "prefill", 3, 8, 10, 1, 1, 4, False), epoch=epoch, now=0.0)
seq = store.last_seq(7, 0)
while True:
    seq += 1
    window = RankWindowRow(7, 0, seq, seq, seq, 1, np.ones((3, 8), np.int64))
    store.add_windows([window], epoch=epoch, now=float(seq))
    print(seq, flush=True)
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path):
    path = tmp_path / "run.db"
    for round_ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        acknowledged = 0
        while acknowledged < 10 * (round_ + 1) + round_:
            acknowledged = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split("\n")[:-1]
        process.wait(timeout=60)
        process.stdout.close()
        acknowledged = max([acknowledged, *map(int, rest)])
        with StoreReader(path) as reader:
            stored = reader.rank_states()[0].last_seq
            tokens, counts = reader.total_counts()
        assert acknowledged <= stored <= acknowledged + 1
        assert tokens == stored
        assert (counts == stored).all()


def test_a_store_is_for_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = HistoryStore(tmp_path / "run.db")
        store.begin_epoch(5, pid=1, now=0.0)
        files = list(tmp_path.iterdir())
        assert {path.suffix for path in files} >= {".db", ".db-wal"}
        assert [path.name for path in files if path.stat().st_mode & 0o077] == []
    finally:
        os.umask(before)
