"""What version 0.1.0 wrote is opened, shown right and continued: its store, dumps and placement files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.files.open import open_loads
from evenroute.eplb.placement.file import load_placement, load_placement_set
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.writer import HistoryStore, RankWindowRow, StoreReader

OLD = Path(__file__).resolve().parents[2] / "data" / "0.1.0"
L, E, P, R, RUN = 2, 8, 10, 2, 77
EPOCH = (1 << 20) + 12345
SECOND = [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 0, 4]]


def counts(rank: int, seq: int) -> np.ndarray:
    """What the script that made the files counted."""
    return np.arange(L * E).reshape(L, E) * (seq + 1) + rank


def window(rank: int, seq: int) -> RankWindowRow:
    return RankWindowRow(RUN, rank, seq, 10 * seq - 10, 10 * seq - 1, 200, counts(rank, seq))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD / "run.db", tmp_path))


def test_a_store_is_shown_right(path: Path) -> None:
    with StoreReader(path) as store:
        job = store.job(RUN)
        assert job is not None
        assert (job.model, job.phase, job.num_slots, job.top_k) == ("tiny-moe", "decode", P, 2)
        assert [(row.epoch, row.pid) for row in store.epochs()] == [(EPOCH, 4242)]
        rows = list(store.windows())
        assert [(row.first_step, row.last_step, row.complete) for row in rows] == [
            (0, 9, True),
            (10, 19, True),
            (20, 29, False),
        ]
        for seq, row in enumerate(rows, 1):
            expected = counts(0, seq) + (counts(1, seq) if seq < 3 else 0)
            np.testing.assert_array_equal(row.counts, expected)
        first, second = store.placements()
        assert first.placement.digest() == Placement.initial(L, E, P, Topology(R)).digest()
        assert second.placement.physical_to_logical.tolist() == SECOND
        assert second.placement.shares is not None
        assert second.placement.shares[0, [0, 8]].tolist() == [40000, 25535]
        assert (second.policy, second.balancedness_predicted) == ("incremental", 0.9)


def test_a_store_is_continued_by_a_later_life(path: Path) -> None:
    store = HistoryStore(path)
    try:
        later = (2 << 20) + 1
        assert store.last_epoch() == EPOCH
        store.begin_epoch(later, pid=1, now=1.1e9)
        again, rest = store.add_windows([window(0, 3), window(1, 3)], epoch=later, now=1.1e9)
        assert (again.stored, rest.stored, rest.missing_before) == (False, True, 0)
        (gap,) = store.add_windows([window(1, 5)], epoch=later, now=1.1e9)
        assert (gap.stored, gap.missing_before) == (True, 1)
        placement = list(store.placements())[-1].placement
        moves = np.zeros(L, np.int64)
        store.add_placement(
            placement, epoch=later, version=1, now=1.1e9, moves=moves, policy="stay", reason="restart"
        )
        assert store.roll_up(before=1.05e9, span_s=3600.0, epoch=later) > 0
    finally:
        store.close()
    with StoreReader(path) as found:
        expected = sum(counts(rank, seq) for rank in range(R) for seq in (1, 2, 3)) + counts(1, 5)
        np.testing.assert_array_equal(sum(row.counts for row in found.windows()), expected)
        assert [(row.epoch, row.version) for row in found.placements()] == [
            (EPOCH, 1),
            (EPOCH, 2),
            (later, 1),
        ]


def test_a_store_is_a_source_of_loads(path: Path) -> None:
    (source,) = open_loads([path])
    total = sum(window.counts for window in source.open_windows())
    np.testing.assert_array_equal(
        total, sum(counts(rank, seq) for rank in range(R) for seq in (1, 2, 3)) - counts(1, 3)
    )
    assert (source.ep_size, source.num_slots, source.model) == (R, P, "tiny-moe")


def test_dumps_are_read_with_their_placement_and_tokens() -> None:
    dump = DumpReader(OLD / "counts.dump")
    windows = list(dump.windows())
    for seq, row in enumerate(windows, 1):
        np.testing.assert_array_equal(row.counts, counts(0, seq))
    assert [(row.first_step, row.last_step, row.tokens) for row in windows] == [
        (0, 9, 200),
        (10, 19, 200),
        (20, 29, 200),
    ]
    (event,) = dump.placements()
    assert (event.epoch, event.version, event.placement.physical_to_logical.tolist()) == (EPOCH, 2, SECOND)
    (frame,) = DumpReader(OLD / "tokens.dump").tokens()
    assert (frame.step, frame.rank) == (5, 1)
    assert frame.ids.tolist() == [[[0, 1], [2, 3], [-1, -1]], [[4, 5], [6, 7], [-1, -1]]]
    assert frame.token_ids is not None
    assert frame.token_ids.tolist() == [9, 8, 0]


def test_placement_files_are_read_alone_and_in_a_set() -> None:
    placement, content = load_placement(OLD / "placement.json")
    assert placement.physical_to_logical.tolist() == SECOND
    assert (content.model, content.epoch, content.version) == ("tiny-moe", EPOCH, 2)
    assert content.digests == json.loads((OLD / "placement.json").read_text())["digests"]
    ((key, (again, _)),) = load_placement_set(OLD / "placements.json").items()
    assert (key, again.digest()) == ("decode-2", placement.digest())
