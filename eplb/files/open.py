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
from evenroute.eplb.dump.reader import is_unfinished, read_unfinished
from evenroute.eplb.files.arrays import natural_key, rectangular
from evenroute.eplb.files.format import Beginning, PtReader, Reading
from evenroute.eplb.files.formats import FORMATS
from evenroute.eplb.files.ranks import assemble
from evenroute.eplb.loads.decoding import beginning, damaged, decode_json, is_text, reading
from evenroute.eplb.loads.source import LoadSource
from evenroute.eplb.loads.whole import join_layers

_NOT_DECODED = object()
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
    layout: str | None = None,
    unfinished: bool = False,
) -> Opened:
    """Everything under ``paths``; several files of single ranks become one source for the job.

    Args:
        layout: as `open_loads`.
        unfinished: also read dumps that were never finished (in a folder, or beside a recording's files), up to their
            last whole record. By default they are only reported.
    """
    if isinstance(paths, str) or not isinstance(paths, Sequence):
        raise ValueError(f"paths must be a list of paths, found {describe(paths)}")
    named = [as_path("path", path) for path in paths]
    opened = Opened()
    given = Reading(read_pt, num_logical_experts, layout, opened.errors)
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
            _open_path(path, given, opened, some_left=bool(beside))
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
    layout: str | None = None,
    read_pt: PtReader | None = None,
    on_unfinished: Callable[[str], None] | None = None,
) -> list[LoadSource]:
    """Sources of loads of one shape, in the order given.

    Args:
        num_experts: E, for files that do not say how many logical experts they count.
        layout: the axes of plain arrays of three ("ranks,layers,experts", "layers,windows,experts" or
            "windows,layers,experts"); None = as the file says or shows, and refused where that is doubtful.
        read_pt: reads a `.pt` file without executing pickles; None refuses such files.
        on_unfinished: called with one line for each dump that was never finished and is left out.

    Raises:
        ValueError: one line for the first path that cannot be read, holds no loads, or has another shape.
    """
    opened = open_sources(paths, read_pt=read_pt, num_logical_experts=num_experts, layout=layout)
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
    return join_layers(opened.sources)


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


def _open_path(path: Path, given: Reading, opened: Opened, *, some_left: bool) -> None:
    """Add what one path holds."""
    if not path.is_dir():
        opened.sources += _open_file(path, given)
        return
    names = sorted((child.name for child in path.iterdir() if child.is_file()), key=natural_key)
    for form in FORMATS:
        if form.read_folder is not None and form.matches_folder(names):
            opened.sources.append(form.read_folder(path, given))
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
            opened.sources += _open_file(path / name, given)
        except OSError as error:
            opened.errors.append(f"{path / name}: {error.strerror or error}")
        except ValueError as error:
            opened.errors.append(str(error))


def _open_file(path: Path, given: Reading) -> list[LoadSource]:
    """What a file holds: one source, or as many as a placement set has keys."""
    with open_input(path) as file:
        head = file.read(4096)
    if not head:
        raise damaged(path, "the file is empty")
    file_seen = Beginning(path, head, path.suffix.lower())
    with reading(path):
        if file_seen.suffix in BINARY and is_text(head):
            raise ValueError(
                f"{path}: plain text that begins {beginning(head)}, expected {BINARY[file_seen.suffix]}"
            )
        data: Any = _NOT_DECODED
        for form in FORMATS:
            if form.read is not None and form.matches(file_seen):
                return form.read(path, given)
            if form.from_object is not None and _holds_object(file_seen):
                data = _decoded(file_seen, given) if data is _NOT_DECODED else data
                if form.matches_object(file_seen, data):
                    return [form.from_object(path, data, given)]
    if file_seen.suffix in (".pkl", ".pickle") or head[:1] == b"\x80":
        raise ValueError(f"{path}: a pickle, which is never executed; expected {KNOWN}")
    what = f"plain text that begins {beginning(head)}" if is_text(head) else "not a file of a known form"
    raise ValueError(f"{path}: {what}, expected {KNOWN}")


def _holds_object(file: Beginning) -> bool:
    binary = file.suffix in (".pt", ".pth") or file.head.startswith(b"PK")
    return binary or file.suffix == ".json" or file.head.lstrip()[:1] in (b"{", b"[")


def _decoded(file: Beginning, given: Reading) -> Any:
    """The content of a `.pt` (a zip file with a data.pkl, or torch's older form) or JSON file."""
    path = file.path
    if file.suffix in (".pt", ".pth") or file.head.startswith(b"PK"):
        if file.suffix not in (".pt", ".pth"):
            with zipfile.ZipFile(path) as archive:
                if not any(name.endswith("data.pkl") for name in archive.namelist()):
                    raise ValueError(f"{path}: a zip file of another kind, expected {KNOWN}")
        if given.read_pt is None:
            raise ValueError(f"{path}: reading .pt files needs torch: pip install 'evenroute[rank]'")
        return given.read_pt(path)
    data = decode_json(path, read_input(path))
    if not isinstance(data, dict | list):
        raise ValueError(f"{path}: found {type(data).__name__}, expected {KNOWN}")
    for key in ("logical_count", "physical_to_logical_map"):
        if isinstance(data, dict) and key in data:
            data[key] = rectangular(data[key])
    return data
