"""Which axis of a plain array is what: a stated layout is honoured, a doubtful one refused with the question it leaves.

Every token picks K experts in every MoE layer, so in a window all layers with load have one total. That distinguishes
layers from windows and from ranks where the file does not say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.decoding import phase_of_name, single_window_source, stacked_source
from evenroute.eplb.loads.source import LoadSource

LAYOUTS = {
    "windows,layers,experts": (0, 1, 2),
    "layers,windows,experts": (1, 0, 2),
    "ranks,layers,experts": (0, 1, 2),
}
_MOST_EXAMINED = 1 << 24  # entries: a larger stack is judged by its first windows


def plain_source(path: Path, kind: str, array: NDArray[Any], layout: str | None = None) -> LoadSource:
    """A source over ``[L, E]``, or over a stack of three axes in the order of ``layout`` (windows first by default).

    Raises:
        ValueError: a placement mask of 0 and 1, or a stack whose axes are doubtful; a name that is no layout.
    """
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}, expected one of {', '.join(LAYOUTS)}")
    known = {"phase": phase_of_name(path)}
    if array.dtype.kind in "iuf" and array.size:
        _refuse_mask(array)
    if array.ndim != 3 or array.dtype.kind not in "iuf" or 0 in array.shape:
        return stacked_source(path, kind, array, **known)
    if layout is None:
        _refuse_doubtful(array)
        return stacked_source(path, kind, array, **known)
    ordered = np.transpose(array, LAYOUTS[layout])
    if layout.startswith("ranks"):
        made = single_window_source(path, kind, ordered.sum(axis=0), **known)
        made.notes.append(f"the parts of {len(array)} ranks were summed")
        return made
    return stacked_source(path, kind, ordered, **known)


def _refuse_mask(array: NDArray[Any]) -> None:
    few = array[:64] if array.ndim == 3 else array
    if few.max() == 1 and few.min() == 0 and few.size >= 16 and np.isin(few, (0, 1)).all():
        raise ValueError(
            f"shape {list(array.shape)} holds only 0 and 1: a mask of who holds which expert, expected counts"
        )


def _refuse_doubtful(array: NDArray[Any]) -> None:
    few = array[: max(1, _MOST_EXAMINED // max(1, array[0].size))]
    totals = few.sum(axis=2, dtype=np.float64)
    if min(totals.shape) < 2 or _one_total(totals, axis=1):
        return
    if _one_total(totals, axis=0):
        found = "layers, windows"
    elif _one_total(totals.sum(axis=0, keepdims=True), axis=1):
        found = "ranks, layers"
    else:
        return
    raise ValueError(
        f"shape {list(array.shape)} looks like [{found}, experts], not [windows, layers, experts]: say --layout "
        f"{found.replace(' ', '')},experts or --layout windows,layers,experts"
    )


def _one_total(totals: NDArray[np.float64], axis: int) -> bool:
    """Whether all totals along the axis are equal; dense layers, without load, do not count."""
    low = np.where(totals > 0, totals, np.inf).min(axis=axis)
    high = totals.max(axis=axis)
    return bool(((high - low) <= 1e-9 * high)[high > 0].all())
