"""Our own files: a rebalancer's store, dumps of recordings, placements and sets of placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from evenroute.eplb._fields import named
from evenroute.eplb._io import shown
from evenroute.eplb.dump.format import SOURCE_FIELDS, DumpHeader
from evenroute.eplb.dump.reader import is_dump, read_dump
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.files.format import Format, Reading, one
from evenroute.eplb.loads.source import LoadSource, PlacementEvent, PlacementMap
from evenroute.eplb.placement.file import (
    FORMAT,
    SET_FORMAT,
    PlacementFile,
    load_placement,
    load_placement_set,
)
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.store.source import SQLITE_MAGIC, read_store


def _read_set(path: Path, _: Reading) -> list[LoadSource]:
    return [_placement_source(path, *entry, key) for key, entry in load_placement_set(path).items()]


def _read_placement(path: Path, _: Any, __: Reading) -> LoadSource:
    return _placement_source(path, *load_placement(path))


def _placement_source(path: Path, placement: Placement, content: PlacementFile, key: str = "") -> LoadSource:
    topology = placement.topology
    known = PlacementMap(
        placement.physical_to_logical,
        placement.num_logical_experts,
        topology.ep_size,
        placement=placement,
        model=content.model,
        phase=content.phase,
    )
    return LoadSource.of_map(
        path,
        "evenroute placement" if not key else f"evenroute placement {key!r} of a set",
        known,
        key=key,
        num_nodes=topology.num_nodes,
        model=content.model,
        phase=content.phase,
        placements=[PlacementEvent(placement, epoch=content.epoch, version=content.version)],
    )


def _write_dump(path: Path, source: LoadSource, _: int | None) -> int:
    header = DumpHeader(
        **named(SOURCE_FIELDS, source) | {"rank": source.rank if source.scope == "rank" else None},
        layer_ids=None if source.layer_ids is None else list(source.layer_ids),
        notes=[f"converted from {source.kind} {shown(source.path.name)}"],
    )
    with DumpWriter(path, header, replaces_left=True) as writer:
        for event in source.placements:
            writer.add_placement(event)
        for window in source.windows():
            writer.add_window(window)
        return writer.num_windows


STORE = Format("store", matches=lambda file: file.head.startswith(SQLITE_MAGIC), read=one(read_store))
DUMP = Format("evenroute", matches=lambda f: is_dump(f.head), read=one(read_dump), write_loads=_write_dump)
PLACEMENT_SET = Format(
    "placement set",
    matches=lambda file: f'"{SET_FORMAT}"'.encode() in file.head[:200],  # `format` is the first field
    read=_read_set,
)
PLACEMENT = Format(
    "placement",
    matches_object=lambda _, data: isinstance(data, dict) and data.get("format") == FORMAT,
    from_object=_read_placement,
)
