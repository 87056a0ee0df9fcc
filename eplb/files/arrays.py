"""Plain arrays ``[L, E]`` or ``[W, L, E]``: .npy, .npz, .safetensors and JSON lists.

Rows are layers, columns logical experts. An archive with several arrays is read as one window each, in the order
of their names (numbers inside names compare as numbers). Pickled numpy files are refused, never executed.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import check_input, check_memory
from evenroute.eplb.files.format import Beginning, Format, Reading
from evenroute.eplb.files.layout import plain_source
from evenroute.eplb.files.safetensors import SafetensorsFile
from evenroute.eplb.loads.decoding import (
    check_counts,
    damaged,
    reading,
)
from evenroute.eplb.loads.source import LoadSource, LoadWindow

_PREFERRED = ("logical_count", "loads", "counts")


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sorts "w2" before "w10"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name)]


def _load_npy(path: Path) -> NDArray[Any]:
    check_input(path)
    try:
        with np.errstate(over="ignore"):  # of a shape beyond all bounds, which is refused
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # numpy parses the header as Python: SyntaxError, TokenError and more
        if "allow_pickle" in str(error) or "Python objects" in str(error):
            raise ValueError(f"{path}: holds pickled Python objects, which are never executed") from None
        raise damaged(path, " ".join(str(error).split())[:200]) from None
    if not isinstance(array, np.ndarray):
        raise damaged(path, "not one array")
    return array


def read_npy(path: Path, given: Reading) -> list[LoadSource]:
    """One array."""
    with reading(path):
        return [plain_source(path, "numpy array", _load_npy(path), given.layout)]


def _series(path: Path, kind: str, names: list[str], read: Any, layout: str | None) -> LoadSource:
    """A source with one window per named array; all must have the first one's shape."""
    preferred = [name for name in _PREFERRED if name in names]
    if preferred or len(names) == 1:
        chosen = preferred[0] if preferred else names[0]
        array = read(chosen)
        beside = sorted(name for name in set(names) - {chosen} if "rank" in name or "layer" in name)
        if beside and array.ndim == 3 and layout is None:
            raise ValueError(
                f"{chosen} {list(array.shape)} lies beside {', '.join(beside[:4])}: are its axes windows, layers, "
                "experts? Say --layout"
            )
        return plain_source(path, kind, array, layout)
    if not names:
        raise ValueError(f"{path}: holds no array")
    ordered = sorted(names, key=natural_key)
    first = check_counts(read(ordered[0]), ordered[0])

    def open_windows() -> Iterator[LoadWindow]:
        for index, name in enumerate(ordered):
            with reading(path):
                counts = check_counts(read(name), name)
                if counts.shape != first.shape:
                    raise ValueError(f"{name} has shape {list(counts.shape)}, expected {list(first.shape)}")
            yield LoadWindow(counts, first_step=index, last_step=index, label=name)

    return LoadSource(path, kind, first.shape[0], first.shape[1], open_windows, num_windows=len(ordered))


def read_npz(path: Path, given: Reading) -> list[LoadSource]:
    """One array per window, or one named logical_count / loads / counts."""
    check_input(path)
    with reading(path):
        try:
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    check_memory(path, info.file_size)
                names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
                bad = archive.testzip()
        except zipfile.BadZipFile as error:
            raise damaged(path, error) from None
        if bad:
            raise damaged(path, f"{bad} fails its checksum")

        def read(name: str) -> NDArray[Any]:
            try:
                with np.load(path, allow_pickle=False) as archive:
                    return np.asarray(archive[name])
            except OSError:
                raise
            except Exception as error:  # as in `_load_npy`
                if "allow_pickle" in str(error):
                    raise ValueError("holds pickled Python objects, which are never executed") from None
                raise damaged(path, " ".join(str(error).split())[:200]) from None

        return [_series(path, "numpy archive", names, read, given.layout)]


def read_safetensors(path: Path, given: Reading) -> list[LoadSource]:
    """One tensor per window, or one named logical_count / loads / counts."""
    with reading(path):
        file = SafetensorsFile(path)
        return [_series(path, "safetensors", file.keys(), file.read, given.layout)]


def rectangular(rows: Any) -> NDArray[Any]:
    """Nested lists as one array; ValueError if they are ragged or hold anything but numbers."""
    try:
        array = np.array(rows)
    except ValueError:
        array = np.array([], dtype=object)
    if array.dtype.kind not in "iuf" or not array.size:
        lengths = (
            sorted({len(row) for row in rows if isinstance(row, list)}) if isinstance(rows, list) else []
        )
        raise ValueError(f"expected rows of equally many numbers, found row lengths {lengths[:6]}")
    return array


def _is_npz(file: Beginning) -> bool:
    if file.suffix == ".npz":
        return True
    if not file.head.startswith(b"PK") or file.suffix in (".pt", ".pth"):
        return False
    try:
        with zipfile.ZipFile(file.path) as archive:
            return all(name.endswith(".npy") for name in archive.namelist())
    except zipfile.BadZipFile as error:
        raise damaged(file.path, error) from None


NPZ = Format("npz", matches=_is_npz, read=read_npz)
NPY = Format(
    "npy",
    matches=lambda file: file.head.startswith(b"\x93NUMPY") or file.suffix == ".npy",
    read=read_npy,
)
SAFETENSORS = Format("safetensors", matches=lambda f: f.suffix == ".safetensors", read=read_safetensors)


def _from_list(path: Path, data: Any, given: Reading) -> LoadSource:
    return plain_source(path, "JSON array", rectangular(data), given.layout)


JSON_ARRAY = Format(
    "json array",
    matches_object=lambda file, data: isinstance(data, list) and file.suffix not in (".pt", ".pth"),
    from_object=_from_list,
)
