"""The rebalancer's side of recordings of passes: whom it orders, what it keeps, what an operator is told."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import numpy as np

from evenroute.dist.protocol.store import job_row
from evenroute.dist.rebalancer.record_orders import PassOrders
from evenroute.dist.rebalancer.recording import PassRecording, Recorder
from evenroute.dist.wire.control import Done, RankRecording, Recorded, RecordRead, RecordStart, Refused
from evenroute.dist.wire.recording import RecordReport
from evenroute.eplb.store.writer import HistoryStore, RankWindowRow
from evenroute.tools.commands.record import rank_lines, summary_lines
from support.fake_control import status
from support.pass_rank import EPOCH, JOB, RUN, WANTED, View, due


def test_orders_are_repeated_until_every_rank_reports_what_is_wanted() -> None:
    orders = PassOrders()
    assert due(orders, WANTED, 0.0) == [(b"\0", True), (b"\1", True)]
    assert due(orders, WANTED, 0.5) == []
    take = lambda report, wanted: orders.take(report, wanted, View(), EPOCH)  # type: ignore[arg-type] # noqa: E731
    assert take(RecordReport(RUN, 0, 5, "recording", 3), WANTED) is None
    take(RecordReport(RUN, 1, 5, "starting"), WANTED)
    assert due(orders, WANTED, 1.1) == [(b"\1", True)]
    take(RecordReport(RUN, 1, 5, "refused", reason="no"), WANTED)
    assert due(orders, WANTED, 5.0) == []
    stopped = PassRecording(RUN, 5, "per_token", "x", False)
    assert due(orders, stopped, 6.5) == [(b"\0", False)]
    take(RecordReport(RUN, 0, 5, "recording", 9), stopped)  # crossed the order
    assert due(orders, stopped, 6.6) == [(b"\0", False)]
    take(RecordReport(RUN, 0, 5, "ended", 9), stopped)
    assert due(orders, stopped, 9.0) == []
    assert orders.of_ranks(stopped)[0].passes == 9
    again = PassOrders()  # the rebalancer was restarted: ranks are asked, and answer
    assert due(again, stopped, 0.0) == [(b"\0", False), (b"\1", False)]


def test_nobody_is_ordered_for_another_run_or_without_an_epoch_and_only_rank_0_of_shared_tokens() -> None:
    assert due(PassOrders(), WANTED, 0.0, View(run=RUN + 1)) == []
    assert list(PassOrders().due(WANTED, View(), 0, 0.0)) == []  # type: ignore[arg-type]
    assert due(PassOrders(), None, 0.0) == []
    assert due(PassOrders(), WANTED, 0.0, View(shared=True)) == [(b"\0", True)]


def test_a_recording_ends_with_its_run_and_older_stores_are_read(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "run.db") as store:
        store.begin_epoch(EPOCH, pid=1, now=0.0)
        old = '{"run": 77, "started": 1.0, "stopped": null, "per_rank": true}'  # as written before modes were
        store.set_setting("recording", old, epoch=EPOCH)
        recorder = Recorder(store)
        assert (recorder.active, recorder.mode, recorder.passes()) == (True, "stat", None)
        recorder.stop(epoch=EPOCH, now=2.0)
        request = RecordStart(mode="per_token")
        done = recorder.start(request, run=RUN, recording=5, epoch=EPOCH, now=1.7e9)
        assert "mode per_token, files called 20231114-221320" in done.text  # type: ignore[union-attr]
        again = Recorder(store)  # the rebalancer was restarted
        assert again.passes() == PassRecording(RUN, 5, "per_token", "20231114-221320", True)
        assert not again.end_with_run(RUN, epoch=EPOCH, now=3.0)
        assert not again.end_with_run(0, epoch=EPOCH, now=3.0)
        assert again.end_with_run(RUN + 1, epoch=EPOCH, now=3.0)
        assert not again.active
        wanted = again.passes()
        assert wanted is not None
        assert not wanted.running


def test_a_rank_of_an_older_version_is_told_as_one_that_does_not_answer() -> None:
    kept = RankRecording("recording", 5, 50, 1000, 0, 0, 1, "", "host", "/r/x-rank0.evd")
    found = status(2, recording=True, recording_mode="per_token", recording_name="x")
    ranks = [msgspec.structs.replace(found.ranks[0], recording=kept), found.ranks[1]]
    lines = rank_lines(msgspec.structs.replace(found, ranks=ranks))
    assert lines == [
        "rank 1: no answer (is it of an older evenroute version?)",
        "rank 0: recording, 5 passes, 50 tokens, 1 kB in 1 file, host:/r/x-rank0.evd",
    ]
    shared = msgspec.structs.replace(found, ranks=ranks, shared_counts=True)
    assert len(rank_lines(shared)) == 1  # only rank 0 is to record
    assert rank_lines(msgspec.structs.replace(found, recording_mode="stat")) == []


def test_a_recording_that_a_lost_store_forgot_is_ended() -> None:
    orders = PassOrders()
    forgotten = RecordReport(RUN, 1, 99, "recording", 7)
    answer = orders.take(forgotten, WANTED, View(), EPOCH)  # type: ignore[arg-type]
    assert answer is not None
    assert (answer.recording, answer.running) == (99, False)
    assert orders.take(msgspec.structs.replace(forgotten, state="ended"), None, View(), EPOCH) is None  # type: ignore[arg-type]
    for wrong in ({"run": RUN + 1}, {"rank": 2}):
        assert orders.take(msgspec.structs.replace(forgotten, **wrong), None, View(), EPOCH) is None  # type: ignore[arg-type]
    assert orders.of_ranks(WANTED) == {}


def windows(store: HistoryStore, at: float, seq: int) -> None:
    received = [
        RankWindowRow(RUN, rank, seq, 10 * seq, 10 * seq + 9, 5, np.ones((3, 8), np.int64)) for rank in (0, 1)
    ]
    store.add_windows(received, epoch=EPOCH, now=at, keep_rank_detail=True)


def test_a_refused_recording_gives_way_to_the_one_before(tmp_path: Path) -> None:
    with HistoryStore(tmp_path / "run.db") as store:
        store.begin_epoch(EPOCH, pid=1, now=0.0)
        store.set_job(RUN, job_row(JOB), epoch=EPOCH, now=0.0)
        recorder = Recorder(store)
        recorder.start(RecordStart(per_rank=True), run=RUN, recording=5, epoch=EPOCH, now=10.0)
        windows(store, 11.0, 1)
        recorder.stop(epoch=EPOCH, now=12.0)
        before = [recorder.read(RecordRead(rank=rank)) for rank in (None, 1)]
        assert all(isinstance(answer, Recorded) and len(answer.windows) == 1 for answer in before)
        started = recorder.start(RecordStart(mode="per_token"), run=RUN, recording=6, epoch=EPOCH, now=20.0)
        assert isinstance(started, Done)
        assert recorder.keep_from == 10.0  # windows of both stay single
        again = Recorder(store)  # the rebalancer was restarted in between
        told = again.stop(epoch=EPOCH, now=21.0, all_refused=True)
        assert "the one before can still be dumped" in told.text  # type: ignore[union-attr]
        assert [again.read(RecordRead(rank=rank)) for rank in (None, 1)] == before
        assert not again.active
        # One that a rank has begun takes its place, with the detail of its own ranks alone.
        again.start(RecordStart(per_rank=True, mode="per_pass"), run=RUN, recording=7, epoch=EPOCH, now=30.0)
        windows(store, 31.0, 2)
        again.begun(8, epoch=EPOCH)  # another's
        assert len(list(store.rank_windows(RUN))) == 4
        again.begun(7, epoch=EPOCH)
        assert len(list(store.rank_windows(RUN))) == 2
        again.stop(epoch=EPOCH, now=32.0, all_refused=True)
        assert again.passes() == PassRecording(
            RUN, 7, "per_pass", time.strftime("%Y%m%d-%H%M%S", time.gmtime(30.0)), False
        )
        assert again.keep_from == 30.0


def test_nothing_is_ended_before_a_job_is_heard(tmp_path: Path) -> None:
    """In a store whose epoch is not this life's: a write would end the life."""
    with HistoryStore(tmp_path / "run.db") as store:
        store.begin_epoch(EPOCH, pid=1, now=0.0)
        Recorder(store).start(RecordStart(mode="per_token"), run=RUN, recording=5, epoch=EPOCH, now=1.0)
        recorder = Recorder(store)
        answer = recorder.stop(epoch=0, now=2.0)
        assert isinstance(answer, Refused)
        assert "no job is heard in this life of the rebalancer" in answer.reason
        recorder.begun(5, epoch=0)
        assert recorder.active


def test_reports_outlive_a_refused_recording_and_lost_ranks_are_told() -> None:
    orders, view = PassOrders(), View()
    view.ranks[0].heard_at, view.ranks[1].heard_at = 100.0, 80.0
    due(orders, WANTED, 100.0, view)
    for rank, state in ((0, "ended"), (1, "recording")):
        orders.take(RecordReport(RUN, rank, 5, state, 7, files=2, path="/r/x"), WANTED, view, EPOCH)  # type: ignore[arg-type]
    assert not orders.all_refused(WANTED, view)  # type: ignore[arg-type]
    other = PassRecording(RUN, 6, "per_token", "y", True)
    due(orders, other, 100.1, view)
    assert orders.of_ranks(other) == {}
    assert not orders.all_refused(other, view)  # type: ignore[arg-type]
    for rank in (0, 1):
        orders.take(RecordReport(RUN, rank, 6, "refused", reason="no"), other, view, EPOCH)  # type: ignore[arg-type]
    assert orders.all_refused(other, view)  # type: ignore[arg-type]
    found = orders.of_ranks(WANTED)
    assert (found[0].state, found[1].state, found[1].reason) == ("ended", "lost", "not heard for 20 s")
    view.ranks[1].heard_at = 99.0
    assert orders.of_ranks(WANTED)[1].state == "recording"  # it is back
    due(orders, WANTED, 100.2, View(run=RUN + 1))  # the job is gone
    assert orders.of_ranks(WANTED)[1].reason == "its job has ended without a last word of it"


def test_an_operator_is_told_who_never_ended_and_what_stays_unfinished() -> None:
    parts = {
        0: RankRecording("ended", 5, 50, 1000, 0, 0, 1, "", "host", "/r/x-rank0.evd"),
        1: RankRecording("lost", 4, 40, 9000, 0, 0, 3, "not heard for 20 s", "host", "/r/x-rank1.evd"),
        2: RankRecording("recording", 3, 30, 8000, 0, 0, 1, "", "host", "/r/x-rank2.evd"),
        3: None,
    }
    found = status(4, recording=False, recording_mode="per_token", recording_name="x")
    ranks = [msgspec.structs.replace(found.ranks[rank], recording=part) for rank, part in parts.items()]
    ranks[2] = msgspec.structs.replace(ranks[2], heard_s_ago=7.0)
    ranks[3] = msgspec.structs.replace(ranks[3], heard_s_ago=None)
    found = msgspec.structs.replace(found, ranks=ranks)
    assert rank_lines(found) == [
        "rank 1: lost, last told: 4 passes, 40 tokens, 9 kB in 3 files, host:/r/x-rank1.evd and what follows it; "
        "unfinished: .x-rank1*.partial: not heard for 20 s",
        "rank 2: recording, did not end (last heard 7 s ago), last told: 3 passes, 30 tokens, 8 kB in 1 file, "
        "host:/r/x-rank2.evd and what follows it; unfinished: .x-rank2*.partial",
        "rank 3: never heard, what it recorded is not known here",
        "rank 0: ended, 5 passes, 50 tokens, 1 kB in 1 file, host:/r/x-rank0.evd",
    ]
    summary, remedy = summary_lines(found)
    assert summary == "of 4 ranks: 1 ended, 1 lost, 1 not heard of, 1 recording"
    assert ".x-rank*.partial, which `evenroute inspect --unfinished FOLDER` reads" in remedy
    well = msgspec.structs.replace(found, ranks=[ranks[0]])
    assert summary_lines(well) == []
    nobody = msgspec.structs.replace(found, ranks=[])
    assert summary_lines(nobody) == [
        "no rank is heard: their files are x-rank*.evd in the agent.record_dir of each"
    ]
