"""The parser of one bench's flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from evenroute.tools.flags import FlagParser


class BenchParser(FlagParser):
    """The parser of one bench."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"evenroute bench {name}", description, f"bench {name}")

    def require_each(self, flag: str, values: Iterable[str], allowed: Sequence[str]) -> None:
        """An error unless all values are allowed."""
        for value in values:
            if value not in allowed:
                self.error(f"{flag}: found {value!r}, expected of {', '.join(allowed)}")

    def require_some(self, args: argparse.Namespace, *names: str) -> None:
        """An error unless each of these flags is at least 1."""
        for name in names:
            if getattr(args, name) < 1:
                self.error(f"--{name.replace('_', '-')}: found {getattr(args, name)}, expected at least 1")
