"""Plain values that callers hand in: ValueError in one line with the field, what was found and what is allowed."""

from __future__ import annotations

from typing import Any


def describe(value: Any) -> str:
    """What was found, for a message of one line: plain values as they are, of others the type (and a tensor's form)."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    form = ""
    if all(hasattr(value, part) for part in ("dtype", "shape", "device")):
        form = f" {value.dtype} {list(value.shape)} on {value.device}"
    return f"a {name}{form}"


def require_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}={describe(value)} is not one of {', '.join(allowed)}")


def require_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless ``value`` is an int (no bool) in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, found {describe(value)}")
    if value < low or (high is not None and value > high):
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be {bound}, found {describe(value)}")


def require_number(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is an int or a float (no bool), and finite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise ValueError(f"{name} must be a finite number, found {describe(value)}")


def require_bool(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, found {describe(value)}")


def require_instance(name: str, value: Any, kind: type[Any]) -> None:
    """Raise ValueError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, found {describe(value)}")
