"""A reader and writer of `.safetensors` files without the library or torch; only the tensors asked for are copied.

Source: the format's own description (huggingface/safetensors README, "Format"): 8 bytes little-endian length N,
N bytes of JSON ``{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}``, then the
data; offsets count from the end of the header.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import open_input, write_beside_and_rename
from evenroute.eplb.loads.decoding import damaged

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # the reference implementation's own limit


class SafetensorsFile:
    """Names and lazily mapped arrays of one file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is cut off, its header is not valid, or a tensor's type cannot hold counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = path.stat().st_size
        with open_input(path) as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if len(head) < 8 or length > min(size - 8, _HEADER_LIMIT):
                raise damaged(path, f"{size} bytes do not hold a safetensors header")
            try:
                header = json.loads(file.read(length))
            except ValueError as error:
                raise damaged(path, f"safetensors header: {error}") from None
        if not isinstance(header, dict):
            raise damaged(path, "safetensors header is not an object")
        self._start = 8 + length
        self._room = size - self._start
        header.pop("__metadata__", None)
        self._tensors: dict[str, dict[str, Any]] = header

    def keys(self) -> list[str]:
        return list(self._tensors)

    def read(self, name: str) -> NDArray[Any]:
        """The tensor ``name``, memory-mapped read-only."""
        entry = self._tensors[name]
        try:
            code, shape = entry["dtype"], [int(n) for n in entry["shape"]]
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(self.path, f"safetensors entry {name!r}: {error}") from None
        if code not in _DTYPES:
            raise ValueError(f"{self.path}: tensor {name!r} is {code}, expected one of {', '.join(_DTYPES)}")
        dtype = np.dtype(_DTYPES[code])
        if min(shape, default=0) < 0 or end - begin != math.prod(shape) * dtype.itemsize:
            raise damaged(self.path, f"tensor {name!r}: {end - begin} bytes for shape {shape} of {code}")
        if begin < 0 or end > self._room:
            raise damaged(self.path, f"tensor {name!r} ends at byte {end} of {self._room}")
        if begin == end:
            return np.empty(shape, dtype=dtype)
        return np.memmap(self.path, mode="r", dtype=dtype, offset=self._start + begin, shape=tuple(shape))


def write_safetensors(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """Write ``tensors`` as a whole (beside, then renamed)."""
    header: dict[str, Any] = {}
    offset = 0
    parts = []
    for name, array in tensors.items():
        little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False))
        if little.dtype not in _NAMES:
            raise ValueError(
                f"{path}: tensor {name!r} has dtype {array.dtype}, which safetensors cannot hold"
            )
        data = little.tobytes()
        header[name] = {
            "dtype": _NAMES[little.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        parts.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_beside_and_rename(path, len(text).to_bytes(8, "little") + text + b"".join(parts))
