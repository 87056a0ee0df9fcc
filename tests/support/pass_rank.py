"""One rank's recorder with a forward thread that routes at random, and the rebalancer's view that orders need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import torch

from evenroute.dist.rebalancer.record_orders import PassOrders
from evenroute.dist.rebalancer.recording import PassRecording
from evenroute.dist.record.files import RecorderSettings
from evenroute.dist.record.recorder import RankRecorder
from evenroute.dist.record.tap import RecordingArena, RecordingTap
from evenroute.dist.wire.messages import JobShape
from evenroute.dist.wire.recording import RecordOrder, RecordReport
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.control_plane import wait_for

RUN, EPOCH = 77, 1 << 20


JOB = JobShape(3, 8, 12, 2, 1, 2, False, "pass")


CPU = torch.device("cpu")


FIRST = Placement.initial(3, 8, 12, Topology(2))


SECOND = Placement(np.tile(np.array([7, 6, 5, 4, 3, 2, 1, 0, 5, 4, 3, 2], np.int32), (3, 1)), 8, Topology(2))


KEYS = ((0, 0),) * 3


def order(number: int = 5, *, mode: str = "per_token", name: str = "x", running: bool = True) -> RecordOrder:
    return RecordOrder(RUN, EPOCH, number, mode, name, running)  # type: ignore[arg-type]


def recorder_in(folder: Path | None, **changes: object) -> RankRecorder:
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
    return RankRecorder(settings, lambda size: RecordingArena(size, CPU), lambda: None)


class Rank:
    """The forward thread of a rank, with a placement that may switch between steps."""

    def __init__(self, recorder: RankRecorder) -> None:
        self.recorder = recorder
        self.tap = RecordingTap(recorder.settings.job, CPU)
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


def last_report(recorder: RankRecorder) -> RecordReport:
    assert recorder._last is not None
    return recorder._last.report()


def begin(recorder: RankRecorder, first: RecordOrder | None = None) -> Rank:
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


class View:
    """The part of a `RunView` that orders need."""

    def __init__(self, ranks: int = 2, *, shared: bool = False, run: int = RUN) -> None:
        self.run = run
        self.job = msgspec.structs.replace(JOB, shared_counts=shared)
        self.ranks = {rank: SimpleNamespace(peer=bytes([rank])) for rank in range(ranks)}


WANTED = PassRecording(RUN, 5, "per_token", "x", True)


def due(orders: PassOrders, wanted: PassRecording | None, now: float, view: View | None = None) -> list:
    return [(p, o.running) for p, o in orders.due(wanted, view or View(), EPOCH, now)]  # type: ignore[arg-type]
