"""A store is data. What would run code, or give rows without end, is refused before or while it is read."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.store.reader import StoreReader
from evenroute.eplb.store.schema import JobRow, RankWindowRow, StoreError
from evenroute.eplb.store.writer import HistoryStore
from support.command import assert_one_line_error, evenroute

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
COLUMNS = (
    "7 run, i last_step, i first_step, 1.0 time, 1 epoch, 1 tokens, 1 rank_steps, 1 num_rank_windows, "
    "1 num_sources, 0 rolled_up, zeroblob(64) counts, NULL crc"
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = HistoryStore(tmp_path / "run.db")
    made.begin_epoch(1, pid=1, now=0.0)
    made.set_job(7, JobRow("toy", "", 2, 4, 4, 1, 1, 1, False), epoch=1, now=0.0)
    for seq in range(1, 40):
        window = RankWindowRow(7, 0, seq, seq, seq, 4, np.full((2, 4), 1))
        made.add_windows([window], epoch=1, now=float(seq))
    made.close()
    return tmp_path / "run.db"


@pytest.mark.parametrize(
    ("code", "what"),
    [
        (
            f"DROP TABLE windows; CREATE VIEW windows AS {ENDLESS} SELECT {COLUMNS} FROM n",
            "'windows' is a view",
        ),
        (
            f"DROP TABLE events; CREATE VIEW events AS {ENDLESS} SELECT 1 id, 1.0 time, 1 epoch, 'x' kind, '' text "
            "FROM n WHERE 0",
            "'events' is a view",
        ),
        ("CREATE TRIGGER t AFTER INSERT ON epochs BEGIN SELECT 1; END", "'t' is a trigger"),
        ("CREATE VIRTUAL TABLE v USING fts5(text)", "is a shadow, expected"),
        ("ALTER TABLE windows ADD COLUMN more AS (hex(zeroblob(100000)))", "'more' of 'windows' is computed"),
    ],
)
def test_code_in_the_file_is_not_run(store: Path, code: str, what: str) -> None:
    connection = sqlite3.connect(store)
    try:
        connection.executescript(code)
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite cannot: {error}")
    connection.close()
    for words in (["inspect"], ["replay"], ["advise"]):
        assert_one_line_error(evenroute(words[0], store, *words[1:]), "run.db", what)
    with pytest.raises(StoreError, match="expected"):
        HistoryStore(store)


def test_more_rows_than_the_file_holds_are_damage(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are reached twice make rows without end: more than the file has bytes for is never read."""
    reader = StoreReader(store)
    assert len(list(reader.windows())) == 39
    monkeypatch.setattr(StoreReader, "_file_bytes", lambda _: 64 * 39)
    with pytest.raises(StoreError, match="again and again"):
        list(reader.windows())
    reader.close()
