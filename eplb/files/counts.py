"""Readers of load files."""

from __future__ import annotations

from os import PathLike

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_path
from evenroute.eplb._io import read_input
from evenroute.eplb.loads.balance import validate_loads


class _LogicalCount(msgspec.Struct):
    logical_count: list[list[float]]


def read_logical_count(path: str | PathLike[str]) -> NDArray[np.float64]:
    """Loads ``[L, E]`` of a ``{"logical_count": [[...]]}`` file; dense layers stay as rows of zeros.

    Raises:
        OSError: the file cannot be read.
        ValueError: one line that names the file, what was found and what was expected.
    """
    path = as_path("path", path)
    data = read_input(path)
    try:
        rows = msgspec.json.decode(data, type=_LogicalCount).logical_count
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a logical_count file: {error}") from None
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise ValueError(
            f"{path}: logical_count rows must have one length, found {sorted(lengths) or 'no rows'}"
        )
    try:
        return validate_loads(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
