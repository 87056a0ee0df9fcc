"""Ends the process when a transfer hangs on the device, where no call on the host would notice."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from evenroute.dist.exchange import InFlight

STALL_EXIT_STATUS = 70


def end_process(message: str) -> None:
    """One line on stderr, then exit at once: threads that wait for the device cannot be joined."""
    sys.stderr.write(f"evenroute: error: {message}\n")
    sys.stderr.flush()
    os._exit(STALL_EXIT_STATUS)


class StallWatchdog:
    """A thread that looks at the chunks in flight a few times a second.

    A chunk's time counts from when the device has begun it; waiting behind earlier work of the own stream does not.
    """

    def __init__(self, limit_s: float, on_stall: Callable[[str], None] = end_process) -> None:
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._lock = threading.Lock()
        self._chunks: deque[InFlight] = deque()
        self._begun: float | None = None  # when the first chunk was first seen to be running
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="evenroute-migration-watchdog", daemon=True)
        self._thread.start()

    def watch(self, chunk: InFlight) -> None:
        """Look after a chunk until its event is done."""
        with self._lock:
            self._chunks.append(chunk)

    def late(self) -> str | None:
        """The chunk that outlasts its limit, if one does."""
        with self._lock:
            while self._chunks and self._chunks[0].finished():
                self._chunks.popleft()
                self._begun = None
            if not self._chunks or not self._chunks[0].has_begun():
                return None
            if self._begun is None:
                self._begun = time.monotonic()
            if time.monotonic() - self._begun <= self._limit_s:
                return None
            return f"{self._chunks[0].what} did not complete within {self._limit_s:g} s"

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
