"""Placement files: one placement, or several under keys in a set; JSON, written beside and renamed.

A set holds several placements under keys (target and draft model, prefill and decode) and is updated by many writers:
``{"format": "evenroute-placement-set", "format_version": 1, "placements": {key: <content of a placement file>}}``.
An update reads, changes one key and replaces the file as a whole, under a lock file beside it: concurrent writers of
different keys never lose each other's, a killed one leaves the old file. A single placement file reads as key "".
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from evenroute.eplb._checks import as_integer, as_path, require_instance, require_text
from evenroute.eplb._io import read_input, write_beside_and_rename
from evenroute.eplb.placement.classes import ShareClasses
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

FORMAT = "evenroute-placement"
FORMAT_VERSION = 2  # of files with sets of shares for small batches; others are written as version 1
SET_FORMAT = "evenroute-placement-set"


class PlacementFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=False):
    """Content of a placement file; ``digests`` are those of the rows (62 bits)."""

    format: str
    format_version: int
    model: str
    phase: str
    num_logical_experts: int
    ep_size: int
    num_nodes: int
    epoch: int
    version: int
    digests: list[int]
    physical_to_logical_map: list[list[int]]
    shares: list[list[int]] | msgspec.UnsetType | None = msgspec.UNSET
    class_rows: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    class_shares: list[list[list[int]]] | msgspec.UnsetType = msgspec.UNSET


def save_placement(
    path: str | PathLike[str],
    placement: Placement,
    *,
    model: str = "",
    phase: str = "",
    epoch: int = 0,
    version: int = 0,
) -> None:
    """Write ``placement`` to ``path``; same placement and names, same bytes.

    Raises:
        OSError: the file cannot be written.
        ValueError: names the argument that is of another kind, and what was found.
    """
    path = as_path("path", path)
    content = _content(placement, model=model, phase=phase, epoch=epoch, version=version)
    write_beside_and_rename(path, msgspec.json.encode(content) + b"\n")


def _content(
    placement: Placement, *, model: str = "", phase: str = "", epoch: int = 0, version: int = 0
) -> PlacementFile:
    require_instance("placement", placement, Placement)
    require_text("model", model)
    require_text("phase", phase)
    classes = placement.classes
    return PlacementFile(
        format=FORMAT,
        format_version=1 if classes is None else FORMAT_VERSION,
        model=model,
        phase=phase,
        num_logical_experts=placement.num_logical_experts,
        ep_size=placement.topology.ep_size,
        num_nodes=placement.topology.num_nodes,
        epoch=as_integer("epoch", epoch, 0),
        version=as_integer("version", version, 0),
        digests=placement.row_digests().tolist(),
        physical_to_logical_map=placement.physical_to_logical.tolist(),
        shares=msgspec.UNSET if placement.shares is None else placement.shares.tolist(),
        class_rows=msgspec.UNSET if classes is None else classes.rows.tolist(),
        class_shares=msgspec.UNSET if classes is None else classes.shares.tolist(),
    )


def load_placement(path: str | PathLike[str]) -> tuple[Placement, PlacementFile]:
    """Read and check a placement file.

    Raises:
        OSError: the file cannot be read.
        ValueError: one line that names the file, the field, what was found and what was expected.
    """
    path = as_path("path", path)
    data = read_input(path)
    try:
        content = msgspec.json.decode(data, type=PlacementFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a placement file: {error}") from None
    return _checked(content, str(path)), content


def _checked(content: PlacementFile, where: str) -> Placement:
    if content.format != FORMAT or content.format_version not in (1, FORMAT_VERSION):
        raise ValueError(
            f"{where}: format is {content.format!r} version {content.format_version}, "
            f"expected {FORMAT!r} version 1 or {FORMAT_VERSION}"
        )
    try:
        return _placement_of(content)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _placement_of(content: PlacementFile) -> Placement:
    rows = content.physical_to_logical_map
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise ValueError(
            f"physical_to_logical_map rows must have one length, found {sorted(lengths) or 'no rows'}"
        )
    shares = None
    if isinstance(content.shares, list):
        if [len(row) for row in content.shares] != [len(row) for row in rows]:
            raise ValueError("shares must have the shape of physical_to_logical_map")
        shares = np.asarray(content.shares)
    placement = Placement(
        np.asarray(rows),
        content.num_logical_experts,
        Topology(content.ep_size, content.num_nodes),
        shares,
        _classes_of(content),
    )
    digests = placement.row_digests().tolist()
    if content.digests != digests:
        layer = next(
            (i for i, (a, b) in enumerate(zip(content.digests, digests, strict=False)) if a != b),
            min(len(content.digests), len(digests)),
        )
        raise ValueError(f"digests: layer {layer} does not match its row (file edited or damaged)")
    return placement


def _classes_of(content: PlacementFile) -> ShareClasses | None:
    known = [isinstance(content.class_rows, list), isinstance(content.class_shares, list)]
    if not any(known) and content.format_version == 1:
        return None
    if not all(known) or content.format_version == 1:
        raise ValueError(
            "class_rows, class_shares: format version 2 has both and version 1 none, "
            f"found version {content.format_version} with {sum(known)} of them"
        )
    try:
        return ShareClasses(np.asarray(content.class_rows), np.asarray(content.class_shares))
    except ValueError:
        raise ValueError("class_rows, class_shares: rows of different lengths") from None


class PlacementSetFile(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a set."""

    format: str
    format_version: int
    placements: dict[str, PlacementFile]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One updater at a time; the kernel drops the lock when its holder ends, even by SIGKILL."""
    with path.with_name(f".{path.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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
    new = _content(placement, **names)
    with _lock(target):
        held = _decode(target) if target.exists() else {}
        held[key] = new
        content = PlacementSetFile(SET_FORMAT, 1, dict(sorted(held.items())))
        write_beside_and_rename(target, msgspec.json.encode(content) + b"\n")
