"""A log that a flood cannot fill."""

from __future__ import annotations

import logging
import time
from collections import Counter

LIMIT_PER_MINUTE = 20


class LimitedLog:
    """Tells no more than so many lines a minute of one kind, and how many it kept back."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told: Counter[str] = Counter()
        self._since = time.monotonic()

    def tell(self, level: int, kind: str, text: str) -> bool:
        """Log `kind: text`; False when it was kept back."""
        now = time.monotonic()
        if now - self._since >= 60.0:
            for name, number in self._told.items():
                if number > LIMIT_PER_MINUTE:
                    self._logger.warning("%s: %d more in the last minute", name, number - LIMIT_PER_MINUTE)
            self._told.clear()
            self._since = now
        self._told[kind] += 1
        if self._told[kind] > LIMIT_PER_MINUTE:
            return False
        self._logger.log(level, "%s: %s", kind, text)
        return True
