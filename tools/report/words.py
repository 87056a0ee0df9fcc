"""Words and figures as all commands show them; nothing here imports rich."""

from __future__ import annotations

import codecs
import sys
from typing import TYPE_CHECKING

from evenroute.eplb._io import escaped, visible

if TYPE_CHECKING:
    from evenroute.dist.wire.membership import MembershipView

__all__ = ["key_text", "membership_text", "one_line", "plain_streams", "plural", "short", "visible"]

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


def membership_text(view: MembershipView) -> str:
    """Of a job whose ranks come and go: who is in it, who comes, who was lost; "" for other jobs."""
    if not view.state:
        return ""
    more = [f"{view.lost} lost" if view.lost else "", f"{view.joining} ask to join" if view.joining else ""]
    more.append(f"{view.wanted} wanted" if view.wanted not in (None, len(view.members)) else "")
    ranks = plural(len(view.members), "rank")
    told = "" if view.text == ranks else f"{one_line(view.text)}, "
    extra = "".join(f", {text}" for text in more if text)
    return f"membership {view.number}, {view.state} for {view.since_s:.0f} s: {told}{ranks}{extra}"


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
