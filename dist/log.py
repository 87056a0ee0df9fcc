"""The rebalancer's log: set up once for the process, and with a limit on lines of one kind."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from evenroute.eplb._io import visible

LIMIT_PER_MINUTE = 20
_PERIOD_S = 60.0
_LONGEST_PERIOD_S = 3600.0


@dataclass
class _Kind:
    """Lines of one kind, logged and suppressed in this period. A flood that goes on gets one line a period."""

    since: float
    period_s: float = _PERIOD_S
    logged: int = 0
    suppressed: int = 0
    flooding: bool = False


class _OneLine(logging.Formatter):
    """A message may quote a stranger: what would move the cursor or begin a line is escaped. Tracebacks are kept."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = visible(record.message)
        return super().formatMessage(record)


def set_up_logging(level: str) -> None:
    """One line a message on stderr, with UTC time; for the processes of this package only."""
    handler = logging.StreamHandler()
    formatter = _OneLine("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logger = logging.getLogger("evenroute")
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


class LimitedLog:
    """Logs the first lines of a kind, then only how many more came: after a minute, then less and less often."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._kinds: dict[str, _Kind] = {}

    def log(self, level: int, kind: str, text: str, *, limit: int = LIMIT_PER_MINUTE) -> bool:
        """Log `kind: text` unless `limit` lines of its kind were logged lately; False when it was suppressed."""
        now = time.monotonic()
        self.turn(now)
        state = self._kinds.setdefault(kind, _Kind(now))
        if state.flooding or state.logged >= limit:
            state.suppressed += 1
            return False
        state.logged += 1
        self._logger.log(level, "%s: %s", kind, text)
        return True

    def turn(self, now: float) -> None:
        """Log how many lines were suppressed in the periods that are over; to be called once a second or so."""
        for kind, state in list(self._kinds.items()):
            if now - state.since < state.period_s:
                continue
            if not state.suppressed:
                del self._kinds[kind]
                continue
            minutes = round(state.period_s / 60)
            self._logger.warning(
                "%s: %d more in the last %s",
                kind,
                state.suppressed,
                "minute" if minutes == 1 else f"{minutes} minutes",
            )
            longer = min(2 * state.period_s, _LONGEST_PERIOD_S)
            self._kinds[kind] = _Kind(now, longer, flooding=True)
