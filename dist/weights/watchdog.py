"""Ends the process when a transfer hangs on the device, where no call on the host would notice."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

from evenroute.dist.weights.exchange import InFlight

STALL_EXIT_STATUS = 70
GRACE_S = 5.0


def end_process(message: str) -> None:
    """One line on stderr, then exit at once: threads that wait for the device cannot be joined."""
    sys.stderr.write(f"evenroute: error: {message}\n")
    sys.stderr.flush()
    os._exit(STALL_EXIT_STATUS)


class StallWatchdog:
    """A thread that looks after the oldest chunk in flight.

    It asks the device nothing before a chunk is ``limit_s`` old (another thread's query spoils a CUDA graph capture in
    global mode), and then ends the process once the chunk has been seen running, and not done, for `GRACE_S` more:
    waiting behind earlier work of the own stream does not count.
    """

    def __init__(
        self, limit_s: float, on_stall: Callable[[str], None] = end_process, *, grace_s: float = GRACE_S
    ) -> None:
        self._limit_s = limit_s
        self._grace_s = grace_s
        self._on_stall = on_stall
        self._lock = threading.Lock()
        self._chunk: InFlight | None = None
        self._running_since: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="evenroute-migration-watchdog", daemon=True)
        self._thread.start()

    def watch(self, chunk: InFlight | None) -> None:
        """The oldest chunk that is not known to be done, or None."""
        with self._lock:
            if chunk is not self._chunk:
                self._chunk, self._running_since = chunk, None

    def late(self) -> str | None:
        """The chunk that outlasts its limit, if it does."""
        with self._lock:
            chunk, now = self._chunk, time.monotonic()
            if chunk is None or now - chunk.started <= self._limit_s:
                return None
            if chunk.finished() or not chunk.has_begun():
                return None
            if self._running_since is None:
                self._running_since = now
            if now - self._running_since <= self._grace_s:
                return None
            return f"{chunk.what} did not complete within {self._limit_s:g} s"

    def close(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join(timeout=5)

    def _loop(self) -> None:
        while not self._stop.wait(min(0.25, self._limit_s / 4)):
            message = self.late()
            if message is not None:
                self._on_stall(message)
                return
