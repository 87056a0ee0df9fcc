"""Words and figures as all commands show them; nothing here imports rich."""

from __future__ import annotations

import unicodedata


def one_line(text: str) -> str:
    """A name that somebody else chose, safe to show: one line, no control characters, no stray spaces."""
    visible = "".join(
        " " if unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") else char for char in text
    )
    return " ".join(visible.split())


def short(value: float) -> str:
    """Three digits and a unit: 12.8 G."""
    power = 0
    while value >= 999.5 and power < 5:
        value /= 1000
        power += 1
    return f"{value:.3g}{['', ' k', ' M', ' G', ' T', ' P'][power]}"


def plural(number: int, word: str, ending: str = "s") -> str:
    """ "1 file", "12 files"."""
    return f"{number:,} {word}{'' if number == 1 else ending}"
