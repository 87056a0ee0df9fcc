"""What this rank did for switches, kept for `evenroute trace` and exported to OpenTelemetry where it is installed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from evenroute.dist.spans import span
from evenroute.dist.wire.messages import Key
from evenroute.dist.wire.tracing import MAX_EVENTS, EventName, SwitchEvent


class SwitchNotes:
    """Written by the forward thread, some hundred nanoseconds an event; read by the agent's thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._events: deque[SwitchEvent] = deque(maxlen=MAX_EVENTS)
        self._target: Key | None = None
        self._target_at = 0.0
        self._opened_at: dict[int, float] = {}
        self._staged = 0

    def add(self, name: EventName, began: float, step: int, layer: int = -1, number: int = 0) -> None:
        """Something that ends now."""
        ended = time.time()
        self._events.append(SwitchEvent(name, began, max(0.0, ended - began), step, layer, number))
        if name in ("switch", "commit", "transfer"):
            span(f"evenroute.{name}", began, ended, rank=self._rank, step=step, layer=layer, version=number)
        if name == "open":
            self._opened_at[layer] = began

    def target(self, key: Key | None, step: int) -> None:
        """What the ranks are switching to now, None = nothing; a switch ends when that changes."""
        if key == self._target:
            return
        if self._target is not None:
            self.add("switch", self._target_at, step, number=self._target[1])
        self._target, self._target_at, self._staged = key, time.time(), 0
        self._opened_at.clear()

    def staged(self, moved: Sequence[int], count: int, step: int) -> None:
        """The first `count` of the layers that move are staged here; seen at a vote, up to a period late."""
        for layer in moved[self._staged : count]:
            self.add("transfer", self._opened_at.get(layer, time.time()), step, layer)
        self._staged = max(self._staged, count)

    def events(self) -> list[SwitchEvent]:
        """All that is kept, oldest first."""
        return list(self._events)
