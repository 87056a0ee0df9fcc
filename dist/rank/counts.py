"""Takes the counts off the device, on the forward thread: windows for the stream, and passes for a recording."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from evenroute.dist.rank.thread import Take
from evenroute.dist.record.session import RecordingSession

_NUM_BUFFERS = 3  # takes under way at once; with none free, counts stay on the device until the next take


class Counters(Protocol):
    """The part of `routing.counters.ExpertCounters` that the agent needs."""

    num_layers: int
    num_logical_experts: int
    device: torch.device

    def take(self, out: torch.Tensor | None = None) -> torch.Tensor: ...


class HostBuffer:
    """int64 [L, E] on the host (pinned beside a GPU), and the event that says when the copy is done."""

    def __init__(self, counters: Counters) -> None:
        on_gpu = counters.device.type == "cuda"
        shape = (counters.num_layers, counters.num_logical_experts)
        self.tensor = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu)
        self.counts: NDArray[np.int64] = self.tensor.numpy()
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def mark(self) -> None:
        """The copy is enqueued on the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the copy is done (agent thread)."""
        if self._event is not None:
            self._event.synchronize()


class CountTaker:
    """Knows which passes the counts on the device belong to, and hands them over as `Take`s.

    Windows end at the same steps on every rank, whatever each of them counts: passes that are not counted (dummy,
    draft, warm-up) are thrown away inside a window, which covers their steps all the same.

    reports       whether this rank's counts go anywhere (of ranks with shared counts, rank 0's only)
    window_steps  steps of a window
    wait_limit_s  how long a call may wait for a buffer where counted passes end

    counting      whether the counts since the last take are wanted
    first_step    first step of what lies on the device
    session       the recording whose passes the takes are, or None
    covered       steps below it were handed over
    skipped       takes put off because no buffer was free: those counts came with a later one
    """

    def __init__(
        self,
        counters: Counters,
        hand_over: Callable[[Take], None],
        *,
        reports: bool,
        window_steps: int,
        wait_limit_s: float,
    ) -> None:
        self._counters = counters
        self._hand_over = hand_over
        self._reports = reports
        self._window_steps = window_steps
        self._wait_limit_s = wait_limit_s
        self._free: deque[HostBuffer] = deque(HostBuffer(counters) for _ in range(_NUM_BUFFERS))
        self._tokens = 0
        self._passes = 0  # of this step
        self.covered = 0  # steps below it are part of a take that was handed over
        self._taking = False
        self._stream: Any = None  # CUDA: of the last take, where the counts are added up
        self.first_step = 0
        self.counting = True
        self.session: RecordingSession | None = None
        self.skipped = 0

    def begin_step(self, step: int, *, count: bool, per_pass: bool) -> None:
        """`step` begins: take what was counted before it, if a window ends here or if counting turns on or off."""
        turns, window_ends = self.counting != count, step % self._window_steps == 0
        if step > self.first_step and (turns or window_ends or per_pass):
            self._take(step - 1, step, count, ends_window=window_ends)
        self.counting, self._passes = count, 0

    def begin_pass(self, step: int, num_tokens: int, *, count: bool, per_pass: bool) -> None:
        """A pass of `num_tokens` rows begins in `step`: take what was routed before it, if that has to stay apart."""
        if self.counting != count or (per_pass and self._passes):
            self._take(step if self._passes or self.first_step == step else step - 1, step, count)
        self._passes += 1
        if count:
            self._tokens += num_tokens

    def finish(self, step: int, limit_s: float) -> bool:
        """Take what was counted before `step`, the job's end; False if counts stay on the device.

        A signal's handler that closes the agent may interrupt a take; its counts are then left where they are.
        """
        if self._taking:
            return False
        deadline = time.monotonic() + limit_s
        left = self.counting and self._reports
        while left and step > self.first_step and not self._free and time.monotonic() < deadline:
            time.sleep(0.0005)
        if step > self.first_step and (self._free or not left):
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                self._take(step - 1, step, True, ends_window=True)
        return step <= self.first_step or not left

    def record_with(self, session: RecordingSession, step: int) -> bool:
        """Make each take from `step` on a pass of `session`; True if that begins just now.

        Not yet while the device holds counts of earlier steps: a take that was put off.
        """
        if self.session is session or self.first_step != step:
            return False
        self.session = session
        return True

    def _take(self, last: int, following: int, count: bool, *, ends_window: bool = False) -> None:
        """Steps up to `last`; `following` is the first of what is counted next, if `count`."""
        self._taking = True
        buffer = None
        if not self._reports or not self.counting:
            self._counters.take()  # thrown away
        elif self._free or self.counting != count:
            if not self._free:
                self._wait_for_buffer()
            buffer = self._free.pop()  # the one used last: its memory is in the caches
            self._counters.take(buffer.tensor)
            buffer.mark()
        else:
            self.skipped += 1
            self._taking = False
            return
        if self._counters.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self._counters.device)
        if buffer is not None or (ends_window and self._reports):
            first = min(self.first_step, self.covered)
            take = Take(first, last, self._tokens, buffer, self._free.append, ends_window)
            nothing = (
                self.first_step == last == following and not self._passes
            )  # before the step's first pass
            if self.session is not None and buffer is not None and not nothing:
                if self.session.accepts:
                    take.session, take.pass_from = self.session, self.first_step
                else:
                    self.session = None
            self.covered = following
            self._hand_over(take)
        self.first_step, self._tokens, self.counting = following, 0, count
        self._taking = False

    def _wait_for_buffer(self) -> None:
        # Only where counted passes end and the agent's thread is three takes behind; it never waits for the network.
        deadline = time.monotonic() + self._wait_limit_s
        while not self._free:
            if time.monotonic() > deadline:
                raise RuntimeError("agent: its thread took no counts for too long; it has died")
            time.sleep(0.0005)
