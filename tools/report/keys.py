"""Single keys from a terminal, while a screen is shown."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[5~": "page-up",
    b"\x1b[6~": "page-down",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\t": "tab",
    b"\x7f": "backspace",
    b"\x03": "ctrl-c",
}


class Keys:
    """Keys by name; none without a terminal."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def pressed(self, limit_s: float) -> list[str]:
        """Keys within the next ``limit_s`` seconds; returns at the first."""
        if self._descriptor is None:
            time.sleep(max(0.0, limit_s))
            return []
        if not select.select([self._descriptor], [], [], max(0.0, limit_s))[0]:
            return []
        data = os.read(self._descriptor, 256)
        if not data:  # the terminal is gone
            return ["q"]
        return names_of(data)


def names_of(data: bytes) -> list[str]:
    """What was typed, key by key; unknown sequences are left out."""
    found = []
    while data:
        size = 1
        if data[:2] in (b"\x1b[", b"\x1bO"):
            data = b"\x1b[" + data[2:]
            size = 2 + next(
                (place for place, byte in enumerate(data[2:], 1) if 0x40 <= byte <= 0x7E), len(data)
            )
        word, data = data[:size], data[size:]
        name = _NAMES.get(word) or (word.decode() if word.isalnum() and len(word) == 1 else "")
        if name:
            found.append(name)
    return found


@contextmanager
def single_keys(wanted: bool) -> Iterator[Keys]:
    """Keys come one by one and are not shown, until the end; the terminal is left as it was."""
    if not wanted or not sys.stdin.isatty():
        yield Keys(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
