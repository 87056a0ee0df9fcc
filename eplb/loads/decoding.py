"""What readers of load files share: wording of damage, checks of counts and maps, sources of plain arrays."""

from __future__ import annotations

import json
import struct
import zipfile
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.source import Counts, LoadSource, LoadWindow


def damaged(path: Path | str, what: object) -> ValueError:
    """The one wording for files that cannot be decoded."""
    return ValueError(f"{path}: truncated or damaged: {what}")


def is_text(head: bytes) -> bool:
    """Whether a file's first bytes are plain text (at least 8 of them: a cut-off binary file is no text)."""
    if len(head) < 8:
        return False
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # a character that the end of `head` cuts is fine
            return False
        text = head[: error.start].decode()
    return all(char.isprintable() or char in "\t\n\r\f" for char in text)


def beginning(head: bytes) -> str:
    """The first words of a text, for messages."""
    text = " ".join(head[:80].decode(errors="replace").split())
    return repr(text if len(text) <= 40 else text[:37] + "...")


def decode_json(path: Path, data: bytes) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: it is plain text, holds NaN or an infinity (named by its place), or is truncated or damaged.
    """
    data = data.removeprefix(BOM_UTF8)
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if is_text(data[:4096]) and data.lstrip()[:1] not in (b"{", b"["):
            raise ValueError(f"{path}: plain text that begins {beginning(data)}, expected JSON") from None
        place = _odd_constant(data)
        if place is not None:
            raise ValueError(f"{path}: {place}, expected finite numbers (JSON has no other)") from None
        raise damaged(path, error) from None


def _odd_constant(data: bytes) -> str | None:
    """Where the first NaN or infinity of a JSON text is; None if it is no JSON even with those."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    trail: list[tuple[str, Any]] = [("", value)]
    while trail:
        name, value = trail.pop()
        if isinstance(value, float) and not np.isfinite(value):
            return f"{name or 'the value'} is {value}"
        if isinstance(value, dict):
            trail += [(f"{name}.{key}" if name else str(key), item) for key, item in reversed(value.items())]
        elif isinstance(value, list):
            trail += [(f"{name}[{index}]", item) for index, item in reversed(list(enumerate(value)))]
    return None


LARGEST_SUM = 1e30
"""Of a layer's loads in one window: what is summed over layers, ranks and windows, in float32 too, stays finite."""

_DECODE_ERRORS = (
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
    json.JSONDecodeError,
    UnicodeDecodeError,
    OverflowError,
    MemoryError,
    RecursionError,
)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Every way in which decoding ``path`` fails becomes one ValueError that starts with its name."""
    try:
        yield
    except _DECODE_ERRORS as error:
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise damaged(path, detail) from None
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def check_counts(values: Any, where: str = "loads") -> Counts:
    """Counts ``[L, E]`` as int64 or float64: finite, not negative; ValueError names layer and expert."""
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{where} must be numbers, found dtype {array.dtype}")
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{where} must be [layers, experts], found shape {list(array.shape)}")
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max()) >= 2**63:
        raise ValueError(f"{where} must be below 2**63, found {int(array.max())}")
    if array.dtype.kind in "iu":
        counts: Counts = array.astype(np.int64)
        bad = counts < 0
    else:
        counts = array.astype(np.float64)
        bad = ~(np.isfinite(counts) & (counts >= 0))
    if bad.any():
        layer, expert = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(
            f"{where}: layer {layer} expert {expert} is {array[layer, expert]}, expected a finite number >= 0"
        )
    limit = LARGEST_SUM if counts.dtype.kind == "f" else 2.0**62
    with np.errstate(over="ignore"):
        sums = counts.sum(axis=1, dtype=np.float64)
    if not (sums <= limit).all():
        layer = int((sums > limit).argmax())
        raise ValueError(f"{where}: layer {layer} sums to {sums[layer]:g}, allowed at most {limit:g}")
    return counts


def check_map(values: Any, num_logical_experts: int | None = None) -> tuple[NDArray[np.int32], int]:
    """A foreign ``physical_to_logical [L, P]``, checked for range and coverage, and its number of experts.

    The number of experts is the highest id + 1 where the format does not state it.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise ValueError(f"physical_to_logical_map must hold integers, found dtype {array.dtype}")
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"physical_to_logical_map must be [layers, slots], found shape {list(array.shape)}")
    num_experts = int(array.max()) + 1 if num_logical_experts is None else num_logical_experts
    bad = np.argwhere((array < 0) | (array >= num_experts))
    if len(bad):
        layer, slot = (int(i) for i in bad[0])
        raise ValueError(
            f"physical_to_logical_map: layer {layer} slot {slot} holds expert {array[layer, slot]}, "
            f"expected [0, {num_experts})"
        )
    for layer, row in enumerate(array):
        # Fewer slots than experts: one of the first ones is missing, whatever the stated number.
        held = np.zeros(min(num_experts, len(row) + 1), bool)
        held[row[row < len(held)]] = True
        if not held.all():
            raise ValueError(
                f"physical_to_logical_map: layer {layer} has no slot for expert {int(held.argmin())}"
            )
    return array.astype(np.int32), num_experts


def single_window_source(path: Path, kind: str, counts: Any, **known: Any) -> LoadSource:
    """A source of exactly one window."""
    checked = check_counts(counts)
    return LoadSource(
        path=path,
        kind=kind,
        num_layers=checked.shape[0],
        num_logical_experts=checked.shape[1],
        open_windows=lambda: iter([LoadWindow(checked)]),
        num_windows=1,
        **known,
    )


def stacked_source(path: Path, kind: str, stack: NDArray[Any], **known: Any) -> LoadSource:
    """A source over an array ``[W, L, E]`` (memory-mapped is fine: each window is checked as it is read)."""
    if stack.ndim == 2:
        return single_window_source(path, kind, stack, **known)
    if stack.ndim != 3 or 0 in stack.shape:
        raise ValueError(
            f"loads must be [layers, experts] or [windows, layers, experts], found shape {list(stack.shape)}"
        )
    if stack.dtype.kind not in "iuf":
        raise ValueError(f"loads must be numbers, found dtype {stack.dtype}")

    def open_windows() -> Iterator[LoadWindow]:
        for index in range(stack.shape[0]):
            with reading(path):
                counts = check_counts(stack[index], f"window {index}")
            yield LoadWindow(counts, first_step=index, last_step=index)

    return LoadSource(
        path=path,
        kind=kind,
        num_layers=stack.shape[1],
        num_logical_experts=stack.shape[2],
        open_windows=open_windows,
        num_windows=stack.shape[0],
        **known,
    )


def phase_of_name(path: Path) -> str:
    """ "prefill" or "decode" if the file's name contains it, else empty."""
    name = path.name.lower()
    found = [phase for phase in ("prefill", "decode") if phase in name]
    return found[0] if len(found) == 1 else ""
