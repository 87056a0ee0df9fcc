"""Files that evenroute 0.1.0 wrote (tests/data/0.1.0, counts.npy is what went in) open, and go on.

Four ranks on two nodes, 2 layers of 8 experts in 12 slots; six windows, and a weighted plan after the third.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.files.open import open_source, open_sources
from evenroute.eplb.placement.file import load_placement, load_placement_set, update_placement_set
from evenroute.eplb.store.schema import JobRow, PublishedPlacement
from evenroute.eplb.store.writer import HistoryStore, RankWindowRow
from support.command import evenroute

DATA = Path(__file__).resolve().parents[2] / "data" / "0.1.0"
EPOCH = (3 << 20) + 17
COUNTS = np.load(DATA / "counts.npy")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "old"))


@pytest.mark.parametrize("name", ["run.db", "loads.evd"])
def test_histories_are_what_went_in(old: Path, name: str) -> None:
    source = open_source(old / name)
    windows = list(source.windows())
    assert np.array_equal([window.counts for window in windows], COUNTS)
    assert [(window.first_step, window.last_step) for window in windows] == [
        (10 * number, 10 * number + 9) for number in range(6)
    ]
    assert windows[0].tokens == 400
    assert all(window.complete for window in windows)
    assert (source.model, source.phase, source.ep_size, source.num_nodes) == ("toy", "decode", 4, 2)
    start, plan = source.placements
    assert start.placement.shares is None
    assert (plan.epoch, plan.version, plan.policy) == (EPOCH, 1, "weighted")
    assert plan.placement.digest() == load_placement(old / "placement.json")[0].digest()


@pytest.mark.parametrize("name", ["run.db", "loads.evd"])
def test_both_histories_are_shown_alike(old: Path, name: str) -> None:
    outcome = evenroute("inspect", old / name, "--json")
    assert outcome.status == 0, outcome.err
    [facts] = outcome.json["sources"]
    assert facts["num_windows"] == 6
    assert facts["routed"] == COUNTS.sum()
    [_, plan] = facts["placements"]
    assert plan["achieved"] > 0.9
    assert evenroute("inspect", old / name).status == 0
    assert evenroute("replay", old / name, "--interval", 2).status == 0


def test_a_store_is_continued(old: Path) -> None:
    store = HistoryStore(old / "run.db")
    assert store.loss is None
    assert store.last_epoch() == EPOCH
    assert store.jobs()[7] == JobRow("toy", "decode", 2, 8, 12, 4, 2, 2, False)
    newest = store.newest_placement()
    assert newest is not None
    assert store.row(int(newest.placement.row_digests()[0])) is not None
    store.begin_epoch(EPOCH + (1 << 20), pid=2, now=2000.0)
    again, following = (
        [RankWindowRow(7, rank, seq, 10 * seq - 10, 10 * seq - 1, 100, COUNTS[0] // 4) for rank in range(4)]
        for seq in (6, 7)
    )
    receipts = store.add_windows([*again, *following], epoch=EPOCH + (1 << 20), now=2001.0)
    assert [receipt.stored for receipt in receipts] == [False] * 4 + [True] * 4
    late = RankWindowRow(7, 1, 9, 80, 89, 100, COUNTS[0] // 4)
    [gap] = store.add_windows([late], epoch=EPOCH + (1 << 20), now=2002.0)
    assert (gap.stored, gap.missing_before) == (True, 1)
    moves = np.zeros(2, np.int64)
    placement, reason = newest.placement, "restart"
    store.add_placement(PublishedPlacement(2003.0, EPOCH + (1 << 20), 1, placement, moves, "stay", reason))
    newest = store.newest_placement()
    assert newest is not None
    assert newest.policy == "stay"
    store.close()
    source = open_source(old / "run.db")
    windows = list(source.windows())
    assert [window.complete for window in windows] == [True] * 7 + [False]
    counts = [window.counts for window in windows]
    assert np.array_equal(counts[:6], COUNTS)
    assert np.array_equal(counts[6], COUNTS[0] // 4 * 4)


def test_placements_and_sets(old: Path) -> None:
    placement, content = load_placement(old / "placement.json")
    assert placement.shares is not None
    assert (content.model, content.phase, content.epoch, content.version) == ("toy", "decode", EPOCH, 1)
    update_placement_set(old / "set.json", "draft", placement, model="draft")
    found = load_placement_set(old / "set.json")
    assert list(found) == ["decode", "draft", "prefill"]
    assert found["decode"][0].digest() == placement.digest()
    outcome = evenroute("inspect", old / "set.json")
    assert all(f"set.json [{key}]" in outcome.out for key in found), outcome.out


def test_ids_of_tokens(old: Path) -> None:
    [frame] = DumpReader(old / "tokens-rank1.evd").tokens()
    assert (frame.step, frame.rank) == (5, 1)
    assert frame.ids.tolist() == [[[0, 1], [2, 3], [-1, -1]], [[4, 5], [6, 7], [-1, -1]]]
    [source] = open_sources([old / "tokens-rank1.evd"]).sources
    assert source.scope == "rank"
    assert [int(window.counts.sum()) for window in source.windows()] == [8]
