"""Plain values that callers hand in: ValueError in one line with the field, what was found and what is allowed.

The ``require_`` functions take Python's own values only; the ``as_`` functions also take numpy's integers and arrays,
and give back what the code behind them works with. All look at a value's type and size, never at an array's content,
but for the range in `as_integers`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from numbers import Real
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_INTEGER = 1 << 62
LEAST_S, MOST_S = 0.001, 366 * 86400.0  # of a time
_MOST_TEXT = 160
# What an object may raise while it is turned into a number or an array (tensors without memory, with gradients, ...).
CONVERSION_ERRORS = (TypeError, ValueError, RuntimeError, OverflowError, AttributeError, LookupError)


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


def one_line(error: BaseException) -> str:
    """An error's text for a message of one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


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


def require_text(name: str, value: Any) -> str:
    """``value`` if it is text that can be written as UTF-8; ValueError otherwise."""
    try:
        str.encode(value)
    except (TypeError, UnicodeEncodeError):
        raise ValueError(f"{name} must be text, found {describe(value)}") from None
    return str(value)


def require_instance(name: str, value: Any, kind: type[Any]) -> None:
    """Raise ValueError unless ``value`` is a ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"{name} must be a {kind.__name__}, found {describe(value)}")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite real number, Python's or numpy's, and no bool."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return abs(float(value)) < 1e300
    except OverflowError:  # an int beyond the floats
        return False


def as_integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """``value`` as an int: Python's or numpy's integer, no bool, from ``low`` to ``high``.

    Raises:
        ValueError: anything else.
    """
    if type(value) is not int:
        try:
            number = None if isinstance(value, bool) else index(value)
        except CONVERSION_ERRORS:
            number = None
        if number is None:
            bound = "" if low is None else f" >= {low}"
            raise ValueError(f"{name} must be an integer{bound}, found {describe(value)}")
        value = int(number)
    if low is not None and value < low:
        raise ValueError(f"{name} must be >= {low}, found {describe(value)}")
    if value > (MAX_INTEGER if high is None else high):
        raise ValueError(
            f"{name} must be <= {MAX_INTEGER if high is None else high}, found {describe(value)}"
        )
    if value < -MAX_INTEGER:
        raise ValueError(f"{name} must be >= {-MAX_INTEGER}, found {describe(value)}")
    return int(value)


def _as_array(name: str, form: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except CONVERSION_ERRORS as error:
        raise ValueError(f"{name} must be {form}: {one_line(error)}") from None


def as_numbers(name: str, values: Any, form: str) -> NDArray[np.float64]:
    """A copy of an array-like of real numbers, contiguous float64; ``form`` says which, as "[layers, experts]".

    Raises:
        ValueError: not numbers, or complex ones; ``name must be numbers form``, and what was found.
    """
    wanted = f"numbers {form}"
    array = _as_array(name, wanted, values)
    if array.dtype.kind not in "biufO":
        raise ValueError(f"{name} must be {wanted}, found dtype {array.dtype}")
    if array.dtype.kind == "O" and array.ndim == 0:
        raise ValueError(f"{name} must be {wanted}, found {describe(values)}")
    try:
        with np.errstate(over="ignore"):  # becomes an infinity, which is refused by its place
            return np.array(array, dtype=np.float64, order="C", copy=True)
    except CONVERSION_ERRORS as error:
        raise ValueError(f"{name} must be {wanted}: {one_line(error)}") from None


def as_integers(name: str, values: Any, dtype: type, low: int, high: int) -> NDArray[Any]:
    """A copy of an array-like of integers in [low, high], contiguous and of this dtype.

    Raises:
        ValueError: other numbers, or none.
    """
    array = _as_array(name, "an array of integers", values)
    if array.size and array.dtype.kind not in "iu":
        found = describe(values) if array.ndim == 0 else f"dtype {array.dtype}"
        raise ValueError(f"{name} must hold integers, found {found}")
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        raise ValueError(
            f"{name} must lie in [{low}, {high}], found {int(array.min())} .. {int(array.max())}"
        )
    return np.array(array, dtype=dtype, order="C", copy=True)


def shown(value: Any) -> str:
    """What was found, for a message of one line: texts (paths, addresses) longer than `describe` gives them."""
    if isinstance(value, str):
        text = repr(value)
        return text if len(text) <= _MOST_TEXT else f"{text[: _MOST_TEXT - 3]}..."
    return describe(value)


def as_path(name: str, value: Any) -> Path:
    """`value`, a str or a path, as a path; ValueError for anything else, for "", and for one no file can have."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a path, found {describe(value)}")
    try:
        known = bool(text) and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        known = False
    if not known:
        raise ValueError(f"{name} must be a path, found {shown(text)}")
    return Path(text)


def require_seconds(name: str, value: Any, low: float = 0.0) -> None:
    """Raise ValueError unless `value` is a time in [low, `MOST_S`] seconds."""
    require_number(name, value)
    if not low <= value <= MOST_S:
        raise ValueError(f"{name} must be {low:g} to {MOST_S:g} seconds, found {describe(value)}")


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


def _class_or(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else describe(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """ ", did you mean ...?" where a known name is close, else the known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else f", expected one of {', '.join(known)}"
