"""Chunks of a migration as they are picked and run: a step's bytes, exact totals, what is waited for and how long."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evenroute.dist.weights import chunks
from evenroute.dist.weights.chunks import ChunkRunner, pick_chunks
from evenroute.dist.weights.exchange import Move
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.open_layer import OpenLayer
from evenroute.dist.weights.staging import StagingBuffers
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.placement.topology import Topology

EP_SIZE, LOCAL, RANK = 3, 3, 1
LIVE = [0, 1, 2, 3, 4, 5, 6, 7, 8]
WIDTHS = (700, 13)  # bytes of a row, aligned to 512: 1024 + 512
EXPERT_BYTES = 1536
LIMIT_S = 7.0
NEVER = 1 << 40


def open_layers(*targets: Sequence[int]) -> list[OpenLayer]:
    tensors = [
        {f"w{width}": torch.full((LOCAL, width), layer, dtype=torch.uint8) for width in WIDTHS}
        for layer in range(len(targets))
    ]
    weights = ExpertWeights(tensors, LOCAL)
    staging = StagingBuffers(weights, NEVER)
    return [
        OpenLayer(
            layer, row(LIVE), row(target), layer, staging.rows(layer, layer), weights.layers[layer]
        )
        for layer, target in enumerate(targets)
    ]  # fmt: skip


def row(slots: Sequence[int]) -> PlacementRow:
    return PlacementRow(np.array(slots, np.int32), None)


class Device:
    """What the runner enqueues, waits for and watches, in order; an event is done once `done` says so."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.moves: list[Move] = []
        self.done = False

    def post(self, moves: Sequence[Move], group: Any, what: str) -> list[Any]:
        self.moves += moves
        return [SimpleNamespace(wait=lambda *limit: self.log.append(("wait", *limit)))]

    def event(self, *, timing: bool = False) -> Any:
        return SimpleNamespace(
            record=lambda: self.log.append("record"),
            query=lambda: self.done,
            synchronize=lambda: self.log.append("synchronize"),
            elapsed_time=lambda other: 2500.0,
        )

    def watchdog(self, limit_s: float) -> Any:
        assert limit_s == LIMIT_S
        return SimpleNamespace(
            watch=lambda chunk: self.log.append(("watch", chunk and chunk.what)), close=lambda: None
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(chunks, "post", made.post)
    monkeypatch.setattr(chunks, "new_event", made.event)
    monkeypatch.setattr(chunks, "StallWatchdog", made.watchdog)
    return made


def runner(kind: str) -> ChunkRunner:
    group: Any = SimpleNamespace(rank=lambda: RANK)
    return ChunkRunner(group, torch.device(kind), limit_s=LIMIT_S)


def pick(layers: list[OpenLayer], chunk_bytes: int, max_peers: int = 8) -> list[tuple[int, int]]:
    """(layer, cost) of each chunk of one step."""
    picked = pick_chunks(layers, Topology(EP_SIZE), chunk_bytes, max_peers)
    return [(one.layer, chunk.cost) for one, chunk in picked]


SWAP = [3, 1, 2, 0, 4, 5, 6, 7, 8]  # ranks 0 and 1 exchange an expert: one round


def test_a_step_takes_chunks_up_to_its_bytes() -> None:
    layers = open_layers(SWAP, SWAP, SWAP)
    assert pick(layers, 2 * EXPERT_BYTES) == [(0, EXPERT_BYTES), (1, EXPERT_BYTES)]
    assert pick(layers, 2 * EXPERT_BYTES) == [(2, EXPERT_BYTES)]
    assert pick(layers, 2 * EXPERT_BYTES) == []
    assert pick(open_layers(SWAP, SWAP), 2 * EXPERT_BYTES - 1) == [(0, EXPERT_BYTES)]
    assert pick(open_layers(SWAP, SWAP), NEVER) == [(0, NEVER // 8), (1, NEVER // 8)]
    half = open_layers(SWAP)  # cut at a multiple of 512
    assert [pick(half, EXPERT_BYTES - 1) for _ in range(3)] == [[(0, 1024)], [(0, 512)], []]


def test_a_layer_without_moves_is_staged_at_once_and_takes_nothing() -> None:
    layers = open_layers(LIVE, SWAP)
    assert pick(layers, EXPERT_BYTES) == [(1, EXPERT_BYTES)]
    assert [one.staged for one in layers] == [True, False]


def test_a_step_has_no_more_peers_than_allowed() -> None:
    other = [6, 1, 2, 3, 4, 5, 0, 7, 8]  # ranks 0 and 2
    assert len(pick(open_layers(SWAP, other), NEVER, max_peers=1)) == 1
    assert len(pick(open_layers(SWAP, SWAP), NEVER, max_peers=1)) == 2
    assert len(pick(open_layers(SWAP, other), NEVER, max_peers=2)) == 2


def test_copies_of_received_experts_come_a_step_after_them() -> None:
    # Slots 1 and 2 hold what slot 0 receives; slot 4 copies a live slot.
    layers = open_layers([3, 3, 0, 1, 3, 5, 6, 7, 8])
    first = pick_chunks(layers, Topology(EP_SIZE), NEVER, 8)
    assert [copy.received for _, chunk in first for copy in chunk.copies] == [False, False]
    second = pick_chunks(layers, Topology(EP_SIZE), NEVER, 8)
    assert [[(c.dest, c.received) for c in chunk.copies] for _, chunk in second] == [[(1, True)]]
    assert not layers[0].chunks


def test_bytes_and_slots_of_all_chunks_are_counted_exactly(device: Device) -> None:
    # Rank 1 gets experts 0 and 8 and gives 3 and 4; layer 1: gets 0.
    layers = open_layers([3, 1, 2, 0, 8, 5, 6, 7, 4], SWAP)
    run = runner("cpu")
    run.records = []
    steps = 0
    while picked := pick_chunks(layers, Topology(EP_SIZE), EXPERT_BYTES, 8):
        run.enqueue(picked, lambda one: None)
        assert run.finish(block=True)
        steps += 1
    a_slot = sum(WIDTHS)
    assert run.bytes_received == 3 * a_slot
    assert sum(r.received for r in run.records) == sum(r.sent for r in run.records) == 3 * a_slot
    assert sum(move.memory.numel() for move in device.moves if move.send) == 3 * a_slot
    assert run.totals.chunks == len(run.records) == steps == 3
    assert run.totals.slots == 6, "of the whole job"
    assert run.totals.slot_bytes == EXPERT_BYTES
    assert run.totals.seconds == sum(r.seconds() for r in run.records) > 0


def test_on_the_host_a_chunk_is_waited_for_within_its_limit(device: Device) -> None:
    run = runner("cpu")
    picked = pick_chunks(open_layers(SWAP), Topology(EP_SIZE), NEVER, 8)
    run.enqueue(picked, lambda one: None)
    assert not device.log
    assert run.in_flight() == "migration: transfer of layer 0 (chunk 1 of 1)"
    assert run.finish(block=False)
    [(_, limit)] = device.log
    assert timedelta(seconds=LIMIT_S - 2) < limit <= timedelta(seconds=LIMIT_S)
    assert run.in_flight() is None


def test_on_the_device_only_a_blocking_end_waits_and_the_oldest_chunk_is_watched(device: Device) -> None:
    run = runner("cuda")
    run.records = []
    layers = open_layers(SWAP, SWAP)
    tested: list[int] = []
    names = [f"migration: transfer of layer {layer} (chunk 1 of 1)" for layer in (0, 1)]
    for name in names:
        picked = pick_chunks(layers, Topology(EP_SIZE), EXPERT_BYTES, 8)
        run.enqueue(picked, lambda one: tested.append(one.layer))
        assert device.log == ["record", ("wait",), "record", "record", ("watch", names[0])], name
        device.log.clear()
    assert tested == [0, 1]
    assert not run.finish(block=False)
    assert device.log == [("watch", names[0])]
    assert run.in_flight() == names[0]
    device.log.clear()
    device.done = True
    assert run.in_flight() is None
    assert run.finish(block=False)
    assert device.log == [("watch", None)]
    assert run.totals.seconds == 5.0
    assert [record.seconds() for record in run.records] == [2.5, 2.5]
    device.done = False
    layers = open_layers(SWAP)
    run.enqueue(pick_chunks(layers, Topology(EP_SIZE), EXPERT_BYTES, 8), lambda one: None)
    device.log.clear()
    assert run.finish(block=True)
    assert device.log == ["synchronize", ("watch", None)]
