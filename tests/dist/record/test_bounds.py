"""Recordings of passes stay within their memory and their folder, whatever the disk does; routing never waits."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from evenroute.dist.record.files import DumpFiles
from evenroute.dist.wire.recording import OVER
from evenroute.eplb.dump.reader import DumpReader
from support.command import assert_one_line_error, evenroute
from support.control_plane import wait_for
from support.pass_rank import begin, frames, last_report, order, recorder_in


def test_a_stuck_disk_costs_passes_and_not_a_moment_of_routing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, real = threading.Event(), DumpFiles.add_tokens

    def stuck(self: DumpFiles, *arguments: object) -> None:
        assert free.wait(60)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DumpFiles, "add_tokens", stuck)
    recorder = recorder_in(tmp_path, buffer_bytes=64 * 1024)
    rank = begin(recorder)
    expected, slowest = {}, 0.0
    for step in range(300):
        began = time.perf_counter()
        expected[step] = rank.forward(32)
        slowest = max(slowest, time.perf_counter() - began)
    held = last_report(recorder)
    assert held.passes == 0
    # A pass takes 3 x 32 x 2 ids of 2 bytes and room for two int32 a row.
    assert 300 - held.dropped <= 64 * 1024 // (3 * 32 * 2 * 2 + 2 * 4 * 32) + 1
    assert slowest < 5  # the writer is stuck all the while
    free.set()
    report = rank.done()
    found = frames(tmp_path)
    assert len(found) == report.passes > 50
    assert report.passes + report.dropped == 300
    for step, ids in found.items():
        assert np.array_equal(ids, expected[step]), step
    notes = DumpReader(tmp_path / "x-rank1.evd").totals.notes
    assert notes == [f"passes dropped: {report.dropped} (the disk did not keep up, or they were too large)"]


def test_counts_that_wait_for_a_stuck_disk_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, real = threading.Event(), DumpFiles.add_window

    def stuck(self: DumpFiles, *arguments: object) -> None:
        assert free.wait(60)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DumpFiles, "add_window", stuck)
    recorder = recorder_in(tmp_path, buffer_bytes=4800)
    begin(recorder, order(mode="per_pass"))
    assert recorder.session is not None
    for step in range(500):
        recorder.session.counts(step, step, 1, np.full((3, 8), step))
    free.set()
    recorder.close(10.0)
    report = last_report(recorder)
    assert report.dropped >= 500 - 4800 // 48 - 1
    assert report.passes + report.dropped == 500


def test_a_pass_larger_than_the_memory_is_dropped_and_told(tmp_path: Path) -> None:
    rank = begin(recorder_in(tmp_path, buffer_bytes=8192))
    kept = rank.forward(10)
    rank.forward(400)
    report = rank.done()
    assert (report.passes, report.dropped) == (1, 1)
    assert "400 rows does not fit a quarter of agent.record_buffer_bytes" in report.reason
    assert np.array_equal(frames(tmp_path)[0], kept)


def test_the_folder_never_holds_more_than_its_limit(tmp_path: Path) -> None:
    room = 300_000
    recorder = recorder_in(tmp_path, part_bytes=30_000, max_bytes=room)
    rank = begin(recorder)
    for _ in range(400):
        rank.forward(64)
        if recorder.session is None or not recorder.session.accepts:
            break
        time.sleep(0.001)
    wait_for(lambda: last_report(recorder).state in OVER, 10, "the end at the limit")
    report = last_report(recorder)
    assert (report.state, report.reason) == ("ended", f"agent.record_max_bytes {room:,} reached")
    used = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert room - 5000 < used < room + 2000
    assert len(frames(tmp_path)) == report.passes
    rank.forward(64)  # routing goes on
    refused = recorder_in(tmp_path, max_bytes=room)
    begin(refused, order(6, name="y"))
    assert last_report(refused).state == "refused"
    assert "remove old ones" in last_report(refused).reason
    other = recorder_in(tmp_path, max_bytes=room, rank=0)  # another rank's limit is its own
    begin(other, order(6, name="y"))
    assert last_report(other).state == "recording"
    other.close(10.0)


def test_a_full_disk_ends_the_recording_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    rank.forward(4)
    monkeypatch.setattr(DumpFiles, "add_tokens", full)
    rank.forward(4)
    wait_for(lambda: last_report(recorder).state in OVER, 10, "its end")
    rank.forward(4)
    report = rank.done()
    assert (report.state, report.reason) == ("failed", "No space left on device")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Files may not grow beyond this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_what_fits_on_a_disk_that_fills_is_whole_and_readable(tmp_path: Path) -> None:
    rank = begin(recorder_in(tmp_path))
    expected = []
    with largest_file(20_000):
        for _ in range(400):
            expected.append(rank.forward(8))
            time.sleep(0.0002)
        report = rank.done()
    assert report.state == "failed"
    assert "File too large" in report.reason
    (path,) = tmp_path.iterdir()
    assert 15_000 < path.stat().st_size <= 20_000
    found = frames(tmp_path)
    assert sorted(found) == list(range(len(found)))
    assert report.passes - 8 <= len(found) <= report.passes
    for step, ids in found.items():
        assert np.array_equal(ids, expected[step])
    assert evenroute("inspect", tmp_path).status == 0
    assert any("File too large" in note for note in DumpReader(path).totals.notes)


def test_a_part_that_cannot_be_finished_stays_and_is_read_on_request(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    for _ in range(20):
        rank.forward(4)
    rank.tap.finish()
    wait_for(lambda: last_report(recorder).passes == 20, 10, "20 passes in the file")
    with largest_file(64):  # not even the end can be written any more
        report = rank.done()
    assert report.state == "failed"
    assert "File too large" in report.reason
    assert "stays unfinished: `evenroute inspect --unfinished` reads it" in report.reason
    (left,) = tmp_path.iterdir()
    assert left.name in report.reason
    told = evenroute("inspect", tmp_path)
    assert_one_line_error(told, str(left), "was left by a process that ended", "--unfinished reads it")
    facts = evenroute("inspect", tmp_path, "--unfinished", "--json").json
    assert facts["sources"][0]["num_windows"] >= 12


def test_a_finished_part_counts_once_where_the_next_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = recorder_in(tmp_path, part_bytes=5000)
    rank = begin(recorder)
    monkeypatch.setattr("evenroute.dist.record.files.DumpWriter", full)
    for _ in range(100):
        rank.forward(8)
    wait_for(lambda: last_report(recorder).state in OVER, 10, "its end")
    report = rank.done()
    (kept,) = tmp_path.iterdir()
    assert (report.state, report.reason, report.files) == ("failed", "No space left on device", 1)
    assert report.num_bytes == kept.stat().st_size
