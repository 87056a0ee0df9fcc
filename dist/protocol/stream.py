"""One rank's stream of counts: a sealed window in flight, an open one behind it. No I/O, no clock.

A sealed window never changes and is resent until it is acknowledged, or refused for good; later counts add up in one
open window, sealed with the next sequence number then. So memory is bounded by two windows, and counted = stored +
refused + in flight (unless stored) + open. A stream goes on in a job's next membership, under its run and rank
(`move`); the window in flight is not changed.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.wire.messages import Ack, Down, RankWindow, Refusal


@dataclass
class _OpenWindow:
    first_step: int
    last_step: int
    tokens: int
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Unsent:
    """What would be lost if the rank ended now: the window in flight (perhaps stored already) and the open one."""

    in_flight_tokens: int
    in_flight_steps: tuple[int, int] | None
    open_tokens: int
    open_steps: tuple[int, int] | None


class RankStream:
    """Numbered windows of one rank in one run; times in seconds of any monotonic clock."""

    def __init__(self, *, run: int, rank: int, resend_s: float) -> None:
        self._run = run
        self._rank = rank
        self._resend_s = resend_s
        self._sent_at = 0.0
        self._next_seq = 1
        self._open: _OpenWindow | None = None
        self.in_flight: RankWindow | None = None
        self.windows_acknowledged = 0
        self.windows_refused = 0
        self.tokens_refused = 0

    def add(
        self, first_step: int, last_step: int, tokens: int, counts: NDArray[np.int64], now: float
    ) -> list[RankWindow]:
        """Add a take: counts int64 [L, E] (copied) of steps ``first_step..last_step``. Returns what to send now."""
        if self._open is None:
            self._open = _OpenWindow(first_step, last_step, tokens, np.array(counts, dtype=np.int64))
        else:
            self._open.first_step = min(self._open.first_step, first_step)
            self._open.last_step = max(self._open.last_step, last_step)
            self._open.tokens += tokens
            self._open.counts += counts
        return self._seal(now)

    def move(self, run: int, rank: int, now: float) -> list[RankWindow]:
        """The process is ``rank`` of another membership now: windows sealed from here on carry that.

        What is open is sealed before, unless a window is in flight. Returns what to send now.
        """
        out = self._seal(now)
        self._run, self._rank, self._next_seq = run, rank, 1
        return out

    def waits_for(self, message: Down) -> bool:
        """Whether a message answers the window in flight, which may be of an earlier membership's run."""
        if self.in_flight is None or message.run != self.in_flight.run:
            return False
        if isinstance(message, Refusal):
            return message.what == "window" and message.number == self.in_flight.seq
        return isinstance(message, Ack) and message.seq == self.in_flight.seq

    def acknowledged(self, run: int, seq: int, now: float) -> list[RankWindow]:
        """The window ``seq`` is stored; any but the one in flight is ignored. Returns what to send now."""
        if self.in_flight is None or (self.in_flight.run, self.in_flight.seq) != (run, seq):
            return []
        self.in_flight = None
        self.windows_acknowledged += 1
        return self._seal(now)

    def refused(self, run: int, seq: int, now: float) -> list[RankWindow]:
        """The window ``seq`` will never be stored: it is dropped. Returns what to send now."""
        if self.in_flight is None or (self.in_flight.run, self.in_flight.seq) != (run, seq):
            return []
        self.tokens_refused += self.in_flight.tokens
        self.in_flight = None
        self.windows_refused += 1
        return self._seal(now)

    def tick(self, now: float) -> list[RankWindow]:
        """The window in flight again, if it was sent ``resend_s`` ago."""
        if self.in_flight is None or now - self._sent_at < self._resend_s:
            return []
        self._sent_at = now
        return [self.in_flight]

    def resend(self, now: float) -> list[RankWindow]:
        """The window in flight again, at once (a connection is new)."""
        self._sent_at = now
        return [] if self.in_flight is None else [self.in_flight]

    def next_time(self) -> float | None:
        """When `tick` has something to do; None = not before something else happens."""
        return None if self.in_flight is None else self._sent_at + self._resend_s

    def unsent(self) -> Unsent:
        """What is not known to be stored."""
        sealed, merged = self.in_flight, self._open
        return Unsent(
            in_flight_tokens=0 if sealed is None else sealed.tokens,
            in_flight_steps=None if sealed is None else (sealed.first_step, sealed.last_step),
            open_tokens=0 if merged is None else merged.tokens,
            open_steps=None if merged is None else (merged.first_step, merged.last_step),
        )

    def _seal(self, now: float) -> list[RankWindow]:
        if self.in_flight is not None or self._open is None:
            return []
        merged, self._open = self._open, None
        self.in_flight = RankWindow(
            run=self._run,
            rank=self._rank,
            seq=self._next_seq,
            first_step=merged.first_step,
            last_step=merged.last_step,
            tokens=merged.tokens,
            counts=np.ascontiguousarray(merged.counts, dtype="<i8").tobytes(),
        )
        self._next_seq += 1
        self._sent_at = now
        return [self.in_flight]
