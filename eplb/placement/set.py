"""Several placements in one file under keys (target and draft model, prefill and decode), updated by many writers.

JSON ``{"format": "evenroute-placement-set", "format_version": 1, "placements": {key: <content of a placement file>}}``.
An update reads, changes one key and replaces the file as a whole, under a lock file beside it: concurrent writers of
different keys never lose each other's, a killed one leaves the old file. A single placement file reads as key "".
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec

from evenroute.eplb._checks import as_path, require_text
from evenroute.eplb._io import read_input
from evenroute.eplb.placement.file import (
    FORMAT,
    PlacementFile,
    load_placement,
    save_placement,
    write_beside_and_rename,
)
from evenroute.eplb.placement.placement import Placement

SET_FORMAT = "evenroute-placement-set"


class PlacementSetFile(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a set."""

    format: str
    format_version: int
    placements: dict[str, PlacementFile]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One updater at a time; the lock goes with the process that holds it, killed or not."""
    with path.with_name(f".{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _checked(content: PlacementFile, name: str) -> Placement:
    """The placement of one entry, by the one reader there is for placement files."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "placement.json"
        path.write_bytes(msgspec.json.encode(content))
        try:
            return load_placement(path)[0]
        except ValueError as error:
            raise ValueError(str(error).replace(str(path), name)) from None


def _content(placement: Placement, names: dict[str, Any]) -> PlacementFile:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "placement.json"
        save_placement(path, placement, **names)
        return load_placement(path)[1]


def is_placement_set(data: Any) -> bool:
    """Whether a decoded JSON object is a set."""
    return isinstance(data, dict) and data.get("format") == SET_FORMAT


def _decode(path: Path) -> dict[str, PlacementFile]:
    data = read_input(path)
    try:
        probe = msgspec.json.decode(data)
        if isinstance(probe, dict) and probe.get("format") == FORMAT:
            return {"": load_placement(path)[1]}
        content = msgspec.json.decode(data, type=PlacementSetFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a placement set: {error}") from None
    if content.format != SET_FORMAT or content.format_version != 1:
        raise ValueError(
            f"{path}: format is {content.format!r} version {content.format_version}, "
            f"expected {SET_FORMAT!r} version 1"
        )
    return content.placements


def load_placement_set(path: str | PathLike[str]) -> dict[str, tuple[Placement, PlacementFile]]:
    """All placements of a set, or the one of a placement file under "".

    Raises:
        OSError: the file cannot be read.
        ValueError: one line that names the file, the key and what is wrong.
    """
    found = _decode(as_path("path", path))
    return {key: (_checked(held, f"{path}: placement {key!r}"), held) for key, held in found.items()}


def update_placement_set(path: str | PathLike[str], key: str, placement: Placement, **names: Any) -> None:
    """Put ``placement`` under ``key``; other keys stay. ``names``: model, phase, epoch, version.

    Raises:
        ValueError: the file is there and is neither a set nor a single placement.
    """
    target = as_path("path", path)
    require_text("key", key)
    new = _content(placement, names)
    with _lock(target):
        held = _decode(target) if target.exists() else {}
        held[key] = new
        content = PlacementSetFile(SET_FORMAT, 1, dict(sorted(held.items())))
        write_beside_and_rename(target, msgspec.json.encode(content) + b"\n")
