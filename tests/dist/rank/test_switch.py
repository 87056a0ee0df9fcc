"""What the forward thread does with a decision: movers, tables and an engine's own maps hear of it in order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evenroute.dist.protocol.agreement import Commit, Discard, Open
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankConfig, RankCore, prepare_placement
from evenroute.dist.rank.switch import SwitchDriver
from evenroute.dist.wire.messages import JobShape, PlacementMessage
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.topology import Topology

JOB = JobShape(2, 8, 8, 1)
START = Placement.initial(2, 8, 8, Topology(1))


def core(**config: Any) -> RankCore:
    started = StartedJob(run=5, epoch=0, key=(0, 0), job=JOB, placement=pack_placement(START))
    return RankCore(started, rank=0, config=RankConfig(**config))


class Notes:
    """A mover and a callback that note what they are told."""

    num_buffers = 2

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def staged(self) -> int:
        return 0

    def error(self) -> None:
        return None

    def in_flight(self) -> None:
        return None

    def discard(self) -> None:
        self.heard.append("discard")

    def open_layer(self, layer: int, live: PlacementRow, target: PlacementRow) -> None:
        self.heard.append(("open", layer))

    def commit_layer(self, layer: int, row: PlacementRow) -> None:
        self.heard.append(("commit", layer))

    def on_commit(self, layer: int, row: PlacementRow) -> None:
        self.heard.append(("told", layer, row.slots.tolist()))


def driver(notes: Notes, actions: list[Any], mine: RankCore) -> SwitchDriver:
    mine.decide = lambda vote, reduced: actions  # type: ignore[method-assign, assignment]
    votes = SimpleNamespace(
        wait=lambda vote, describe: np.zeros(10, np.int64), post=lambda vote, vector: None
    )
    return SwitchDriver(
        mine,
        threading.RLock(),
        notes,  # type: ignore[arg-type]
        votes,  # type: ignore[arg-type]
        rank=0,
        on_switch=lambda: notes.heard.append("switched"),
        on_commit=notes.on_commit,
    )


def test_every_action_reaches_the_mover_and_each_commit_the_engine() -> None:
    row = PlacementRow(np.arange(8, dtype=np.int32)[::-1].copy(), None)
    notes = Notes()
    actions = [Discard(), Commit(1, row, (1, 1)), Open(0, START.row(0), row)]
    assert driver(notes, actions, core()).agree(1, 4) == (1,)
    told = ("told", 1, row.slots.tolist())
    assert notes.heard == ["discard", ("commit", 1), told, ("open", 0), "switched"]


def test_nothing_decided_is_nothing_done() -> None:
    notes = Notes()
    assert driver(notes, [], core()).agree(1, 4) == ()
    assert notes.heard == []


@pytest.mark.parametrize("shadow", [False, True])
def test_in_shadow_a_placement_is_held_and_never_voted_for(shadow: bool) -> None:
    mine = core(shadow=shadow)
    other = Placement(START.physical_to_logical[:, ::-1].copy(), 8, Topology(1))
    message = PlacementMessage(5, 1, (1, 1), other.digest(), pack_placement(other))
    mine.receive(prepare_placement(message, JOB), 0.0)
    assert mine.status().held == (1, 1), "the rebalancer need not send it again"
    for vote in range(4):
        vector = mine.vote()
        assert (vector[0], vector[2]) == ((0, 0) if shadow else (1, 1))
        commits = [action for action in mine.decide(vote, vector) if isinstance(action, Commit)]
        assert not (shadow and commits)
    assert (mine.state.live_keys[0] == (0, 0)) or not shadow
