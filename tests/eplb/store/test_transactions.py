"""A transaction that fails at any of its statements keeps nothing, and what comes after it is right."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.schema import PublishedPlacement
from evenroute.eplb.store.writer import HistoryStore, JobRow, RankWindowRow, StaleEpochError, StoreError
from support.failing_connection import FailingConnection

L, E, R = 2, 4, 200
JOB = JobRow("m", "", L, E, 8, 2, 1, 2, False)


def window(rank: int, seq: int, last: int, value: int = 1) -> RankWindowRow:
    return RankWindowRow(7, rank, seq, last - 9, last, 4, np.full((L, E), value, np.int64))


def opened(path: Path) -> tuple[HistoryStore, FailingConnection]:
    store = HistoryStore(path)
    connection = FailingConnection(store._connection)
    store._connection = connection  # type: ignore[assignment]
    store.begin_epoch(5, pid=1, now=0.0)
    store.set_job(7, JOB, epoch=5, now=0.0)
    for last in (9, 19):
        store.add_windows([window(rank, (last + 1) // 10, last) for rank in (0, 1)], epoch=5, now=float(last))
    return store, connection


def contents(store: HistoryStore) -> list[Any]:
    """Everything the tables hold."""
    names = (
        "jobs",
        "epochs",
        "windows",
        "rank_state",
        "rank_windows",
        "placements",
        "placement_rows",
        "events",
    )
    return [store._connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2").fetchall() for name in names]


PLACEMENT = Placement.initial(L, E, 8, Topology(2))
WRITES: dict[str, Callable[[HistoryStore], Any]] = {
    "windows": lambda s: s.add_windows([window(0, 3, 19), window(1, 3, 29)], epoch=5, now=30.0, keep_rank_detail=True),
    "placement": lambda s: s.add_placement(PublishedPlacement(1.0, 5, 1, PLACEMENT, np.zeros(L, np.int64), '', '')),
    "row": lambda s: s.keep_row(99, PLACEMENT.row(0), epoch=5),
    "roll-up": lambda s: s.roll_up(before=1e6, span_s=1000.0, epoch=5),
    "job": lambda s: s.set_job(8, JOB, epoch=5, now=1.0),
    "event": lambda s: s.add_event("a", "b", epoch=5, now=1.0),
    "epoch": lambda s: s.begin_epoch(6, pid=1, now=1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_kept_whichever_statement_fails(name: str, tmp_path: Path) -> None:
    store, connection = opened(tmp_path / "run.db")
    before = contents(store)
    for number in range(100):
        connection.fail_at(number)
        try:
            WRITES[name](store)
        except StoreError:
            connection.heal()
            assert contents(store) == before, f"statement {number}"
            continue
        break
    assert number >= 2, "the epoch check and the write are statements of their own"
    connection.heal()
    whole, _ = opened(tmp_path / "whole.db")
    WRITES[name](whole)
    assert repr(contents(store)[1:]).count("\\") == repr(contents(whole)[1:]).count("\\") or name == "epoch"
    # What comes next is counted on what is there, not on what was rolled back.
    epoch = store.last_epoch()
    for kept in (store, whole):
        kept.add_windows([window(0, 9, 19, value=5)], epoch=epoch, now=40.0)
    assert [w.counts.tolist() for w in store.windows()] == [w.counts.tolist() for w in whole.windows()]
    assert store.total_counts()[0] == whole.total_counts()[0]


def test_windows_that_join_a_row_after_a_failure_or_a_roll_up_are_added_once(tmp_path: Path) -> None:
    store, connection = opened(tmp_path / "run.db")
    connection.fail_on("COMMIT")
    with pytest.raises(StoreError):
        store.add_windows([window(0, 3, 19)], epoch=5, now=20.0)
    connection.heal()
    store.add_windows([window(0, 3, 19)], epoch=5, now=20.0)
    assert int(store.total_counts()[1].sum()) == 5 * L * E  # type: ignore[union-attr]
    assert store.roll_up(before=1e6, span_s=1000.0, epoch=5) == 1
    store.add_windows([window(1, 3, 19)], epoch=5, now=21.0)
    assert int(store.total_counts()[1].sum()) == 6 * L * E  # type: ignore[union-attr]


def test_a_batch_of_more_ranks_than_a_query_asks_for_is_stored_once(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "run.db") as store:
        store.begin_epoch(5, pid=1, now=0.0)
        store.set_job(7, JOB, epoch=5, now=0.0)
        batch = [window(rank, 1, 9) for rank in range(R)]
        for expected in (R, 0):
            receipts = store.add_windows(batch, epoch=5, now=1.0)
            assert sum(receipt.stored for receipt in receipts) == expected
        assert int(store.total_counts()[1].sum()) == R * L * E  # type: ignore[union-attr]


def test_the_epoch_is_checked_inside_the_transaction(tmp_path: Path) -> None:
    store, connection = opened(tmp_path / "run.db")
    other = sqlite3.connect(tmp_path / "run.db")

    def take_over() -> None:
        other.execute("INSERT INTO epochs VALUES (6, 0.0, 2, 'elsewhere')")
        other.commit()

    connection.before_begin = take_over  # the last moment before the transaction
    with pytest.raises(StaleEpochError):
        store.add_windows([window(0, 3, 29)], epoch=5, now=30.0)
    assert store.last_seq(7, 0) == 2
    other.close()
