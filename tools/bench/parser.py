"""The parser of one bench's flags."""

from __future__ import annotations

from evenroute.tools.flags import FlagParser


class BenchParser(FlagParser):
    """The parser of one bench."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(f"evenroute bench {name}", description, f"bench {name}")
