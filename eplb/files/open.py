"""Opens any load or placement file that evenroute knows, by its content first and its name second.

Nothing here executes a pickle: `.pt` files are handed to a reader that the caller provides (and that must decode
weights only); without one they are refused with a remedy.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evenroute.eplb._checks import as_path, describe
from evenroute.eplb._io import open_input, read_input
from evenroute.eplb.dump.partial import Unfinished, unfinished_in, unfinished_of
from evenroute.eplb.dump.reader import is_dump, read_dump
from evenroute.eplb.dump.unfinished import is_unfinished, read_unfinished
from evenroute.eplb.files import ascend as foreign_ascend
from evenroute.eplb.files import megatron as foreign_megatron
from evenroute.eplb.files import sglang as foreign_sglang
from evenroute.eplb.files import trtllm as foreign_trtllm
from evenroute.eplb.files.arrays import (
    natural_key,
    read_csv,
    read_npy,
    read_npz,
    read_safetensors,
    rectangular,
)
from evenroute.eplb.files.join import assemble
from evenroute.eplb.files.loglines import MARK, read_log
from evenroute.eplb.loads.source import (
    LoadSource,
    PlacementEvent,
    PlacementMap,
    beginning,
    damaged,
    decode_json,
    is_text,
    phase_of_name,
    reading,
    stacked_source,
)
from evenroute.eplb.placement.file import FORMAT as PLACEMENT_FORMAT
from evenroute.eplb.placement.file import PlacementFile, load_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.set import SET_FORMAT, load_placement_set
from evenroute.eplb.store.source import SQLITE_MAGIC, read_store

PtReader = Callable[[Path], Any]
NOT_LOADS = {".md", ".lock", ".partial", ".png", ".html", ".pdf"}
SIDE_FILES = ("-wal", "-shm", "-journal")
BINARY = {
    ".npy": "a numpy array",
    ".npz": "a numpy archive",
    ".pt": "a file of torch.save",
    ".pth": "a file of torch.save",
    ".safetensors": "a safetensors file",
}
KNOWN = (
    "evenroute store, dump or placement; SGLang .pt or JSON; TensorRT-LLM statistics folder or YAML; "
    "vLLM-Ascend expert map; Megatron router trace; .npy .npz .csv .safetensors .json arrays; a log with EPLB lines"
)


NOT_READ = "not read: --unfinished reads it up to its last whole record"


@dataclass
class Opened:
    """What could be opened, one line for everything that could not, and one for each unfinished dump left out."""

    sources: list[LoadSource] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


def open_source(
    path: str | Path, *, read_pt: PtReader | None = None, num_logical_experts: int | None = None
) -> LoadSource:
    """The source behind one path; a folder must hold exactly one history (or files of one history's ranks).

    Raises:
        OSError, ValueError: one line that names the file, what was found and what was expected.
    """
    opened = open_sources([path], read_pt=read_pt, num_logical_experts=num_logical_experts)
    if opened.errors:
        raise ValueError(opened.errors[0])
    if len(opened.sources) != 1:
        raise ValueError(f"{path}: holds {len(opened.sources)} separate load files, expected one")
    return opened.sources[0]


def open_sources(
    paths: Sequence[str | Path],
    *,
    read_pt: PtReader | None = None,
    num_logical_experts: int | None = None,
    unfinished: bool = False,
) -> Opened:
    """Everything under ``paths``; several files of single ranks become one source for the job.

    Args:
        unfinished: also read dumps that were never finished (in a folder, or beside a recording's files), up to their
            last whole record. By default they are only told.
    """
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise ValueError(f"paths must be a list of paths, found {describe(paths)}")
    named = [as_path("path", path) for path in paths]
    opened = Opened()
    left: dict[Path, Unfinished] = {}
    for path in named:
        try:
            itself = None if path.is_dir() else is_unfinished(path)
            beside = unfinished_in(path) if path.is_dir() else [itself] if itself else unfinished_of(path)
            left |= {found.path: found for found in beside}
            if itself is not None:
                if not unfinished:
                    opened.errors.append(f"{itself.told()}; {NOT_READ}")
                continue
            _open_path(path, read_pt, num_logical_experts, opened, some_left=bool(beside))
        except OSError as error:
            opened.errors.append(f"{error.filename or path}: {error.strerror or error}")
        except ValueError as error:
            opened.errors.append(str(error))
    for found in left.values():
        _add_unfinished(found, opened, read=unfinished)
    opened.sources, errors = assemble(opened.sources)
    opened.errors += errors
    return opened


def open_loads(
    paths: Sequence[str | Path],
    *,
    num_experts: int | None = None,
    read_pt: PtReader | None = None,
    on_unfinished: Callable[[str], None] | None = None,
) -> list[LoadSource]:
    """Sources of loads of one shape, in the order given.

    Args:
        num_experts: E, for files that do not say how many logical experts they count.
        read_pt: reads a `.pt` file without executing pickles; None refuses such files.
        on_unfinished: called with one line for each dump that was never finished and is left out.

    Raises:
        ValueError: one line for the first path that cannot be read, holds no loads, or has another shape.
    """
    opened = open_sources(paths, read_pt=read_pt, num_logical_experts=num_experts)
    if opened.unfinished and not opened.sources and not opened.errors:
        raise ValueError(opened.unfinished[0])
    for line in opened.unfinished:
        if on_unfinished is not None:
            on_unfinished(line)
    if opened.errors:
        more = f" (and {len(opened.errors) - 1} more)" if len(opened.errors) > 1 else ""
        raise ValueError(opened.errors[0] + more)
    for source in opened.sources:
        if not source.has_loads:
            raise ValueError(f"{source.path}: {source.kind} holds no loads")
    first = opened.sources[0]
    for source in opened.sources:
        if source.shape != first.shape:
            raise ValueError(
                f"{source.path}: {list(source.shape)} (layers, experts), {first.path} has {list(first.shape)}"
            )
    return opened.sources


def _add_unfinished(found: Unfinished, opened: Opened, *, read: bool) -> None:
    if not read:
        opened.unfinished.append(f"{found.told()}; {NOT_READ}")
        return
    try:
        source = read_unfinished(found)
    except OSError as error:
        opened.errors.append(f"{found.path}: {error.strerror or error}")
        return
    if isinstance(source, str):
        opened.unfinished.append(source)
    else:
        opened.sources.append(source)


def _open_path(
    path: Path, read_pt: PtReader | None, num_logical_experts: int | None, opened: Opened, *, some_left: bool
) -> None:
    """Add what one path holds."""
    if not path.is_dir():
        opened.sources += _open_file(path, read_pt, num_logical_experts)
        return
    names = sorted((child.name for child in path.iterdir() if child.is_file()), key=natural_key)
    if foreign_trtllm.META in names:
        opened.sources.append(foreign_trtllm.read_statistics(path, opened.errors))
        return
    if any(foreign_megatron.is_trace_name(name) for name in names):
        opened.sources.append(
            foreign_megatron.read_traces(path, num_logical_experts=num_logical_experts, errors=opened.errors)
        )
        return
    wanted = [
        name
        for name in names
        if not name.startswith(".") and Path(name).suffix not in NOT_LOADS and not name.endswith(SIDE_FILES)
    ]
    if not wanted and not some_left:
        raise ValueError(f"{path}: the folder holds no load file, expected {KNOWN}")
    for name in wanted:
        try:
            opened.sources += _open_file(path / name, read_pt, num_logical_experts)
        except OSError as error:
            opened.errors.append(f"{path / name}: {error.strerror or error}")
        except ValueError as error:
            opened.errors.append(str(error))


def _open_file(path: Path, read_pt: PtReader | None, num_logical_experts: int | None) -> list[LoadSource]:
    """What a file holds: one source, or as many as a placement set has keys."""
    with open_input(path) as file:
        head = file.read(4096)
    if not head:
        raise damaged(path, "the file is empty")
    with reading(path):
        if f'"{SET_FORMAT}"'.encode() in head[:200]:  # `format` is the first field
            found = load_placement_set(path)
            return [_placement_source(path, *entry, key) for key, entry in found.items()]
        return [_open_one(path, head, read_pt, num_logical_experts)]


def _open_one(
    path: Path, head: bytes, read_pt: PtReader | None, num_logical_experts: int | None
) -> LoadSource:
    if head.startswith(SQLITE_MAGIC):
        return read_store(path)
    if is_dump(head):
        return read_dump(path)
    suffix = path.suffix.lower()
    if suffix in BINARY and is_text(head):
        raise ValueError(f"{path}: plain text that begins {beginning(head)}, expected {BINARY[suffix]}")
    if head.startswith(b"PK") or suffix in (".pt", ".pth", ".npz"):
        return _open_archive(path, suffix, read_pt)
    if head.startswith(b"\x93NUMPY") or suffix == ".npy":
        return read_npy(path)
    if suffix == ".safetensors":
        return read_safetensors(path)
    if suffix in (".csv", ".tsv"):
        return read_csv(path)
    if suffix in (".yaml", ".yml"):
        return foreign_trtllm.read_load_balancer(path)
    if suffix == ".jsonl":
        return foreign_megatron.read_traces(path, num_logical_experts=num_logical_experts)
    if suffix in (".pkl", ".pickle") or head[:1] == b"\x80":
        raise ValueError(f"{path}: a pickle, which is never executed; expected {KNOWN}")
    if suffix == ".json" or head.lstrip()[:1] in (b"{", b"["):
        return _open_json(path)
    if suffix in (".log", ".txt", ".out", ".err") or MARK in head:
        return read_log(path)
    what = f"plain text that begins {beginning(head)}" if is_text(head) else "not a file of a known form"
    raise ValueError(f"{path}: {what}, expected {KNOWN}")


def _open_archive(path: Path, suffix: str, read_pt: PtReader | None) -> LoadSource:
    """A zip file: numpy's `.npz` or torch's `.pt` (which has a data.pkl inside)."""
    if suffix == ".npz":
        return read_npz(path)
    if suffix not in (".pt", ".pth"):
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile as error:
            raise damaged(path, error) from None
        if all(name.endswith(".npy") for name in names):
            return read_npz(path)
        if not any(name.endswith("data.pkl") for name in names):
            raise ValueError(f"{path}: a zip file of another kind, expected {KNOWN}")
    if read_pt is None:
        raise ValueError(f"{path}: reading .pt files needs torch: pip install 'evenroute[rank]'")
    return foreign_sglang.source_from_object(path, read_pt(path))


def _open_json(path: Path) -> LoadSource:
    data = decode_json(path, read_input(path))
    if isinstance(data, list):
        with reading(path):
            return stacked_source(path, "JSON array", rectangular(data), phase=phase_of_name(path))
    if not isinstance(data, dict):
        raise ValueError(f"{path}: found {type(data).__name__}, expected {KNOWN}")
    if data.get("format") == PLACEMENT_FORMAT:
        return _placement_source(path, *load_placement(path))
    if "layer_list" in data or "moe_layer_count" in data:
        return foreign_ascend.source_from_object(path, data)
    if {"num_experts", "num_experts_per_token"} <= set(data):
        raise ValueError(f"{path}: TensorRT-LLM's {foreign_trtllm.META}: give the folder that holds it")
    with reading(path):
        for key in ("logical_count", "physical_to_logical_map"):
            if key in data:
                data[key] = rectangular(data[key])
    return foreign_sglang.source_from_object(path, data)


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
    return LoadSource(
        path=path,
        kind="evenroute placement" if not key else f"evenroute placement {key!r} of a set",
        key=key,
        num_layers=placement.num_layers,
        num_logical_experts=placement.num_logical_experts,
        open_windows=lambda: iter(()),
        num_windows=0,
        ep_size=topology.ep_size,
        num_nodes=topology.num_nodes,
        num_slots=placement.num_slots,
        model=content.model,
        phase=content.phase,
        placements=[PlacementEvent(placement, epoch=content.epoch, version=content.version)],
        placement_map=known,
        has_loads=False,
    )
