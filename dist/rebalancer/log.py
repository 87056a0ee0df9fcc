"""A log that a flood cannot fill."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

LIMIT_PER_MINUTE = 20
_PERIOD_S = 60.0
_LONGEST_PERIOD_S = 3600.0


@dataclass
class _Kind:
    """Lines of one kind: told and kept back in this period. A flood that goes on gets one line a period."""

    since: float
    period_s: float = _PERIOD_S
    told: int = 0
    kept_back: int = 0
    flooding: bool = False


class LimitedLog:
    """Tells the first lines of a kind, and how many it kept back: a minute later, then less and less often."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: dict[str, _Kind] = {}

    def tell(self, level: int, kind: str, text: str, *, limit: int = LIMIT_PER_MINUTE) -> bool:
        """Log `kind: text` unless `limit` lines of its kind were told lately; False when it was kept back."""
        now = time.monotonic()
        self.turn(now)
        state = self._kinds.setdefault(kind, _Kind(now))
        if state.flooding or state.told >= limit:
            state.kept_back += 1
            return False
        state.told += 1
        self._logger.log(level, "%s: %s", kind, text)
        return True

    def turn(self, now: float) -> None:
        """Say what was kept back in the periods that are over; to be called once a second or so."""
        for kind, state in list(self._kinds.items()):
            if now - state.since < state.period_s:
                continue
            if not state.kept_back:
                del self._kinds[kind]
                continue
            minutes = round(state.period_s / 60)
            self._logger.warning(
                "%s: %d more in the last %s",
                kind,
                state.kept_back,
                "minute" if minutes == 1 else f"{minutes} minutes",
            )
            longer = min(2 * state.period_s, _LONGEST_PERIOD_S)
            self._kinds[kind] = _Kind(now, longer, flooding=True)
