"""Runs the chunks of a migration: on the main stream (CUDA), or as works that are waited for a step later (CPU)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as torch_dist

from evenroute.dist.weights.exchange import InFlight, post, wait_host
from evenroute.dist.weights.mover import MoveTotals
from evenroute.dist.weights.open_layer import OpenLayer
from evenroute.dist.weights.transfer import Chunk, most_peers
from evenroute.dist.weights.watchdog import StallWatchdog
from evenroute.eplb.placement.topology import Topology


@dataclass
class ChunkRecord:
    """Measured: bytes that this rank sent and received in one chunk, and how long it took on the device (CUDA) or from
    enqueueing until its end was waited for (CPU)."""

    sent: int
    received: int
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None
    host_s: float = 0.0

    def seconds(self) -> float:
        """Only once it is done."""
        if self.begun is None or self.done is None:
            return self.host_s
        return float(self.begun.elapsed_time(self.done)) / 1e3  # type: ignore[no-untyped-call]


def pick_chunks(
    layers: Iterable[OpenLayer], topology: Topology, chunk_bytes: int, max_peers: int
) -> list[tuple[OpenLayer, Chunk]]:
    """Take the chunks of this step off the open layers, in order, up to ``chunk_bytes``; the same on all ranks.

    A layer is planned when its turn comes.
    """
    picked: list[tuple[OpenLayer, Chunk]] = []
    budget = chunk_bytes
    for one in layers:
        if one.transfer is None:
            one.plan(topology, chunk_bytes, max_peers)
            one.staged = not one.chunks  # nothing to move
        while one.chunks:
            chunk = one.chunks[0]
            if picked and (
                chunk.cost > budget or not _fits(chunk, [other for _, other in picked], max_peers)
            ):
                return picked
            picked.append((one, one.chunks.popleft()))
            budget -= chunk.cost
    return picked


def _fits(chunk: Chunk, others: list[Chunk], max_peers: int) -> bool:
    # A copy of a received expert waits for the receive: one step later is always enough.
    if any(copy.received for copy in chunk.copies):
        return False
    return most_peers([chunk, *others]) <= max_peers


class ChunkRunner:
    """One chunk at a time, in the same order on all ranks.

    On CUDA a chunk lies on the main stream: it begins after all that the stream had by then, and what comes later waits
    for it. On the CPU a chunk is complete when `finish` has waited for it.
    """

    def __init__(self, group: torch_dist.ProcessGroup, device: torch.device, *, limit_s: float) -> None:
        self._group = group
        self._rank = group.rank()
        self._limit_s = limit_s
        self.cuda = device.type == "cuda"
        self._watchdog = StallWatchdog(limit_s) if self.cuda else None
        self._flying: deque[InFlight] = deque()  # CPU: one at most
        self.bytes_received = 0
        self.totals = MoveTotals()
        self.records: list[ChunkRecord] | None = None  # filled for benches, if set

    def enqueue(
        self, picked: Sequence[tuple[OpenLayer, Chunk]], test_staged: Callable[[OpenLayer], None]
    ) -> None:
        """Start the chunks of this step; ``test_staged`` enqueues the checks of a layer whose last chunk this is.

        Raises:
            MigrationError: the backend refuses.
        """
        what = picked[-1][0].describe()
        self._count([one for one, _ in picked])
        if self._watchdog is None:
            started = time.monotonic()
            self._flying.append(InFlight(what, started, self._transfer(picked, what)))
            return
        begun, done = new_event(timing=True), new_event(timing=True)
        begun.record()
        for work in self._transfer(picked, what):
            work.wait()  # the main stream waits, not the host
        done.record()
        for one, _ in picked:
            if one.enqueued:
                test_staged(one)
                one.done = new_event()
                one.done.record()
        self._flying.append(InFlight(what, time.monotonic(), [], begun, done))
        self._watchdog.watch(self._flying[0])
        if self.records is not None:
            self.records[-1].begun, self.records[-1].done = begun, done

    def _count(self, layers: Sequence[OpenLayer]) -> None:
        self.totals.chunks += 1
        self.totals.slot_bytes = layers[-1].weights.expert_bytes
        for one in {one.layer: one for one in layers}.values():
            if one.enqueued and one.transfer is not None:
                self.totals.slots += one.transfer.num_receives

    def _transfer(self, picked: Sequence[tuple[OpenLayer, Chunk]], what: str) -> list[torch_dist.Work]:
        moves = [move for one, chunk in picked for move in one.moves(chunk, self._rank)]
        received = sum(move.memory.numel() for move in moves if not move.send)
        self.bytes_received += received
        if self.records is not None:
            sent = sum(move.memory.numel() for move in moves if move.send)
            self.records.append(ChunkRecord(sent, received))
        works = post(moves, self._group, what)
        for one, chunk in picked:
            one.copy_locally(chunk, self._rank)
        return works

    def finish(self, *, block: bool) -> bool:
        """Wait for what is in flight (CUDA: only with ``block``). True if nothing is any more.

        Raises:
            MigrationError: a peer is gone, or the limit is over (CPU; on CUDA the watchdog ends the process).
        """
        while self._flying:
            oldest = self._flying[0]
            if self._watchdog is None:
                wait_host(oldest, self._limit_s)
                took = time.monotonic() - oldest.started
                self.totals.seconds += took
                if self.records:
                    self.records[-1].host_s = took
            elif block:
                assert oldest.done is not None
                oldest.done.synchronize()
            elif not oldest.finished():
                break
            self._flying.popleft()
            if oldest.begun is not None and oldest.done is not None:
                self.totals.seconds += oldest.begun.elapsed_time(oldest.done) / 1e3  # type: ignore[no-untyped-call]
        if self._watchdog is not None:
            self._watchdog.watch(self._flying[0] if self._flying else None)
        return not self._flying

    def in_flight(self) -> str | None:
        """Operation and layer of the oldest chunk that is not done."""
        return next((chunk.what for chunk in self._flying if not (self.cuda and chunk.finished())), None)

    def close(self) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.close()


def new_event(*, timing: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
