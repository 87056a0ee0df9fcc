"""The oldest torch and triton that evenroute is run with; older ones are refused by name."""

from __future__ import annotations

import re
from importlib import metadata

LEAST = {"torch": (2, 11), "triton": (3, 6)}


def check_versions() -> None:
    """ImportError in one line where an older one is installed; one that is not installed is no matter here."""
    for name, least in LEAST.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        numbers = re.match(r"(\d+)\.(\d+)", found)
        if numbers is not None and tuple(map(int, numbers.groups())) < least:
            wanted = ".".join(map(str, least))
            raise ImportError(
                f"evenroute needs {name} {wanted} or newer, found {found}: pip install 'evenroute[rank]'"
            )
