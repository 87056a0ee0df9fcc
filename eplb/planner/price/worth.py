"""What rebalancing has saved a job so far, against staying with its first placement, and what it has cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.price.measured import MeasuredCosts


class Savings(NamedTuple):
    """GPU-seconds (seconds of the job times its ranks), and where the figures come from: default, given, measured."""

    saved: float
    saved_source: str
    cost: float
    cost_source: str

    def told(self) -> str:
        """In one line."""
        return (
            f"rebalancing saved {self.saved:.3g} GPU-seconds against the first placement ({self.saved_source} prices) "
            f"and cost {self.cost:.3g} ({self.cost_source} prices)"
        )


@dataclass
class Worth:
    """Of one run of a job.

    Attributes:
        excess: token-expert pairs by which the hottest ranks would have had more under the first placement, summed over
            layers and steps.
        assumed: seconds that this is by the figures known when it happened.
        moves: slots that versions were published to move.
        intervals: whose loads are in ``excess``.
    """

    run: int = 0
    excess: float = 0.0
    assumed: float = 0.0
    moves: int = 0
    intervals: int = 0

    @property
    def state(self) -> dict[str, Any]:
        """Plain values to make it again from."""
        return asdict(self)

    def served(
        self, steps: int, first: float, in_use: float, mean: float, seconds: float, costs: TimeCosts
    ) -> None:
        """``steps`` steps of ``seconds`` each ran with ``in_use`` pairs on the hottest ranks, summed over layers.

        first: as many as under the first placement; mean: as many as at perfect balance.
        """
        self.excess += steps * (first - in_use)
        self.assumed += steps * seconds * (costs.step(mean / first) / costs.step(mean / in_use) - 1.0)
        self.intervals += 1

    def savings(self, measured: MeasuredCosts, costs: TimeCosts, num_ranks: int) -> Savings | None:
        """So far: by the measured relation and the measured loss where there are such; None before there is a load."""
        if not self.intervals:
            return None
        relation, moved = measured.relation, measured.moved
        saved, saved_source = self.assumed, costs.step_source
        if relation is not None:
            saved, saved_source = relation.by_excess * self.excess, "measured"
        cost, cost_source = costs.moving(self.moves, num_ranks), costs.source
        if moved.slots >= 1 and moved.transfer_seconds > 0:
            cost, cost_source = moved.lost_seconds, "measured"
        return Savings(num_ranks * saved, saved_source, num_ranks * cost, cost_source)
