"""`evenroute backup`: whole at one moment while the store is written, and never over another file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from evenroute.eplb.store.backup import back_up
from evenroute.eplb.store.reader import StoreReader
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.live_page import Story


@pytest.fixture
def story(tmp_path: Path) -> Story:
    made = Story(tmp_path / "run.db", layers=2, experts=8, slots=12, ranks=4)
    made.tell(0.5)
    return made


def tokens(path: Path) -> int:
    with StoreReader(path) as reader:
        return reader.total_counts()[0]


def test_the_copy_holds_what_the_store_holds(story: Story, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    outcome = evenroute_without("torch", "backup", story.path, copy)
    assert outcome.status == 0, outcome.err
    assert f"{story.seq:,} windows, {story.version} placements, 1 runs" in outcome.out
    assert tokens(copy) == tokens(story.path) == 40_000 * story.seq
    assert copy.stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in tmp_path.iterdir() if "copy" in path.name) == ["copy.db"]
    assert evenroute("inspect", copy).status == 0


def test_a_store_that_is_written_meanwhile(story: Story, tmp_path: Path) -> None:
    """Each copy is one moment: all counts of a window or none, and the writer goes on."""
    ending = threading.Event()

    def write() -> None:
        while not ending.is_set():
            story.window(time.time(), 0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        sizes = []
        for number in range(5):
            found = back_up(story.path, tmp_path / f"{number}.db")
            sizes.append(found.windows)
            assert tokens(tmp_path / f"{number}.db") == 40_000 * found.windows
    finally:
        ending.set()
        writer.join(60)
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0]


def test_wrong_use(story: Story, tmp_path: Path) -> None:
    there = tmp_path / "there.db"
    there.write_text("mine")
    assert_one_line_error(evenroute("backup", story.path, there), "exists; a backup is a new file")
    assert there.read_text() == "mine"
    assert_one_line_error(evenroute("backup", tmp_path / "absent.db", tmp_path / "x.db"), "no such file")
    (tmp_path / "no.db").write_bytes(b"no store" * 1000)
    assert_one_line_error(evenroute("backup", tmp_path / "no.db", tmp_path / "x.db"), "no.db")
    assert_one_line_error(evenroute("backup", story.path, tmp_path / "no" / "x.db"), "does not exist")
    assert not [path for path in tmp_path.iterdir() if "x.db" in path.name]
