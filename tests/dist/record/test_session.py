"""What a rank does with orders to record: refusals, repetitions, ends, and calls that are wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from support.control_plane import wait_for
from support.pass_rank import EPOCH, FIRST, KEYS, RUN, begin, frames, last_report, order, recorder_in


def test_without_a_folder_of_its_own_a_rank_refuses(tmp_path: Path) -> None:
    recorder = recorder_in(None)
    begin(recorder)
    report = last_report(recorder)
    assert (report.state, report.reason) == ("refused", "agent.record_dir is not set on this rank")


def test_a_recording_never_writes_over_another(tmp_path: Path) -> None:
    rank = begin(recorder_in(tmp_path))
    rank.forward(4)
    rank.done()
    before = (tmp_path / "x-rank1.evd").read_bytes()
    again = recorder_in(tmp_path)
    begin(again, order(6))
    assert last_report(again).state == "refused"
    assert "another --name" in last_report(again).reason
    assert (tmp_path / "x-rank1.evd").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "x-rank1.evd"]


def test_orders_may_be_repeated_and_those_of_others_are_dropped(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.order(msgspec.structs.replace(order(), run=RUN + 1), 0)
    recorder.order(order(), EPOCH + 1)  # below the fence
    assert recorder.session is None
    assert recorder.due(0.0) == []
    rank = begin(recorder)
    session = recorder.session
    for _ in range(3):
        recorder.order(order(), EPOCH)
    assert recorder.session is session
    rank.forward(4)
    rank.tap.finish()
    for _ in range(2):
        recorder.order(order(running=False), EPOCH)
    assert session is not None
    assert session.join(10)
    recorder.order(order(), EPOCH)  # late: what has ended stays so
    assert recorder.session is None
    reports = recorder.due(1.0)
    assert [(report.state, report.passes) for report in reports] == [("ended", 1)]
    assert recorder.due(1.0) == []  # told once
    recorder.order(order(running=False), EPOCH)
    assert len(recorder.due(1.0)) == 1  # asked for again, told again


def test_the_end_of_a_recording_that_is_not_known_is_answered(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    recorder.order(order(9, running=False), EPOCH)
    (report,) = recorder.due(0.0)
    assert (report.recording, report.state, report.passes) == (9, "ended", 0)
    assert list(tmp_path.iterdir()) == []


def test_another_recording_ends_the_one_before_whole(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    kept = rank.forward(4)
    rank.tap.finish()
    recorder.order(order(6, name="y"), EPOCH)
    wait_for(lambda: (tmp_path / "x-rank1.evd").exists(), 10, "the first recording's file")
    assert np.array_equal(frames(tmp_path)[0], kept)
    wait_for(lambda: last_report(recorder).state == "recording", 10, "the second recording")
    second = rank.forward(3)
    rank.done()
    assert np.array_equal(frames(tmp_path, "y")[1], second)


def test_a_wrong_call_ends_the_recording_and_not_the_forward_pass(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    rank.forward(4)
    rank.forward(4)
    rank.tap.add(0, torch.zeros(4, 1, dtype=torch.int32))  # agent.top_k is 2
    rank.forward(4)
    report = rank.done()
    assert "[T, 2 or more] (agent.top_k)" in report.reason
    assert (report.state, report.passes) == ("ended", 1)


def test_an_engine_that_never_tells_its_ids_is_told(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    assert recorder.session is not None
    for step in range(5):
        rank.tap.begin(recorder.session, step, 4, [FIRST.row(i) for i in range(3)], KEYS, switched=False)
        rank.tap.finish()
    report = rank.done()
    assert (report.passes, report.dropped) == (0, 0)
    assert "5 passes came without ids: does the engine call RankAgent.record?" in report.reason


def test_a_refused_recording_leaves_the_one_before_to_be_told(tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    rank.forward(4)
    rank.tap.finish()
    recorder.order(order(running=False), EPOCH)
    wait_for(lambda: last_report(recorder).state == "ended", 10, "its end")
    ended = last_report(recorder)
    recorder.order(order(6), EPOCH)  # of the same name: its files are not written over
    wait_for(lambda: last_report(recorder).state == "refused", 10, "the refusal")
    recorder.due(1.0)
    recorder.order(order(running=False), EPOCH)  # the rebalancer went back to the one before
    assert ended in recorder.due(1.0)
    assert (ended.passes, ended.files) == (1, 1)
    recorder.order(order(), EPOCH)  # a late order: what is over stays so
    assert recorder.due(1.0) == [ended]
    assert recorder.session is None
    assert [path.name for path in tmp_path.iterdir()] == ["x-rank1.evd"]


@pytest.mark.parametrize(
    ("left", "refused"),
    [
        (".x-rank1.evd.4711-7f00.partial", True),
        (".x-rank1.part2.evd.4711-7f00.partial", True),
        ("x-rank1.part7.evd", True),
        (".x-rank11.evd.4711-7f00.partial", False),
        (".xx-rank1.evd.4711-7f00.partial", False),
        ("x.x-rank1.evd", False),
    ],
)
def test_what_a_killed_rank_left_is_neither_removed_nor_mixed_with(
    tmp_path: Path, left: str, refused: bool
) -> None:
    (tmp_path / left).write_bytes(b"all that there is")
    recorder = recorder_in(tmp_path)
    begin(recorder)
    report = last_report(recorder)
    assert report.state == ("refused" if refused else "recording")
    if refused:
        assert report.reason == f"{tmp_path / left} exists: give the recording another --name"
    recorder.close(10.0)
    assert (tmp_path / left).read_bytes() == b"all that there is"
