"""One layer under way: its room in a staging buffer, a new beginning, a layer of one tensor; the watchdog's end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.open_layer import OpenLayer
from evenroute.dist.weights.staging import StagingBuffers
from evenroute.dist.weights.watchdog import StallWatchdog
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.placement.topology import Topology

LOCAL, RANK = 3, 1
LIVE, TARGET = [0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 1, 2, 0, 5, 4, 6, 7, 8]


def open_layer(*widths: int) -> OpenLayer:
    tensors = {
        f"w{place}": torch.zeros((LOCAL, width), dtype=torch.uint8) for place, width in enumerate(widths)
    }
    weights = ExpertWeights([tensors], LOCAL)
    rows = StagingBuffers(weights, 1 << 30).rows(0, 0)
    live, target = (PlacementRow(np.array(slots, np.int32), None) for slots in (LIVE, TARGET))
    return OpenLayer(0, live, target, 0, rows, weights.layers[0])


@pytest.mark.parametrize("widths", [(7,), (700, 13), (13, 700, 1, 512), (512, 512, 513)])
def test_tensors_share_a_staging_buffer_without_touching_each_other(widths: tuple[int, ...]) -> None:
    rows = open_layer(*widths).staged_rows
    assert [tuple(one.shape) for one in rows] == [(LOCAL, width) for width in widths]
    for place, one in enumerate(rows):
        one.fill_(place + 1)
    assert [set(one.flatten().tolist()) for one in rows] == [{place + 1} for place in range(len(widths))]


@pytest.mark.parametrize("widths", [(7,), (700, 13)])
def test_a_layer_sends_receives_and_copies_whatever_its_number_of_tensors(widths: tuple[int, ...]) -> None:
    one = open_layer(*widths)
    one.plan(Topology(3), 1 << 30, 8)
    moves = [move for chunk in one.chunks for move in one.moves(chunk, RANK)]
    assert (
        [move.send for move in moves].count(True) == [move.send for move in moves].count(False) == len(widths)
    )
    for rows in one.weights.rows:
        rows[:] = torch.arange(LOCAL, dtype=torch.uint8)[:, None]
    for chunk in one.chunks:
        one.copy_locally(chunk, RANK)
    for rows in one.staged_rows:  # experts 4 and 5 exchange their slots on this rank
        assert rows[1:, 0].tolist() == [2, 1]


def test_a_layer_that_begins_anew_has_each_chunk_once() -> None:
    one = open_layer(700)
    one.plan(Topology(3), 1 << 30, 8)
    known, number = list(one.chunks), one.num_chunks
    one.restart()
    assert not one.enqueued
    one.plan(Topology(3), 1 << 30, 8)
    assert (list(one.chunks), one.num_chunks) == (known, number)


def test_a_closed_watchdog_leaves_no_thread() -> None:
    before = threading.active_count()
    watchdog = StallWatchdog(600.0)
    assert threading.active_count() == before + 1
    watchdog.close()
    assert threading.active_count() == before
