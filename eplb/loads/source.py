"""What every load file reads into: a stream of windows with what is known about them.

A source is opened once and may be iterated several times; windows are read one at a time, so a file larger than
memory is fine. Loads are counts of routed (token, expert) pairs.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

LARGEST_SHAPE = 1 << 24
MOST_LAYERS = 1 << 20

Counts = NDArray[np.int64] | NDArray[np.float64]
Scope = Literal["job", "rank"]


@dataclass(frozen=True, eq=False)
class Window:
    """Counts ``[L, E]`` between two takes, and where they lie in time (seconds since 1970; None = not known)."""

    counts: Counts
    time: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    tokens: int | None = None
    complete: bool = True
    label: str = ""


@dataclass(frozen=True, eq=False)
class PlacementMap:
    """A placement as a file states it: checked for range and coverage, not for replicas that share a rank.

    Attributes:
        physical_to_logical: ``[L, P] int32``.
        ep_size: ranks, None where the file does not say.
        layer_ids: the model's index of each row; None where rows are simply counted from 0.
    """

    physical_to_logical: NDArray[np.int32]
    num_logical_experts: int
    ep_size: int | None = None
    layer_ids: tuple[int, ...] | None = None
    placement: Placement | None = None  # set by formats that carry a whole one (shares, nodes)
    model: str = ""
    phase: str = ""

    def to_placement(self, ep_size: int | None = None, num_nodes: int = 1) -> Placement:
        """The checked placement over ``ep_size`` ranks; ValueError names what does not fit."""
        if self.placement is not None and ep_size in (None, self.placement.topology.ep_size):
            return self.placement
        ranks = ep_size or self.ep_size
        if ranks is None:
            raise ValueError("ep_size is not stated by this format: give --ep-size")
        if self.ep_size is not None and ranks != self.ep_size:
            raise ValueError(f"ep_size={ranks} was asked for, the file holds {self.ep_size} ranks")
        return Placement(self.physical_to_logical, self.num_logical_experts, Topology(ranks, num_nodes))


@dataclass(frozen=True, eq=False)
class PlacementEvent:
    """A placement that came into use; figures are None where the source does not know them."""

    placement: Placement
    time: float | None = None
    step: int | None = None
    epoch: int = 0
    version: int = 0
    balancedness_before: float | None = None
    balancedness_predicted: float | None = None
    moves: int | None = None
    policy: str = ""
    reason: str = ""


@dataclass(eq=False)
class LoadSource:
    """A readable history of loads.

    Attributes:
        kind: name of the format, for people.
        scope: "job" = windows are the whole job's, "rank" = one rank's part of them.
        ranks: the ranks whose counts are in here; empty = not known.
        num_windows: None = only known after reading.
        placements: in the order in which they came into use.
        placements_are: "in use" (from then on), "published" (and used some windows later), or "" where the source is
            of a kind that never says.
        placement_map: a placement stated by the file that may break the rules of `Placement`.
        layer_ids: the model's index of each row; None = 0..L-1.
        key: the placement's key in a placement set, else empty.
        recording, part: what the files of one recording have in common (empty = not known), and which of a rank's
            files this is, from 1 on.
        notes: what a reader has to know about the figures (one line each).
        members: the sources that this one was put together from; empty for a file.
    """

    path: Path
    kind: str
    num_layers: int
    num_logical_experts: int
    open_windows: Callable[[], Iterator[Window]]
    num_windows: int | None = None
    scope: Scope = "job"
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    ep_size: int | None = None
    num_nodes: int = 1
    num_slots: int | None = None
    num_groups: int | None = None
    top_k: int | None = None
    model: str = ""
    phase: str = ""
    layer_ids: tuple[int, ...] | None = None
    placements: list[PlacementEvent] = field(default_factory=list)
    placements_are: str = ""
    placement_map: PlacementMap | None = None
    key: str = ""
    recording: str = ""
    part: int = 1
    notes: list[str] = field(default_factory=list)
    members: list[LoadSource] = field(default_factory=list)
    time_line: list[dict[str, Any]] = field(default_factory=list)  # balancedness an engine logged itself
    has_loads: bool = True

    def __post_init__(self) -> None:
        """ValueError for a shape that no model has, before memory is taken for it."""
        if self.num_layers * self.num_logical_experts > LARGEST_SHAPE or self.num_layers > MOST_LAYERS:
            raise ValueError(
                f"{self.path}: says {self.num_layers} layers of {self.num_logical_experts} experts, allowed at most "
                f"{MOST_LAYERS:,} layers and {LARGEST_SHAPE:,} experts in all layers together"
            )
        odd = [layer for layer in self.layer_ids or () if not 0 <= layer < MOST_LAYERS]
        if odd:
            raise ValueError(f"{self.path}: layer {odd[0]} found, expected [0, {MOST_LAYERS})")

    def windows(self) -> Iterator[Window]:
        """The windows in order; ValueError with the file's name if one turns out damaged."""
        yield from self.open_windows()

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_layers, self.num_logical_experts

    def layer_name(self, layer: int) -> int:
        """The model's index of row ``layer``."""
        return layer if self.layer_ids is None else self.layer_ids[layer]


def damaged(path: Path | str, what: object) -> ValueError:
    """The one wording for files that cannot be decoded."""
    return ValueError(f"{path}: truncated or damaged: {what}")


def is_text(head: bytes) -> bool:
    """Whether a file's first bytes are plain text (at least 8 of them, so that the stump of a binary file is none)."""
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
        # Fewer slots than experts: one of the first ones is missing, however many are said to be there.
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
        open_windows=lambda: iter([Window(checked)]),
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

    def open_windows() -> Iterator[Window]:
        for index in range(stack.shape[0]):
            with reading(path):
                counts = check_counts(stack[index], f"window {index}")
            yield Window(counts, first_step=index, last_step=index)

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
    """ "prefill" or "decode" where the file's name says so, else empty."""
    name = path.name.lower()
    found = [phase for phase in ("prefill", "decode") if phase in name]
    return found[0] if len(found) == 1 else ""
