"""Recordings of ids beside a GPU: copies never wait, and what arrives is what was routed. Runs where there is one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evenroute.dist.record.files import RecorderSettings
from evenroute.dist.record.recorder import RankRecorder
from evenroute.dist.record.tap import RecordingArena, RecordingTap
from evenroute.dist.wire.messages import JobShape
from evenroute.dist.wire.recording import RecordOrder
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.control_plane import wait_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
]
JOB = JobShape(4, 64, 72, 8, 1, 8, False, "gpu")


def test_ids_leave_the_gpu_in_order_without_a_wait(tmp_path: Path) -> None:
    device = torch.device("cuda")
    settings = RecorderSettings(7, 0, JOB, tmp_path, 1 << 24, 1 << 26, 1 << 30)
    recorder = RankRecorder(settings, lambda size: RecordingArena(size, device), lambda: None)
    recorder.order(RecordOrder(7, 1, 5, "per_token", "x", True), 0)
    session = recorder.session
    assert session is not None
    wait_for(lambda: session.state == "recording", 30, "the recording's start")
    placement = Placement.initial(4, 64, 72, Topology(8))
    rows = [placement.row(layer) for layer in range(4)]
    tap = RecordingTap(JOB, device)
    generator = torch.Generator(device).manual_seed(0)
    expected = {}
    try:
        torch.cuda.set_sync_debug_mode(
            "error"
        )  # whatever waits for the device raises, and ends the recording
        for step in range(40):
            if tap.open:
                tap.finish()
            tokens = (step * 37) % 130
            tap.begin(session, step, tokens, rows, ((0, 0),) * 4, switched=False)
            ids = torch.randint(-1, 72, (4, tokens, 8), generator=generator, device=device, dtype=torch.int32)
            for layer in range(4):
                routed = SimpleNamespace(logical_ids=None, physical_ids=ids[layer], top_k=8, num_shared=0)
                tap.add(layer, routed)
            tap.add_inputs(torch.arange(tokens, device=device), None)
            expected[step] = ids.clone()
            ids.fill_(0)  # the engine reuses its buffers at once
        tap.finish()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    recorder.close(30.0)
    frames = {frame.step: frame for frame in DumpReader(tmp_path / "x-rank0.evd").tokens()}
    assert len(frames) + session.dropped == 40
    assert len(frames) > 20
    for step, frame in frames.items():
        slots = expected[step].cpu().numpy()
        logical = np.where(slots < 0, -1, slots % 64)
        assert np.array_equal(frame.ids, logical), step
        if frame.ids.shape[1]:
            assert frame.token_ids is not None
            assert frame.token_ids.tolist() == list(range(frame.ids.shape[1]))


def test_a_call_inside_a_capture_records_nothing_and_says_so(tmp_path: Path) -> None:
    device = torch.device("cuda")
    settings = RecorderSettings(7, 0, JOB, tmp_path, 1 << 24, 1 << 26, 1 << 30)
    recorder = RankRecorder(settings, lambda size: RecordingArena(size, device), lambda: None)
    recorder.order(RecordOrder(7, 1, 5, "per_token", "x", True), 0)
    session = recorder.session
    assert session is not None
    wait_for(lambda: session.state == "recording", 30, "the recording's start")
    placement = Placement.initial(4, 64, 72, Topology(8))
    tap = RecordingTap(JOB, device)
    ids = torch.zeros(4, 16, 8, dtype=torch.int32, device=device)
    ids += 1
    torch.cuda.synchronize()
    tap.begin(session, 0, 16, [placement.row(layer) for layer in range(4)], ((0, 0),) * 4, switched=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids += 1
        for layer in range(4):
            tap.add(layer, ids[layer])
    assert "inside a CUDA graph's capture" in session.report().reason
    graph.replay()
    for layer in range(4):
        tap.add(layer, ids[layer])  # after the replay, with the captured outputs
    tap.finish()
    recorder.close(30.0)
    (frame,) = DumpReader(tmp_path / "x-rank0.evd").tokens()
    assert (frame.ids == 2).all()
