"""Words and figures as all commands show them; nothing here imports rich."""

from __future__ import annotations

import codecs
import sys

from evenroute.eplb._io import escaped, visible

__all__ = ["key_text", "one_line", "plain_streams", "plural", "short", "visible"]

# One character for one, so that columns stay in their places.
_PLAIN = dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True))
_ENCODING_ERRORS = "evenroute-plain"


def key_text(key: tuple[int, int] | None) -> str:
    """A placement's key, the same everywhere: epoch in hex / version; None: while layers of two versions are in use."""
    if key is None:
        return "switching"
    return "start" if tuple(key) == (0, 0) else f"{key[0]:x}/{key[1]}"


def one_line(text: str) -> str:
    """As `visible`, without stray spaces; line breaks become spaces."""
    return visible(" ".join(text.split()))


def plain_streams() -> None:
    """From now on stdout and stderr show what their encoding cannot write as plain signs or escapes."""
    codecs.register_error(_ENCODING_ERRORS, _replacement)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=_ENCODING_ERRORS)


def _replacement(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(char) or escaped(char) for char in text), error.end


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
