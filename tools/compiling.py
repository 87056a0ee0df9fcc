"""Says that the planner is being compiled, where a command would otherwise seem to hang."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from numba.core.event import Listener, install_listener


class _Says(Listener):
    def __init__(self) -> None:
        self._said = False

    def on_start(self, event: object) -> None:
        """A function is compiled: it is not in the cache on disk."""
        del event
        if not self._said:
            self._said = True
            sys.stderr.write("compiling the planner, once on this machine: up to a minute or two\n")

    def on_end(self, event: object) -> None:
        """Nothing to say."""


def says_compiling() -> AbstractContextManager[object]:
    """Within it the first compilation puts one line on stderr; code from the cache says nothing."""
    listener: AbstractContextManager[object] = install_listener("numba:compile", _Says())
    return listener
