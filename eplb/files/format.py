"""What a file format is to evenroute: how it is recognised, how it is read, and what can be written in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.source import LoadSource

PtReader = Callable[[Path], Any]


class Beginning(NamedTuple):
    """The parts of a file that are read before its format is known."""

    path: Path
    head: bytes  # at most 4,096 bytes
    suffix: str  # lower case, with the dot


@dataclass
class Reading:
    """What the caller gives beside the path, and where files of a folder that cannot be read are noted.

    Attributes:
        read_pt: reads a `.pt` file without executing pickles; None refuses such files.
        num_logical_experts: E, for files that do not say how many logical experts they count.
        layout: the axes of a plain array of three, one of `layout.LAYOUTS`; None = as the file says or shows.
        errors: one line for each file of a folder that is left out.
    """

    read_pt: PtReader | None = None
    num_logical_experts: int | None = None
    layout: str | None = None
    errors: list[str] = field(default_factory=list)


class EngineRows(NamedTuple):
    """A placement to be written for an engine: rows ``[L, P]``, the model's index of each, and its ranks."""

    rows: NDArray[np.int32]
    layer_ids: list[int]
    ep_size: int | None


@dataclass(frozen=True)
class Format:
    """One format. A file, a folder or a decoded object (JSON, `.pt`) is read by the first format that matches it.

    Attributes:
        name: as `convert --to` calls it where it can be written, else for a reader of the code.
        matches: whether a file is of this format, by its first bytes and its name.
        read: the sources in a file that matches.
        matches_folder, read_folder: the same for a folder, by the names of its files.
        matches_object, from_object: the same for a decoded object.
        counts_dense: whether written placements list all hidden layers, dense ones included.
        placement_bytes: the bytes of a placement file.
        write_loads: writes a history of loads, given top-k where the file must state it; returns the windows written.
    """

    name: str
    matches: Callable[[Beginning], bool] = lambda _: False
    read: Callable[[Path, Reading], list[LoadSource]] | None = None
    matches_folder: Callable[[Sequence[str]], bool] = lambda _: False
    read_folder: Callable[[Path, Reading], LoadSource] | None = None
    matches_object: Callable[[Beginning, Any], bool] = lambda _, __: False
    from_object: Callable[[Path, Any, Reading], LoadSource] | None = None
    counts_dense: bool = False
    placement_bytes: Callable[[EngineRows], bytes] | None = None
    write_loads: Callable[[Path, LoadSource, int | None], int] | None = None


def one(read: Callable[[Path], LoadSource]) -> Callable[[Path, Reading], list[LoadSource]]:
    """A `Format.read` of a reader that needs nothing but the path."""
    return lambda path, _: [read(path)]
