"""The counts that the next plan is made from, with what is known of their completeness. No I/O, no clock."""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.store.writer import Receipt


@dataclass(frozen=True)
class RankCoverage:
    """What one rank contributed since the last clearing: from when, and how completely."""

    rank: int
    first_step: int
    last_step: int
    num_windows: int
    num_missing: int
    tokens: int
    last_seq: int


@dataclass(frozen=True, eq=False)
class LoadView:
    """``counts`` int64 [L, E] summed over ranks, ``tokens``; one `RankCoverage` for each rank that sent something.

    ``complete``: all ranks that send windows are in it and none has a hole. ``coverage``: steps that all ranks cover
    over steps that any covers, 0..1 (0 unless complete); near 1 except at the edges, where ranks' windows end at
    different steps.
    """

    counts: NDArray[np.int64]
    tokens: int
    ranks: tuple[RankCoverage, ...]
    complete: bool
    coverage: float
    missing_ranks: tuple[int, ...]


@dataclass(slots=True)
class _Coverage:
    """A `RankCoverage` that grows."""

    first_step: int
    last_step: int
    num_windows: int = 0
    num_missing: int = 0
    tokens: int = 0
    last_seq: int = 0


class LoadAccumulator:
    """Sums stored windows of one run; memory: one count array, and a few numbers a rank."""

    def __init__(self, job: JobShape) -> None:
        self._sources = 1 if job.shared_counts else job.ep_size
        self._shape = (job.num_layers, job.num_logical_experts)
        self.clear()

    def clear(self) -> None:
        """Begin anew (a plan was made from what there was)."""
        self._counts = np.zeros(self._shape, dtype=np.int64)
        self._tokens = 0
        self._ranks: dict[int, _Coverage] = {}

    def add(self, receipt: Receipt) -> None:
        """Add a window that was stored just now."""
        window = receipt.window
        self._counts += window.counts
        self._tokens += window.tokens
        known = self._ranks.get(window.rank)
        if known is None:
            # What is missing before the first window in view is outside of it, not a hole in it.
            known = self._ranks[window.rank] = _Coverage(window.first_step, window.last_step)
        else:
            known.last_step = max(known.last_step, window.last_step)
            known.num_missing += receipt.missing_before
        known.num_windows += 1
        known.tokens += window.tokens
        known.last_seq = window.seq

    def view(self) -> LoadView:
        """A copy of what there is."""
        ranks = tuple(RankCoverage(rank, **asdict(self._ranks[rank])) for rank in sorted(self._ranks))
        missing = tuple(rank for rank in range(self._sources) if rank not in self._ranks)
        complete = not missing and all(rank.num_missing == 0 for rank in ranks)
        coverage = 0.0
        if complete:
            common = min(r.last_step for r in ranks) - max(r.first_step for r in ranks) + 1
            whole = max(r.last_step for r in ranks) - min(r.first_step for r in ranks) + 1
            coverage = max(common, 0) / whole
        return LoadView(self._counts.copy(), self._tokens, ranks, complete, coverage, missing)
