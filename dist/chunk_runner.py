"""Runs the chunks of a migration: on a side stream with event edges (CUDA), or as works that are waited for (CPU)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as torch_dist

from evenroute.dist.exchange import InFlight, MigrationError, post, wait_host
from evenroute.dist.open_layer import OpenLayer
from evenroute.dist.transfer import Chunk
from evenroute.dist.watchdog import StallWatchdog


class ChunkRunner:
    """One chunk at a time, in the same order on all ranks.

    On CUDA a chunk begins after all that the main stream had enqueued by then, and the main stream goes on after it: at
    once, or at `join` with ``overlap``. On the CPU a chunk is complete when `finish` has waited for it.
    """

    def __init__(
        self, group: torch_dist.ProcessGroup, device: torch.device, *, limit_s: float, overlap: bool
    ) -> None:
        self._group = group
        self._rank = torch_dist.get_rank(group)
        self._device = device
        self._limit_s = limit_s
        self._overlap = overlap
        self.cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.cuda else None  # type: ignore[no-untyped-call]
        self._watchdog = StallWatchdog(limit_s) if self.cuda else None
        self._last: InFlight | None = None
        self._unjoined: torch.cuda.Event | None = None
        self.bytes_received = 0

    def enqueue(
        self, picked: Sequence[tuple[OpenLayer, Chunk]], test_staged: Callable[[OpenLayer], None]
    ) -> None:
        """Start the chunks of this step; ``test_staged`` enqueues the checks of a layer whose last chunk this is.

        Raises:
            MigrationError: the backend refuses, or the last chunk was not joined.
        """
        if self._unjoined is not None:
            raise MigrationError(
                "migration: a chunk was not joined before the next (overlap needs `join` in every step)"
            )
        what = picked[-1][0].describe()
        if self._stream is None:
            started = time.monotonic()
            self._last = InFlight(what, started, self._transfer(picked, what))
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        begun, done = new_event(), new_event()
        with torch.cuda.stream(self._stream):
            begun.record()
            for work in self._transfer(picked, what):
                work.wait()
            done.record()
            for one, _ in picked:
                if one.enqueued:
                    test_staged(one)
                    one.done = new_event()
                    one.done.record()
        self._last = InFlight(what, time.monotonic(), [], begun, done)
        assert self._watchdog is not None
        self._watchdog.watch(self._last)
        self._unjoined = done
        if not self._overlap:
            self.join()

    def _transfer(self, picked: Sequence[tuple[OpenLayer, Chunk]], what: str) -> list[torch_dist.Work]:
        moves = [move for one, chunk in picked for move in one.moves(chunk, self._rank)]
        self.bytes_received += sum(move.memory.numel() for move in moves if not move.send)
        works = post(moves, self._group, what)
        for one, chunk in picked:
            one.copy_locally(chunk, self._rank)
        return works

    def join(self) -> None:
        """The main stream waits for the step's chunk."""
        if self._unjoined is not None:
            torch.cuda.current_stream(self._device).wait_event(self._unjoined)
            self._unjoined = None

    def finish(self, *, block: bool) -> bool:
        """Wait for the last chunk (CUDA: only with ``block``). True if none is left in flight.

        Raises:
            MigrationError: a peer is gone, or the limit is over (CPU; on CUDA the watchdog ends the process).
        """
        if self._last is None:
            return True
        if not self.cuda:
            wait_host(self._last, self._limit_s)
        elif block:
            assert self._last.done is not None
            self._last.done.synchronize()
        elif not self._last.finished():
            return False
        self._last = None
        return True

    def in_flight(self) -> str | None:
        """Operation and layer of the last chunk while it is not done."""
        if self._last is None or (self.cuda and self._last.finished()):
            return None
        return self._last.what

    def close(self) -> None:
        """Stop the watchdog."""
        if self._watchdog is not None:
            self._watchdog.close()


def new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
