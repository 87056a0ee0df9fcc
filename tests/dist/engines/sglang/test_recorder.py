"""SGLang's three recorder endpoints: answered by the rebalancer's recordings in SGLang's own format, never raising."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evenroute.dist.client import RefusedError, UnreachableError
from evenroute.dist.engines.sglang import dump, ending, recorder
from evenroute.dist.record.files import DumpFiles
from evenroute.dist.wire.control import Recorded, RecordedWindow, RecordStart, RecordStop
from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.files.sglang import source_from_object
from evenroute.eplb.loads.source import LoadWindow
from support.sglang_inside import sglang_inside

LAYERS = dump.Layers(4, (1, 3))  # of four hidden layers
EXPERTS = 6


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What the rebalancer was asked; it refuses a start while a recording runs."""
    found: list[Any] = []
    running = [False]

    def command(address: str, request: Any, **_: Any) -> str:
        found.append(request)
        if isinstance(request, RecordStart) and running[0]:
            raise RefusedError("a recording runs")
        running[0] = isinstance(request, RecordStart)
        return "done"

    counts = np.arange(2 * EXPERTS, dtype="<i8").reshape(2, EXPERTS)
    windows = [RecordedWindow(1.0, 4 * i, 4 * i + 3, 10, True, (counts + i).tobytes()) for i in range(3)]
    part = Recorded(windows, None, "m", 2, EXPERTS, 8, 2, 1, 2, [])
    status = types.SimpleNamespace(recording=False, shared_counts=True, ranks=[])
    monkeypatch.setattr(recorder, "command", command)
    monkeypatch.setattr(recorder, "query_status", lambda *_, **__: status)
    monkeypatch.setattr(recorder, "read_recording", lambda *_, **__: iter([part]))
    metadata = types.SimpleNamespace(num_layers=LAYERS.num_hidden)
    rank = types.SimpleNamespace(metadata=metadata, layer_ids=list(LAYERS.ids))
    monkeypatch.setattr(recorder, "attached", lambda: rank)
    monkeypatch.setenv("EVENROUTE_REBALANCER", "ipc:///tmp/nobody")
    monkeypatch.setenv("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", str(tmp_path / "records"))
    return found


def test_a_stat_dump_is_read_like_sglangs_own(asked: list[Any], tmp_path: Path) -> None:
    one = recorder.EvenrouteRecorder(0, "stat")
    one.start_record()
    one.stop_record()
    one.dump_record()
    assert [type(request) for request in asked] == [RecordStart, RecordStop]
    (path,) = (tmp_path / "records").glob("expert_distribution_recorder_*.pt")
    found = torch.load(path, weights_only=True)
    assert set(found) == {"rank", "logical_count", "average_utilization_rate_over_window"}
    plain = {**found, "logical_count": found["logical_count"].numpy()}
    source = source_from_object(path, plain)
    assert (source.kind, source.num_layers, source.num_windows) == ("SGLang stat dump", 4, 3)
    first = next(iter(source.windows())).counts
    assert first.tolist() == [[0] * EXPERTS, list(range(6)), [0] * EXPERTS, list(range(6, 12))]


def test_a_second_start_begins_anew_and_other_ranks_ask_nothing(asked: list[Any]) -> None:
    one = recorder.EvenrouteRecorder(0, "per_pass")
    one.start_record()
    one.start_record()
    assert [type(request).__name__ for request in asked] == [
        *("RecordStart", "RecordStart", "RecordStop", "RecordStart")
    ]
    assert asked[0].mode == "per_pass"
    del asked[:]
    other = recorder.EvenrouteRecorder(1, "stat")
    other.start_record()
    other.stop_record()
    assert other.dump_record() is None
    assert asked == []


@pytest.mark.parametrize(
    "error", [UnreachableError("no answer"), RefusedError("not allowed"), ValueError("x")]
)
def test_nothing_raises(
    error: Exception, asked: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    for name in ("command", "query_status", "read_recording"):
        monkeypatch.setattr(recorder, name, fail)
    for mode in ("stat", "per_pass"):
        one = recorder.EvenrouteRecorder(0, mode)
        for call in (one.start_record, one.stop_record, one.dump_record):
            assert call() is None
    assert caplog.text.count(str(error)) == 6
    assert "Traceback" not in caplog.text


def test_inside_a_pass_it_does_nothing(asked: Any) -> None:
    one = recorder.EvenrouteRecorder(0, "stat")
    with one.with_forward_pass(3, None) as outputs, one.with_current_layer(1), one.disable_this_region():
        one.on_select_experts(topk_ids=None)
        one.on_deepep_dispatch_low_latency(None)
    assert outputs == {}
    assert one.recording


def test_the_recorder_is_ours_under_eplb_only(asked: Any) -> None:
    with sglang_inside() as modules:
        bag = modules["sglang.srt.runtime_context"].get_exec().moe
        found = recorder.init_recorder(None, {"metadata": 1}, rank=1)
        assert isinstance(found, recorder.EvenrouteRecorder)
        assert (found.rank, found.mode) == (1, "stat")
        bag.enable_eplb = False
        assert recorder.init_recorder(lambda *_, **__: "theirs", None, rank=1) == "theirs"


def test_without_the_model_hook_the_first_pass_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recorder, "attached", lambda: None)
    manager = recorder.EvenrouteManager(model_config=None)
    with pytest.raises(SystemExit):
        manager.on_forward_pass_end()
    assert "ModelRunner.load_model could not be hooked" in capsys.readouterr().err
    assert list(manager.rebalance()) == []


@pytest.mark.parametrize("mode", ["per_pass", "per_token"])
def test_recordings_of_passes_are_read_like_sglangs_own(mode: str, tmp_path: Path) -> None:
    header = DumpHeader(
        num_layers=2, num_logical_experts=EXPERTS, mode=mode, scope="rank", rank=1, ep_size=2, top_k=2
    )
    files = DumpFiles(
        tmp_path, "night", header, part_bytes=1, max_bytes=1 << 20
    )  # each pass in a part of its own
    ids = np.array([[[0, 5], [2, -1]], [[1, 1], [3, 4]]], dtype=np.int16)
    expected = np.zeros((4, EXPERTS), dtype=np.int64)
    expected[1, [0, 2, 5]] = 1
    expected[3, [1, 3, 4]] = 2, 1, 1
    for step in (8, 9, 10):
        if mode == "per_token":
            files.add_tokens(step, ids, np.array([7, 8], dtype=np.int32), None)
        else:
            files.add_window(LoadWindow(expected[list(LAYERS.ids)], 1.0, step, step, 2))
    files.close([])
    found = dump.rank_records(str(files.first), 1, LAYERS)
    path = dump.save(str(tmp_path), found, rank=1)
    assert path.name.endswith("_1.pt")
    loaded = torch.load(path, weights_only=True)
    plain = {
        "records": [
            {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in one.items()}
            for one in loaded["records"]
        ],
        "last_physical_to_logical_map": loaded["last_physical_to_logical_map"].numpy(),
    }
    source = source_from_object(path, plain, EXPERTS)
    assert source.kind == f"SGLang {mode} dump"
    windows = list(source.windows())
    assert [window.first_step for window in windows] == [8, 9, 10]
    assert all(np.array_equal(window.counts, expected) for window in windows)


def test_a_rank_is_asked_to_end_before_it_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENROUTE_REBALANCER", "ipc:///tmp/nobody")
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('closed', flush=True), sys.exit(0)))\n"
        "print('up', flush=True)\n"
        "time.sleep(60)\n"
    )
    rank, other = (
        subprocess.Popen(
            [sys.executable, "-c", code, title], stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        for title in (f"{ending.TITLE}_TP0", "sglang::detokenizer")
    )
    try:
        assert rank.stdout is not None
        assert other.stdout is not None
        assert (rank.stdout.readline(), other.stdout.readline()) == ("up\n", "up\n")
        ending.before_kill(os.getpid(), include_parent=False)
        assert rank.wait(5) == 0
        assert rank.stdout.read() == "closed\n"
        assert other.poll() is None, "only ranks are asked"
    finally:
        for one in (rank, other):
            one.kill()
            one.communicate()


def test_a_signal_closes_the_agent_and_then_does_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    agent: Any = types.SimpleNamespace(close=lambda: happened.append("closed") or True, rank=0)
    before = signal.signal(signal.SIGTERM, lambda *_: happened.append("before"))
    try:
        ending.end_at_signal(agent)
        os.kill(os.getpid(), signal.SIGTERM)
        assert happened == ["closed", "before"]
    finally:
        signal.signal(signal.SIGTERM, before)
