"""The rebalancer's log: set up once for the process, and with a limit on lines of one kind."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Any

import msgspec

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


class _Json(logging.Formatter):
    """One JSON object a line: time, level, logger, event (a short fixed word), message, and the event's fields."""

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(found, enc_hook=str).decode()


def event(name: str, **fields: object) -> dict[str, object]:
    """`logger.info(text, extra=event("published", version=3))`: what a JSON log says of a message beside its text."""
    return {"event": name, "fields": fields}


def set_up_logging(level: str, form: str = "text") -> None:
    """One line a message on stderr, with UTC time; for the processes of this package only. ``form``: text or json."""
    handler = logging.StreamHandler()
    formatter = _OneLine("%(asctime)sZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(_Json() if form == "json" else formatter)
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
        self._logger.log(level, "%s: %s", kind, text, extra=event(kind))
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
                extra=event("suppressed", kind=kind, lines=state.suppressed),
            )
            longer = min(2 * state.period_s, _LONGEST_PERIOD_S)
            self._kinds[kind] = _Kind(now, longer, flooding=True)
