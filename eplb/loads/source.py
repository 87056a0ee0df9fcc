"""What every load file reads into: a stream of windows with what is known about them.

A source is opened once and may be iterated several times; windows are read one at a time, so a file larger than
memory is fine. Loads are counts of routed (token, expert) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import visible
from evenroute.eplb._notebook import data_frame, heat_map, page
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

LARGEST_SHAPE = 1 << 24
MOST_LAYERS = 1 << 20

Counts = NDArray[np.int64] | NDArray[np.float64]
Scope = Literal["job", "rank"]


@dataclass(frozen=True, eq=False)
class LoadWindow:
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
        measured: what the job's ranks measured of step times and moves (`MeasuredCosts.state`); empty = nothing.
        notes: what a reader has to know about the figures (one line each).
        members: the sources that this one was put together from; empty for a file.
    """

    path: Path
    kind: str
    num_layers: int
    num_logical_experts: int
    open_windows: Callable[[], Iterator[LoadWindow]]
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
    measured: dict[str, Any] = field(default_factory=dict)
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

    @classmethod
    def of_map(cls, path: Path, kind: str, known: PlacementMap, **more: Any) -> LoadSource:
        """A file that holds a placement and no loads."""
        layers, slots = known.physical_to_logical.shape
        known_fields = {"ep_size": known.ep_size, "num_slots": slots, "layer_ids": known.layer_ids}
        fields = {**known_fields, "num_windows": 0, "placement_map": known, "has_loads": False, **more}
        return cls(path, kind, layers, known.num_logical_experts, lambda: iter(()), **fields)

    def windows(self) -> Iterator[LoadWindow]:
        """The windows in order; ValueError with the file's name if one turns out damaged."""
        yield from self.open_windows()

    def __repr__(self) -> str:
        windows = "" if self.num_windows is None else f", {self.num_windows} windows"
        name = f"{self.path} [{self.key}]" if self.key else str(self.path)
        return (
            f"<LoadSource {visible(name)}: {self.kind}, {self.num_layers} layers x "
            f"{self.num_logical_experts} experts{windows}>"
        )

    def _repr_html_(self) -> str:
        """The first window with load, so that a long file opens at once."""
        first = next((window.counts for window in self.windows() if window.counts.any()), None)
        if first is None:
            return page(repr(self))
        sums = np.maximum(first.sum(axis=1, keepdims=True), 1e-300)
        parts = first * self.num_logical_experts / sums
        names = [self.layer_name(layer) for layer in range(self.num_layers)]
        title = "first window, load against the layer's mean expert"
        return page(repr(self), heat_map(parts, title, "layers", "experts", names))

    def to_dataframe(self) -> Any:
        """A pandas DataFrame, a row for each expert of each window: ``window, time, layer, expert, count``.

        Raises:
            ImportError: pandas is not installed.
            ValueError: a window turns out damaged.
        """
        windows = list(self.windows())
        layers = [self.layer_name(layer) for layer in range(self.num_layers)]
        experts, size = self.num_logical_experts, self.num_layers * self.num_logical_experts
        times = [np.nan if window.time is None else window.time for window in windows]
        empty = np.zeros((0, *self.shape), dtype=np.int64)
        return data_frame(
            window=np.repeat(np.arange(len(windows)), size),
            time=np.repeat(np.asarray(times, dtype=np.float64), size),
            layer=np.tile(np.repeat(layers, experts), len(windows)),
            expert=np.tile(np.arange(experts), len(windows) * len(layers)),
            count=np.concatenate([empty, *(window.counts[None] for window in windows)]).ravel(),
        )

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_layers, self.num_logical_experts

    def layer_name(self, layer: int) -> int:
        """The model's index of row ``layer``."""
        return layer if self.layer_ids is None else self.layer_ids[layer]
