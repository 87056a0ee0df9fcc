"""What a rank's experts take in one layer: weights where an expert has few tokens, arithmetic where it has many."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_path, describe, is_number, require_choice
from evenroute.eplb._io import read_input

TIMES_FORMAT = "evenroute-expert-times"
SOURCES = ("roofline", "given", "measured")


@dataclass(frozen=True)
class ExpertTimes:
    """A rank's time is the sum over its experts touched of ``max(expert_us, token_us * tokens)``.

    The defaults are a roofline of one fp8 expert of DeepSeek-V3 (3 x 7168 x 2048) on an H200: 44 MB at 4.3 TB/s, and
    88 MFLOP a token at 1.2 PFLOP/s. `evenroute bench experts` measures both.

    Attributes:
        expert_us: microseconds of an expert touched.
        token_us: microseconds of a token, where an expert has so many that they take longer than its weights.
        source: roofline, given or measured.
    """

    expert_us: float = 10.2
    token_us: float = 0.073
    source: str = "roofline"

    def __post_init__(self) -> None:
        for name in ("expert_us", "token_us"):
            value = getattr(self, name)
            if not is_number(value) or not 1e-6 <= value <= 1e9:
                raise ValueError(f"{name} must be a number in [1e-06, 1e+09], found {describe(value)}")
        require_choice("source", self.source, SOURCES)

    @property
    def crossover(self) -> float:
        """Tokens of an expert that take as long as its weights."""
        return self.expert_us / self.token_us

    def of_ranks(self, tokens: NDArray[Any], ep_size: int) -> NDArray[np.float64]:
        """Microseconds of every rank, ``[..., R]``, from the tokens of each slot, ``[..., P]``."""
        times = np.where(tokens > 0, np.maximum(self.expert_us, self.token_us * tokens), 0.0)
        return np.asarray(times.reshape(*tokens.shape[:-1], ep_size, -1).sum(axis=-1))

    def expected(self, tokens: NDArray[np.float64], ep_size: int) -> NDArray[np.float64]:
        """The same from expected tokens: a slot is touched with the probability of one Poisson token or more."""
        touched = -np.expm1(-tokens) * self.expert_us
        times = np.maximum(touched, self.token_us * tokens)
        return np.asarray(times.reshape(*tokens.shape[:-1], ep_size, -1).sum(axis=-1))

    def told(self) -> str:
        """The figures and where they come from."""
        return f"{self.expert_us:.3g} us an expert touched, {self.token_us:.3g} us a token ({self.source})"


class _TimesFile(msgspec.Struct):
    """What this needs of a file that `evenroute bench experts` wrote."""

    format: str
    expert_us: float
    token_us: float


def given_times(expert_us: float | None, token_us: float | None) -> ExpertTimes:
    """Times as given, both or none: then the default. ValueError for one alone."""
    if expert_us is None and token_us is None:
        return ExpertTimes()
    if expert_us is None or token_us is None:
        missing = "expert_us" if expert_us is None else "token_us"
        raise ValueError(f"{missing} is missing: an expert's and a token's time go together")
    return ExpertTimes(expert_us, token_us, "given")


def read_times(path: str | PathLike[str]) -> ExpertTimes:
    """Times that `evenroute bench experts` wrote. OSError, or ValueError that names file and field."""
    try:
        found = msgspec.json.decode(read_input(as_path("experts", path)), type=_TimesFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a file of expert times: {error}") from None
    if found.format != TIMES_FORMAT:
        raise ValueError(f"{path}: format is {found.format!r}, expected {TIMES_FORMAT!r}")
    try:
        return ExpertTimes(found.expert_us, found.token_us, "measured")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
