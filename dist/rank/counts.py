"""Takes the counts off the device, on the forward thread: windows for the stream, and passes for a recording."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

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
    """Knows which steps the counts on the device belong to, and hands them over as `Take`s.

    reports       whether this rank's counts go anywhere (of ranks with shared counts, rank 0's only)
    window_steps  steps of a window
    wait_limit_s  how long `before_step` may wait for a buffer where counted steps end

    counting      whether the counts of the steps since `first_step` are wanted
    first_step    first step of what lies on the device
    session       the recording whose passes the takes are, or None
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
        self.first_step = 0
        self.counting = True
        self.session: RecordingSession | None = None
        self.skipped = 0

    def before_step(self, step: int, *, count: bool, per_pass: bool) -> None:
        """Take what was counted before `step` if a window ends there, or (`per_pass`) in any case."""
        turns = self.counting != count
        window_ends = turns or step % self._window_steps == 0
        if (window_ends or per_pass) and (turns or step > self.first_step):
            self._take(step, count, ends_window=window_ends)

    def step_begun(self, num_tokens: int) -> None:
        """The step that `before_step` was called for begins: it routes so many rows."""
        if self.counting:
            self._tokens += num_tokens

    def finish(self, step: int, limit_s: float) -> bool:
        """Take what was counted before `step`, the job's end; False if no buffer was free within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while step > self.first_step and not self._free and time.monotonic() < deadline:
            time.sleep(0.0005)
        if step > self.first_step and self._free:
            self._take(step, count=True)
        return step <= self.first_step or not (self.counting and self._reports)

    def record_with(self, session: RecordingSession, step: int) -> bool:
        """Make each take from `step` on a pass of `session`; True if that begins just now.

        Not yet while the device holds counts of earlier steps: a take that was put off.
        """
        if self.session is session or self.first_step != step:
            return False
        self.session = session
        return True

    def _take(self, step: int, count: bool, *, ends_window: bool = True) -> None:
        """Those of uncounted steps are thrown away."""
        if self.counting and self._reports and step > self.first_step:
            if not self._free:
                if self.counting == count:
                    self.skipped += 1
                    return
                self._wait_for_buffer()
            buffer = self._free.pop()  # the one used last: its memory is in the caches
            self._counters.take(buffer.tensor)
            buffer.mark()
            take = Take(self.first_step, step - 1, self._tokens, buffer, self._free.append, ends_window)
            if self.session is not None:
                if self.session.accepts:
                    take.session = self.session
                else:
                    self.session = None
            self._hand_over(take)
        else:
            self._counters.take()
        self.first_step, self._tokens, self.counting = step, 0, count

    def _wait_for_buffer(self) -> None:
        # Only where counted steps end and the agent's thread is three takes behind; it never waits for the network.
        deadline = time.monotonic() + self._wait_limit_s
        while not self._free:
            if time.monotonic() > deadline:
                raise RuntimeError("agent: its thread took no counts for too long; it has died")
            time.sleep(0.0005)
