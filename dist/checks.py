"""What callers hand in, beside `routing.values`: ValueError in one line, the field, what was found, what is allowed.

No torch: clients, keys and the rebalancer's settings are checked with this too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evenroute.routing.values import describe, require_int, require_number

LEAST_S, MOST_S = 0.001, 366 * 86400.0  # of a time
_MOST = 2**62
_MOST_TEXT = 160


def shown(value: Any) -> str:
    """What was found, for a message of one line: texts (paths, addresses) longer than `describe` gives them."""
    if isinstance(value, str):
        text = repr(value)
        return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
    return describe(value)


def require_text(name: str, value: Any) -> str:
    """`value` if it is a str; ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a str, found {describe(value)}")
    return value


def require_path(name: str, value: Any) -> Path:
    """`value`, a str or a path, as a path; ValueError for anything else, for none, and for one no file can have."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a path, found {describe(value)}")
    if not text or "\0" in text or not _is_utf8(text):
        raise ValueError(f"{name} must be a path, found {shown(text)}")
    return Path(text)


def require_at_least(name: str, value: Any, low: int, high: int = _MOST) -> None:
    """Raise ValueError unless `value` is an int (no bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        require_int(name, value, low)
    if value < low:
        raise ValueError(f"{name}={describe(value)}: must be at least {low}")
    if value > high:
        raise ValueError(f"{name}={describe(value)}: must be at most {high}")


def require_seconds(name: str, value: Any, low: float = 0.0, high: float = MOST_S) -> None:
    """Raise ValueError unless `value` is a time in [low, high] seconds."""
    require_number(name, value)
    if not low <= value <= high:
        raise ValueError(f"{name} must be {low:g} to {high:g} seconds, found {describe(value)}")


def require_parts(
    name: str, value: Any, kind: str, methods: Sequence[str], attributes: Sequence[str] = ()
) -> None:
    """Raise ValueError unless `value`, of any class, has the methods and attributes that a `kind` has."""
    missing = [method for method in methods if not callable(getattr(value, method, None))]
    missing += [attribute for attribute in attributes if not hasattr(value, attribute)]
    if missing or isinstance(value, type):
        lacks = f" without {', '.join(missing)}" if missing else ""
        raise ValueError(f"{name} must be a {kind}, found {_class_or(value)}{lacks}")


def require_callable(name: str, value: Any, takes: str) -> None:
    """Raise ValueError unless `value` can be called; `takes` says how, for the message."""
    if not callable(value):
        raise ValueError(f"{name} must be callable as {takes}, found {describe(value)}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _class_or(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else describe(value)
