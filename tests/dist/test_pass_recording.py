"""Recordings of passes on one rank: what is routed is written, within stated bounds, and routing never waits."""

from __future__ import annotations

import itertools
import random
import resource
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from evenroute.dist.adapter_torch import RoutedGate
from evenroute.dist.control import (
    RankRecording,
    RecordStart,
    StatusRequest,
    decode_order,
    decode_request,
    encode_control,
)
from evenroute.dist.messages import JobShape, MessageError
from evenroute.dist.pass_files import PassFiles
from evenroute.dist.pass_messages import OVER, RecordOrder, RecordReport
from evenroute.dist.pass_orders import PassOrders
from evenroute.dist.pass_recorder import PassRecorder, RecorderSettings
from evenroute.dist.pass_tap import PassArena, PassTap
from evenroute.dist.recording import PassRecording, Recorder
from evenroute.eplb.dump_reader import DumpReader
from evenroute.eplb.foreign_open import open_source, open_sources
from evenroute.eplb.placement import Placement
from evenroute.eplb.store import HistoryStore
from evenroute.eplb.topology import Topology
from evenroute.tools.cmd_record import rank_lines
from support.control_plane import wait_for
from support.fake_control import status

RUN, EPOCH = 77, 1 << 20
JOB = JobShape(3, 8, 12, 2, 1, 2, False, "pass")
CPU = torch.device("cpu")
FIRST = Placement.initial(3, 8, 12, Topology(2))
SECOND = Placement(np.tile(np.array([7, 6, 5, 4, 3, 2, 1, 0, 5, 4, 3, 2], np.int32), (3, 1)), 8, Topology(2))
KEYS = ((0, 0),) * 3


def order(number: int = 5, *, mode: str = "per_token", name: str = "x", running: bool = True) -> RecordOrder:
    return RecordOrder(RUN, EPOCH, number, mode, name, running)  # type: ignore[arg-type]


def recorder_in(folder: Path | None, **changes: object) -> PassRecorder:
    known = {
        "run": RUN,
        "rank": 1,
        "job": JOB,
        "folder": folder,
        "buffer_bytes": 1 << 20,
        "part_bytes": 1 << 20,
        "max_bytes": 1 << 22,
    }
    settings = RecorderSettings(**(known | changes))  # type: ignore[arg-type]
    return PassRecorder(settings, lambda size: PassArena(size, CPU), lambda: None)


class Rank:
    """The forward thread of a rank, with a placement that may switch between steps."""

    def __init__(self, recorder: PassRecorder) -> None:
        self.recorder = recorder
        self.tap = PassTap(recorder.settings.job, CPU)
        self.placement, self.keys = FIRST, KEYS
        self.switched = False
        self.step = 0

    def switch(self, placement: Placement, key: tuple[int, int]) -> None:
        self.placement, self.keys, self.switched = placement, (key,) * 3, True

    def forward(self, rows: int, seed: int | None = None, *, logical: bool = False) -> np.ndarray:
        """One pass of random ids; returns them as logical ids [L, T, K]."""
        if self.tap.open:
            self.tap.finish()
        session = self.recorder.session
        if session is not None and session.accepts:
            live = [self.placement.row(layer) for layer in range(3)]
            self.tap.begin(session, self.step, rows, live, self.keys, switched=self.switched)
            self.switched = False
        rng = np.random.default_rng(self.step if seed is None else seed)
        slots = rng.integers(-1, 12, (3, rows, 2)).astype(np.int32)
        ids = np.take_along_axis(
            self.placement.physical_to_logical[:, None, :].repeat(rows, 1), slots.clip(0), axis=2
        )
        ids[slots < 0] = -1
        for layer in range(3):
            made = SimpleNamespace(
                logical_ids=torch.from_numpy(ids[layer]) if logical else None,
                physical_ids=torch.from_numpy(slots[layer]),
                top_k=2,
                num_shared=0,
            )
            self.tap.add(layer, made)
        self.step += 1
        return ids

    def done(self) -> RecordReport:
        """Finish the pass and the recording; its report."""
        if self.tap.open:
            self.tap.finish()
        self.recorder.close(10.0)
        return last_report(self.recorder)


def last_report(recorder: PassRecorder) -> RecordReport:
    assert recorder._last is not None
    return recorder._last.report()


def begin(recorder: PassRecorder, first: RecordOrder | None = None) -> Rank:
    recorder.order(order() if first is None else first, 0)
    wait_for(lambda: last_report(recorder).state != "starting", 10, "the recording's start")
    return Rank(recorder)


def frames(folder: Path, name: str = "x", rank: int = 1) -> dict[int, np.ndarray]:
    found: dict[int, np.ndarray] = {}
    for path in sorted(folder.glob(f"{name}-rank{rank}*.evd")):
        for frame in DumpReader(path).tokens():
            assert frame.step not in found
            assert frame.rank == rank
            found[frame.step] = frame.ids
    return found


# --------------------------------------------------------------------------------------- what is written


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


# ------------------------------------------------------------------------------------------------ bounds


def test_a_stuck_disk_costs_passes_and_not_a_moment_of_routing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, real = threading.Event(), PassFiles.add_tokens

    def stuck(self: PassFiles, *arguments: object) -> None:
        assert free.wait(60)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PassFiles, "add_tokens", stuck)
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
    free, real = threading.Event(), PassFiles.add_window

    def stuck(self: PassFiles, *arguments: object) -> None:
        assert free.wait(60)
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PassFiles, "add_window", stuck)
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


# ---------------------------------------------------------------------------------- refusals and orders


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


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "/etc/x", ".hidden", "a b", "a\n", "x" * 65, "a\0b", "..", "-x"]
)
def test_a_name_is_never_a_path(name: str) -> None:
    frame = msgspec.msgpack.encode({**msgspec.to_builtins(order()), "name": name})
    with pytest.raises(MessageError, match="name"):
        decode_order(frame)
    if name:
        with pytest.raises(MessageError, match="name"):
            decode_request(encode_control(RecordStart(mode="per_token", name=name)))


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


def test_a_full_disk_ends_the_recording_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = recorder_in(tmp_path)
    rank = begin(recorder)
    rank.forward(4)
    monkeypatch.setattr(PassFiles, "add_tokens", full)
    rank.forward(4)
    wait_for(lambda: last_report(recorder).state in OVER, 10, "its end")
    rank.forward(4)
    report = rank.done()
    assert (report.state, report.reason) == ("failed", "No space left on device")


def test_a_part_that_cannot_be_finished_leaves_nothing(tmp_path: Path) -> None:
    rank = begin(recorder_in(tmp_path))
    rank.forward(4)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))  # what is buffered cannot be written any more
        report = rank.done()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert report.state == "failed"
    assert "File too large" in report.reason
    assert list(tmp_path.iterdir()) == []


def test_a_finished_part_counts_once_where_the_next_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = recorder_in(tmp_path, part_bytes=5000)
    rank = begin(recorder)
    monkeypatch.setattr("evenroute.dist.pass_files.DumpWriter", full)
    for _ in range(100):
        rank.forward(8)
    wait_for(lambda: last_report(recorder).state in OVER, 10, "its end")
    report = rank.done()
    (kept,) = tmp_path.iterdir()
    assert (report.state, report.reason, report.files) == ("failed", "No space left on device", 1)
    assert report.num_bytes == kept.stat().st_size


def test_ranks_of_two_recordings_are_not_joined(tmp_path: Path) -> None:
    for number, rank in ((5, 0), (6, 1)):
        wanted = RecordOrder(RUN, EPOCH, number, "per_token", f"x{number}", True)
        passes = begin(recorder_in(tmp_path, rank=rank), wanted)
        passes.forward(4)
        passes.done()
    with pytest.raises(ValueError, match="not of one recording: give the files of one recording"):
        open_source(tmp_path)


# ------------------------------------------------------------------------------- the rebalancer's side


class View:
    """The part of a `RunView` that orders need."""

    def __init__(self, ranks: int = 2, *, shared: bool = False, run: int = RUN) -> None:
        self.run = run
        self.job = msgspec.structs.replace(JOB, shared_counts=shared)
        self.ranks = {rank: SimpleNamespace(peer=bytes([rank])) for rank in range(ranks)}


WANTED = PassRecording(RUN, 5, "per_token", "x", True)


def due(orders: PassOrders, wanted: PassRecording | None, now: float, view: View | None = None) -> list:
    return [(p, o.running) for p, o in orders.due(wanted, view or View(), EPOCH, now)]  # type: ignore[arg-type]


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


def test_control_messages_of_another_version_are_named() -> None:
    for frame, decode in (
        (encode_control(StatusRequest(protocol=1)), decode_request),
        (encode_control(StatusRequest(protocol=3)), decode_request),
        (msgspec.msgpack.encode({"type": "new-thing", "protocol": 3}), decode_request),
        (encode_control(msgspec.structs.replace(order(), protocol=3)), decode_order),
        (
            msgspec.msgpack.encode({**msgspec.to_builtins(order()), "mood": "new", "protocol": 9}),
            decode_order,
        ),
    ):
        with pytest.raises(MessageError, match=r"control protocol: found \d, expected 2"):
            decode(frame)


# ----------------------------------------------------------------------------------------------- fuzzing


ODD = [
    0,
    1,
    -1,
    2**62,
    2**63,
    "",
    "..",
    "/",
    "a/../../b",
    "per_pass",
    "stat",
    True,
    None,
    1.5,
    b"x",
    "x\n",
    "Z" * 64,
    [],
    {},
]


def damaged(rng: random.Random, good: RecordOrder) -> bytes:
    """A frame with a few bytes changed, or with a field of another value."""
    if rng.random() < 0.5:
        fields = msgspec.to_builtins(good)
        fields[rng.choice(list(fields))] = rng.choice(ODD)
        return msgspec.msgpack.encode(fields)
    data = bytearray(encode_control(good))
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 0x2E, 0x2F, 0x7F, 0x80, 0xC0, 0xFF))
        elif kind == 2:
            data[at:at] = rng.choice((b"../", b"/", b"\0", b"\xff"))
        else:
            del data[at]
    return bytes(data)


def test_damaged_orders_are_refused_or_stay_within_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    rng = random.Random(0)
    good = [
        order(number, mode=mode, name=name, running=running)
        for number, mode, name, running in itertools.product(
            (5, 6), ("per_pass", "per_token"), ("x", "a.b-c_d"), (True, False)
        )
    ]
    recorder, decoded = recorder_in(folder), 0
    lines: list[str] = []
    for _ in range(4000):
        try:
            found = decode_order(damaged(rng, rng.choice(good)))
        except MessageError as error:
            lines.append(str(error))
            continue
        decoded += 1
        if decoded % 10 == 0:  # every recording is a thread and a file
            recorder.order(found, EPOCH)
            recorder.due(0.0)
    assert decoded > 100
    assert not any("\n" in line for line in lines)
    recorder.close(10.0)
    for thread in threading.enumerate():
        if thread.name == "evenroute-passes":
            thread.join(10)
    assert {path.name for path in tmp_path.iterdir()} == {"records"}
    assert list(folder.iterdir())
    assert all(path.name.endswith("-rank1.evd") for path in folder.iterdir())
