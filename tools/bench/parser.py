"""The parser of one bench's flags."""

from __future__ import annotations

import argparse
from typing import NoReturn

from evenroute.tools.errors import fail


class BenchParser(argparse.ArgumentParser):
    """The parser of one bench; its errors are one line."""

    def __init__(self, name: str, description: str) -> None:
        super().__init__(
            prog=f"evenroute bench {name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.name = name

    def error(self, message: str) -> NoReturn:
        fail(f"bench {self.name}: {message}")
