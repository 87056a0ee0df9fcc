"""Sums of windows that stay exact: float64 has no odd integer above 2**53."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.source import Counts

_EXACT_BELOW = 2.0**62  # a sum of two of these still fits int64


class CountTotal:
    """The sum of windows' counts ``[L, E]``.

    Attributes:
        floats: ``[L, E] float64``, rounded above 2**53.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.floats = np.zeros(shape)
        self._exact: NDArray[np.int64] | None = np.zeros(shape, np.int64)

    def add(self, counts: Counts) -> None:
        self.floats += counts
        if self._exact is None:
            return
        if counts.dtype.kind == "i" and self.floats.max(initial=0.0) < _EXACT_BELOW:
            self._exact += counts.astype(np.int64, copy=False)
        else:
            self._exact = None

    @property
    def counts(self) -> Counts:
        """int64, unless a window had fractions or an expert has 2**62 and more: then float64."""
        return self.floats if self._exact is None else self._exact


def exact_sum(counts: NDArray[Any]) -> int | float:
    """The sum as Python's number: of integers exact, however many there are."""
    if counts.dtype.kind == "i":
        low, high = counts & 0xFFFFFFFF, counts >> 32
        return int(low.sum()) + (int(high.sum()) << 32)
    return float(counts.sum())
