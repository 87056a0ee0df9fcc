"""The agent's thread: the only one that touches the rank's socket. It encodes, sends, receives and keeps time."""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import zmq
from numpy.typing import NDArray

from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.protocol.stream import Unsent
from evenroute.dist.record.recorder import RankRecorder
from evenroute.dist.record.session import RecordingSession
from evenroute.dist.wire.control import decode_order, encode_control
from evenroute.dist.wire.link import CONTROL_TAG, DealerLink
from evenroute.dist.wire.messages import Goodbye, MessageError, RankCosts, Up, decode_down, encode
from evenroute.dist.wire.recording import RecordOrder
from evenroute.dist.wire.tracing import SwitchEvent, TraceReport

logger = logging.getLogger("evenroute.dist.agent")

# As `os.eventfd_write`, which releases the interpreter's lock: the thread it wakes would take that at once, and the
# forward thread wait in `agent.step()` for all that it does.
_write_event = ctypes.PyDLL(None).eventfd_write
_write_event.argtypes = [ctypes.c_int, ctypes.c_uint64]

_MAX_WAIT_S = 0.5
_RECEIVE_BATCH = 32


Lock = AbstractContextManager[Any]
"""Shared by the forward thread and the agent's; re-entrant, for a signal's handler may close the agent meanwhile."""


class CountBuffer(Protocol):
    """A take under way: `wait` until the counts are on the host, then `counts` int64 [L, E]."""

    counts: NDArray[np.int64]

    def wait(self) -> None: ...


@dataclass
class Take:
    """Counts of steps first_step..last_step (inclusive), `tokens` announced rows, in a buffer that goes to `release`.

    They are kept back until a take that `ends_window`, so that windows end at the same steps on every rank. Without a
    buffer nothing was counted in these steps. `session` records them as a pass of its own, from step `pass_from` on.
    """

    first_step: int
    last_step: int
    tokens: int
    buffer: CountBuffer | None
    release: Callable[[Any], None]
    ends_window: bool = True
    session: RecordingSession | None = None
    pass_from: int = 0


@dataclass
class _Partial:
    """A window that is taken in parts."""

    first_step: int
    last_step: int
    tokens: int
    counts: NDArray[np.int64]


class AgentThread:
    """Drives a `RankCore` under its lock between a `DealerLink` (None: no rebalancer) and the forward thread."""

    def __init__(
        self,
        core: RankCore,
        lock: Lock,
        link: DealerLink | None,
        *,
        silence_limit_s: float,
        recorder: Callable[[Callable[[], None]], RankRecorder],
    ) -> None:
        self.core = core
        self.recorder = recorder(self.wake)
        self.lock = lock
        self.switch_events: Callable[[], list[SwitchEvent]] = list
        self.frames_refused = 0
        self.errors = 0
        self.reconnects = 0
        self._silence_limit_s = silence_limit_s
        self._heard_at = time.monotonic()
        self._link = link
        self._takes: deque[Take] = deque()
        self._costs: deque[RankCosts] = deque(maxlen=8)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._partial: _Partial | None = None
        self._partial_ends = False
        self._excess_logged = False
        self._goodbye = False
        self._thread = threading.Thread(target=self._run, name="evenroute-agent", daemon=True)

    def start(self) -> None:
        """Begin; the first status goes out at once."""
        self._thread.start()

    # ------------------------------------------------------------------------------- forward thread

    def wake(self) -> None:
        """Something is due. Microseconds, never waits; the thread runs once the caller releases the GIL."""
        _write_event(self._wake, 1)  # fails where the counter is full: then it is awake anyway

    def hand_over(self, take: Take) -> None:
        """Give a take to this thread, which sends it."""
        self._takes.append(take)
        self.wake()

    def report(self, costs: RankCosts) -> None:
        """Send this in the next turn."""
        self._costs.append(costs)

    # --------------------------------------------------------------------------------- agent thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        if self._link is not None:
            poller.register(self._link.socket, zmq.POLLIN)
            poller.register(self._link.monitor, zmq.POLLIN)
        while not self._stopping:
            try:
                poller.poll(self._wait_ms())
                self._turn()
            except Exception:  # the control plane never stops routing; it goes on with the next turn
                self.errors += 1
                if self.errors <= 10:
                    logger.exception("agent thread: error %d, goes on", self.errors)
                time.sleep(0.05)
        if self._goodbye:
            self._send([Goodbye(run=self.core.run, rank=self.core.rank)])

    def _wait_ms(self) -> int:
        with self.lock:
            due = self.core.next_time() - time.monotonic()
        return max(0, math.ceil(1000.0 * min(due, _MAX_WAIT_S)))

    def _turn(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._takes:
            self._add_take(self._takes[0])
        if self._partial_ends:
            self._partial_ends = False
            self._send(self._end_partial())
        if self._link is None:
            with self.lock:
                self.core.tick(time.monotonic())  # nothing is sent, but its clock goes on
            return
        self._watch_silence(self._link)
        if self._link.connected_anew():
            with self.lock:
                out = self.core.reconnected(time.monotonic())
            self._send(out)
        for frames in self._link.receive(_RECEIVE_BATCH):
            self._heard_at = time.monotonic()
            self._receive(frames)
        with self.lock:
            out = self.core.tick(time.monotonic())
        self._send(out)
        while self._costs:
            self._send([self._costs.popleft()])
        while self.core.notices:
            logger.warning("rank %d: %s", self.core.rank, self.core.notices.popleft())
        for report in self.recorder.due(time.monotonic()):
            self._link.send(CONTROL_TAG, encode_control(report))

    def _watch_silence(self, link: DealerLink) -> None:
        """A frozen rebalancer keeps its connections; another one at its address is only found by a new one."""
        now = time.monotonic()
        with self.lock:
            waits = self.core.unsent().in_flight_steps is not None
        # Without a window in flight nothing need come down at all.
        if now - self._heard_at > self._silence_limit_s * (1 if waits else 6):
            self._heard_at = now
            self.reconnects += 1
            link.reconnect()

    def _add_take(self, take: Take) -> None:
        """The take stays in the queue until its counts are part of the window, then leaves it under the lock: whoever
        asks what is unsent neither misses it nor finds it twice."""
        added = False
        try:
            counts = None
            if take.buffer is not None:
                take.buffer.wait()
                counts = take.buffer.counts
                if take.session is not None:
                    take.session.counts(take.pass_from, take.last_step, take.tokens, counts)
            with self.lock:
                added = True
                self._takes.popleft()
                self._merge(take, counts)
        finally:
            if not added:
                self._takes.popleft()
            if take.buffer is not None:
                take.release(take.buffer)
        if take.ends_window:
            self._send(self._end_partial())

    def _merge(self, take: Take, counts: NDArray[np.int64] | None) -> None:
        """Under the lock."""
        found = self._partial
        if found is None:
            job = self.core.job
            shape = (job.num_layers, job.num_logical_experts)
            empty = np.zeros(shape, np.int64) if counts is None else counts.copy()
            self._partial = _Partial(take.first_step, take.last_step, take.tokens, empty)
            return
        if counts is not None:
            found.counts += counts
        found.last_step = take.last_step
        found.tokens += take.tokens

    def _end_partial(self) -> Iterable[Up]:
        """The window goes to the stream."""
        found = self._partial  # changed by this thread alone
        if found is None:
            return ()
        tokens = self._rows(found)
        with self.lock:
            self._partial = None
            return self.core.add_counts(
                found.first_step, found.last_step, tokens, found.counts, time.monotonic()
            )

    def _rows(self, window: _Partial) -> int:
        """Rows of a window: those announced, or as many as the counts need: what was routed is counted."""
        busiest = window.counts.sum(axis=1)
        rows = -(-int(busiest.max()) // self.core.job.top_k)
        if window.tokens and rows > window.tokens and not self._excess_logged:
            self._excess_logged = True
            logger.warning(
                "rank %d: steps %d..%d: %d rows were routed in layer %d, %d were announced; counted as routed "
                "(announce every pass: RankAgent.step or begin_pass; leave padding out: num_valid_tokens)",
                self.core.rank,
                window.first_step,
                window.last_step,
                rows,
                int(busiest.argmax()),
                window.tokens,
            )
        return max(window.tokens, rows)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            if len(frames) == 2 and frames[0] == CONTROL_TAG:
                order = decode_order(frames[1])
                if isinstance(order, RecordOrder):
                    self.recorder.order(order, self.core.fence)
                elif self._link is not None and order.run == self.core.run:
                    report = TraceReport(order.run, self.core.rank, order.trace, self.switch_events())
                    self._link.send(CONTROL_TAG, encode_control(report))
                return
            if len(frames) != 1:
                raise MessageError(f"frames: {len(frames)} found, expected 1")
            prepared = self.core.prepare(decode_down(frames[0]))
        except MessageError as error:
            self.frames_refused += 1
            if self.frames_refused <= 10:
                logger.warning("frame of the rebalancer refused: %s", error)
            return
        with self.lock:
            out = self.core.receive(prepared, time.monotonic())
        self._send(out)

    def _send(self, messages: Iterable[Up]) -> None:
        for message in messages:
            if self._link is not None:
                self._link.send(encode(message))

    # ---------------------------------------------------------------------------------------- close

    def waiting(self) -> tuple[int, tuple[int, int] | None]:
        """Tokens and steps of what was taken and is not handed to the stream yet; under the lock."""
        partial = [] if self._partial is None else [self._partial]
        parts: list[Take | _Partial] = [*self._takes, *partial]
        if not parts:
            return 0, None
        steps = min(part.first_step for part in parts), max(part.last_step for part in parts)
        return sum(part.tokens for part in parts), steps

    def unsent(self) -> Unsent:
        """Counts not known to be stored."""
        with self.lock:
            tokens, steps = self.waiting()
            unsent = self.core.unsent()
        if steps is None:
            return unsent
        first = steps[0] if unsent.open_steps is None else min(steps[0], unsent.open_steps[0])
        return replace(unsent, open_tokens=unsent.open_tokens + tokens, open_steps=(first, steps[1]))

    def drained(self) -> bool:
        """Whether everything counted is known to be stored."""
        with self.lock:
            unsent = self.core.unsent()
            _, steps = self.waiting()
        return steps is None and unsent.in_flight_steps is None and unsent.open_steps is None

    def hand_back(self, limit_s: float) -> None:
        """Put all that was taken into the core's stream, stop, and close the socket without a word."""
        deadline, self._partial_ends = time.monotonic() + limit_s, True
        self.wake()
        while self._thread.is_alive() and self.waiting()[1] is not None and time.monotonic() < deadline:
            time.sleep(0.001)
        self.close(0.0, goodbye=False)

    def close(self, limit_s: float, *, goodbye: bool) -> bool:
        """Wait up to `limit_s` for what is unsent, then stop and close the socket; False if something is unsent.

        `goodbye`: say that this rank ends as it should; without it the rebalancer takes its silence for a failure.
        """
        deadline = time.monotonic() + limit_s
        self._partial_ends = True
        self.wake()
        while self._thread.is_alive() and not self.drained() and time.monotonic() < deadline:
            time.sleep(0.01)
        done = self.drained()
        self.recorder.close(max(1.0, limit_s))
        self._goodbye = goodbye
        self._stopping = True  # after one more turn, which reports what was recorded
        self.wake()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            if self._link is not None:
                self._link.close(linger_ms=500 if goodbye else 100)
            wake, self._wake = self._wake, -1  # a later wake must not write into another's file
            os.close(wake)
        return done
