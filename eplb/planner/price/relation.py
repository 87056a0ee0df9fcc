"""Step time against the hottest rank's load, fitted interval by interval in bounded memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

FADING = 0.995  # of older intervals, an interval
LEAST = 6.0  # intervals (faded) before an estimate is given
CERTAIN = 3.0  # standard errors that the slope must be above 0


class StepRelation(NamedTuple):
    """``seconds = base + by_mean * mean + by_excess * (hottest - mean)``.

    Loads are token-expert pairs of a rank and a step, summed over layers: the mean rank's, and every layer's hottest.
    """

    base: float
    by_mean: float
    by_excess: float

    def load_fraction(self, mean: float) -> float:
        """Part of a step at perfect balance that grows with the hottest rank's load (`TimeCosts`)."""
        return min(1.0, self.by_excess * mean / self.balanced(mean))

    def balanced(self, mean: float) -> float:
        """Seconds of a step at perfect balance."""
        return self.base + self.by_mean * mean


class StepTimeFit:
    """Weighted least squares of `StepRelation`, older intervals fading.

    The mean load has a slope of its own: more tokens make all of a step longer, and that is nothing that balance saves.
    """

    def __init__(self, sums: list[float] | None = None) -> None:
        self._sums = np.zeros((4, 4)) if sums is None else np.array(sums, dtype=np.float64).reshape(4, 4)

    @property
    def sums(self) -> list[float]:
        """All there is to keep: 16 numbers, the faded products of (1, mean, excess, seconds)."""
        return [float(value) for value in self._sums.ravel()]

    def add(self, seconds: float, mean: float, hottest: float) -> None:
        """An interval: mean seconds a step, and loads a step."""
        row = np.array([1.0, mean, hottest - mean, seconds])
        self._sums = FADING * self._sums + np.outer(row, row)

    def relation(self) -> StepRelation | None:
        """The fit, or None while the intervals do not show that a hotter rank makes a step longer."""
        count = self._sums[0, 0]
        scale = np.sqrt(np.diag(self._sums))
        if count < LEAST or not scale[2:].all():
            return None
        scaled = self._sums / np.outer(scale, scale)
        inputs, products = scaled[:3, :3], scaled[:3, 3]
        # Where all intervals had the same mean load, it has no slope of its own.
        inverse = np.linalg.pinv(inputs, rcond=1e-9, hermitian=True)
        slopes = inverse @ products
        rest = max(0.0, float(1.0 - slopes @ products)) / max(1.0, count - 3.0)
        if not slopes[2] > CERTAIN * np.sqrt(max(rest, 1e-12) * inverse[2, 2]):
            return None
        found = StepRelation(*(float(value) for value in slopes * scale[3] / scale[:3]))
        mean = float(self._sums[0, 1] / count)
        return found if found.balanced(mean) > 0 else None
