"""Recordings of passes on one rank: what is routed is what is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from evenroute.dist.engines.torch import RoutedGate
from evenroute.dist.wire.recording import RecordOrder
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.files.open import open_source, open_sources
from support.pass_rank import (
    EPOCH,
    FIRST,
    JOB,
    KEYS,
    RUN,
    SECOND,
    begin,
    frames,
    last_report,
    order,
    recorder_in,
)


@pytest.mark.parametrize("logical", [False, True])
def test_ids_are_exact_over_switches_idle_passes_and_padding(tmp_path: Path, logical: bool) -> None:
    rank = begin(recorder_in(tmp_path))
    expected = {}
    for step in range(12):
        if step == 5:
            rank.switch(SECOND, (EPOCH, 1))
        expected[step] = rank.forward([4, 0, 1, 9][step % 4], logical=logical)
    report = rank.done()
    found = frames(tmp_path)
    assert found.keys() == expected.keys()
    for step, ids in expected.items():
        assert np.array_equal(found[step], ids), step
    assert (report.state, report.passes, report.tokens) == ("ended", 12, 3 * 14)
    assert report.num_bytes == (tmp_path / "x-rank1.evd").stat().st_size
    (start, switch) = DumpReader(tmp_path / "x-rank1.evd").placements()
    assert (start.step, start.epoch, start.version) == (0, 0, 0)
    assert (switch.step, switch.epoch, switch.version) == (5, EPOCH, 1)
    assert switch.placement.digest() == SECOND.digest()


def test_several_calls_a_layer_append_and_rows_that_never_came_are_told(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    session = recorder.session
    assert session is not None
    live = [FIRST.row(layer) for layer in range(3)]
    rank.tap.begin(session, 3, 5, live, KEYS, switched=False)
    ids = torch.arange(3 * 5 * 3).reshape(3, 5, 3) % 8
    for layer in range(3):
        rank.tap.add(layer, ids[layer, :2])
    for layer in range(2):
        rank.tap.add(layer, ids[layer, 2:])
    rank.tap.add_inputs(torch.arange(100, 105), torch.arange(7, 12))
    report = rank.done()
    (frame,) = DumpReader(tmp_path / "x-rank1.evd").tokens()
    assert np.array_equal(frame.ids[:2], ids[:2, :, :2])  # the third column is none of the two routed ones
    assert np.array_equal(frame.ids[2, :2], ids[2, :2, :2])
    assert (frame.ids[2, 2:] == -1).all()
    assert frame.token_ids is not None
    assert frame.positions is not None
    assert frame.token_ids.tolist() == list(range(100, 105))
    assert frame.positions.tolist() == list(range(7, 12))
    assert "lack rows of some layers: 1" in report.reason


def test_rank_0_records_for_all_where_tokens_are_shared(tmp_path: Path) -> None:
    shared = msgspec.structs.replace(JOB, shared_counts=True)
    rank = begin(recorder_in(tmp_path, job=shared, rank=0))
    ids = rank.forward(5)
    rank.done()
    reader = DumpReader(tmp_path / "x-rank0.evd")
    assert (reader.header.scope, reader.header.rank) == ("job", None)
    assert np.array_equal(next(reader.tokens()).ids, ids)
    other = recorder_in(tmp_path, job=shared, rank=1)
    begin(other)
    assert last_report(other).state == "refused"
    assert "rank 0 records for all" in last_report(other).reason


def test_an_adapted_model_tells_what_its_gates_routed() -> None:
    told: list[tuple[int, object]] = []
    agent = SimpleNamespace(record=lambda layer, routed: told.append((layer, routed)))
    routed = SimpleNamespace(weights=torch.ones(2, 2), physical_ids=torch.zeros(2, 2, dtype=torch.int32))
    gate = RoutedGate(torch.nn.Linear(4, 8), lambda *_, **__: routed, 3)  # type: ignore[arg-type]
    gate(torch.ones(2, 4))
    gate.agent = agent  # type: ignore[assignment]
    gate(torch.ones(2, 4))
    assert told == [(3, routed)]


def test_counts_of_passes_are_exact_and_merged_ones_are_counted(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    begin(recorder, order(mode="per_pass"))
    session = recorder.session
    assert session is not None
    counts = np.random.default_rng(0).integers(0, 1 << 20, (4, 3, 8))
    spans = [(10, 10), (11, 11), (12, 14), (15, 15)]
    for number, (first, last) in enumerate(spans):
        session.counts(first, last, 6, counts[number])
    recorder.close(10.0)
    windows = list(DumpReader(tmp_path / "x-rank1.evd").windows())
    assert [(w.first_step, w.last_step, w.tokens) for w in windows] == [(a, b, 6) for a, b in spans]
    assert np.array_equal(np.stack([w.counts for w in windows]), counts)
    report = last_report(recorder)
    assert (report.passes, report.merged, report.dropped) == (6, 2, 0)


def test_parts_are_whole_files_and_read_as_one(tmp_path: Path) -> None:
    rank = begin(recorder_in(tmp_path, part_bytes=5000, rank=1))
    expected = [rank.forward(8) for _ in range(100)]
    report = rank.done()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == report.files > 3
    assert set(names) == {"x-rank1.evd", *(f"x-rank1.part{part}.evd" for part in range(2, report.files + 1))}
    assert max(path.stat().st_size for path in tmp_path.iterdir()) < 5000 + 2 * (3 * 8 * 2 * 2 + 200)
    source = open_source(tmp_path)
    total = sum(window.counts for window in source.windows())
    ids = np.concatenate(expected, axis=1).reshape(3, -1)
    assert np.array_equal(total, [np.bincount(row[row >= 0], minlength=8) for row in ids])
    assert [event.step for event in source.placements] == [0]  # every part repeats it
    (tmp_path / "x-rank1.part3.evd").unlink()
    assert any("part 3 of this recording is missing" in note for note in open_source(tmp_path).notes)
    (tmp_path / "again.evd").write_bytes((tmp_path / "x-rank1.evd").read_bytes())
    assert "part 1 of the recording is also in" in open_sources([tmp_path]).errors[0]


def test_ranks_of_two_recordings_are_not_joined(tmp_path: Path) -> None:
    for number, rank in ((5, 0), (6, 1)):
        wanted = RecordOrder(RUN, EPOCH, number, "per_token", f"x{number}", True)
        passes = begin(recorder_in(tmp_path, rank=rank), wanted)
        passes.forward(4)
        passes.done()
    with pytest.raises(ValueError, match="not of one recording: give the files of one recording"):
        open_source(tmp_path)
