"""The ranks' reports of step times and moves, put together into the figures that decisions are priced with.

No I/O and no clock. A figure is the lower median over ranks: what one odd rank reports counts for nothing, also where
there are only two. Memory: a few numbers a rank of the current run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from statistics import median_low
from typing import Any

from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.price.relation import StepRelation, StepTimeFit

_KEPT = 0.5  # of what earlier runs of a job have moved
_FREE = 1e-9  # seconds: a slot that costs nothing measurable


@dataclass(frozen=True)
class RankTimes:
    """What a rank measured.

    Attributes:
        num_steps: since the report before, ...
        step_seconds: ... and the median length of these steps, those left out in which weights moved.
        lost_seconds: since the run began, of its steps, to those in which weights moved.
        transfer_seconds: since the run began, in transfers.
        slots: since the run began, moved in the whole job.
        bytes_per_slot: weights of one expert of one layer; 0 where none move.
    """

    num_steps: int
    step_seconds: float
    lost_seconds: float = 0.0
    transfer_seconds: float = 0.0
    slots: int = 0
    bytes_per_slot: float = 0.0


@dataclass(frozen=True)
class Moved:
    """What moving has cost a run of the job so far: medians over its ranks."""

    slots: float = 0.0
    lost_seconds: float = 0.0
    transfer_seconds: float = 0.0
    bytes_per_slot: float = 0.0


class MeasuredCosts:
    """Collects reports of one job shape, run after run."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        state = state or {}
        self._fit = StepTimeFit(state.get("sums"))
        self._run: int = state.get("run", 0)
        self._moved = Moved(**state.get("moved", {}))  # of the current run
        self._before = Moved(**state.get("before", {}))  # of those before, fading
        self._mean_load: float = state.get("mean_load", 0.0)
        self._latest: dict[int, RankTimes] = {}
        self._since: dict[int, tuple[int, float]] = {}  # steps and seconds of the current interval

    @property
    def state(self) -> dict[str, Any]:
        """Plain values to make it again from."""
        return {
            "run": self._run,
            "sums": self._fit.sums,
            "mean_load": self._mean_load,
            "moved": asdict(self.moved),
            "before": asdict(self._before),
        }

    @property
    def relation(self) -> StepRelation | None:
        """Step time against the hottest ranks' load, once the intervals show it."""
        return self._fit.relation()

    def add(self, run: int, rank: int, times: RankTimes) -> None:
        """A rank's report."""
        if run != self._run:
            moved = self.moved
            kept = {name: _KEPT * getattr(self._before, name) + getattr(moved, name) for name in _SUMMED}
            self._before = Moved(**kept, bytes_per_slot=moved.bytes_per_slot or self._before.bytes_per_slot)
            self._run, self._moved = run, Moved()
            self._latest, self._since = {}, {}
        self._latest[rank] = times
        if times.num_steps and times.step_seconds > 0:
            steps, seconds = self._since.get(rank, (0, 0.0))
            self._since[rank] = steps + times.num_steps, seconds + times.num_steps * times.step_seconds

    @property
    def moved(self) -> Moved:
        """What moving has cost the current run so far."""
        if not self._latest:
            return self._moved
        ranks = list(self._latest.values())
        return Moved(
            _median(one.slots for one in ranks),
            _median(one.lost_seconds for one in ranks),
            _median(one.transfer_seconds for one in ranks),
            _median(one.bytes_per_slot for one in ranks),
        )

    def end_interval(self, mean_load: float, hottest_load: float) -> float | None:
        """An interval ends in which a step had these loads (`StepRelation`); its seconds a step, None if not known."""
        found = [seconds / steps for steps, seconds in self._since.values()]
        self._since = {}
        if not found or not mean_load > 0:
            return None
        seconds = median_low(found)
        self._mean_load = mean_load
        self._fit.add(seconds, mean_load, hottest_load)
        return seconds

    def costs(self, given: TimeCosts, num_ranks: int) -> TimeCosts:
        """What was measured, and ``given`` where nothing was yet."""
        moved = self.moved
        slots, lost, transfer = (getattr(moved, name) + getattr(self._before, name) for name in _SUMMED)
        found = given
        if slots >= 1 and transfer > 0:
            # Ranks fetch side by side: what the job loses to a slot is a part of what its rank does.
            busy = max(transfer, lost, _FREE * slots)
            found = replace(
                found,
                bytes_per_slot=moved.bytes_per_slot or self._before.bytes_per_slot or given.bytes_per_slot,
                seconds_per_slot=busy * num_ranks / slots,
                slowdown=min(1.0, lost / busy),
                source="measured",
            )
        relation = self.relation
        if relation is None or not self._mean_load > 0:
            return found
        step, part = relation.balanced(self._mean_load), relation.load_fraction(self._mean_load)
        if not (math.isfinite(step) and step > 0 and part > 0):
            return found
        return replace(found, step_seconds=step, load_fraction=part, step_source="measured")


_SUMMED = ("slots", "lost_seconds", "transfer_seconds")


def _median(values: Iterable[float]) -> float:
    return float(median_low(list(values)))
