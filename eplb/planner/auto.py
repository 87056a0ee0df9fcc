"""How ``auto`` compares candidates: one score, one sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.balance import Balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.moves import MoveCost

MOVE_PRICE = 0.05  # balancedness that moving all slots must gain
SHARE_PRICE = 0.001  # balancedness that new shares must gain
CROSSING_PRICE = 0.02  # balancedness that sending all tokens to another node costs


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement with what counts for and against it; ``crossing``: part of tokens sent between nodes."""

    policy: str
    placement: Placement
    score: float
    balancedness: float | None
    moves: int
    crossing: float | None


def score_of(
    policy: str,
    result: Balancedness,
    moves: int,
    crossing: float | None,
    loads: NDArray[np.float64],
    current: Placement,
    made: Placement,
    *,
    cost: MoveCost | None,
    noise: float,
    at_start: bool,
) -> float:
    """Mean balancedness less what the change costs.

    Moving costs MOVE_PRICE x the part of slots moved, and twice the sampling noise of the loads: the present
    placement and the counts are both off by about that much, so such a gain may be none. New shares cost
    SHARE_PRICE. Sending tokens between nodes costs CROSSING_PRICE x their part. With a ``cost``, moving is
    priced by time instead: the part of the plan's life that fetching takes, against the part of a step that
    better balance saves. At the start moving is free.
    """
    score = 0.0 if result.mean is None else result.mean
    if cost is not None:
        scaled = loads / max(float(loads.max(initial=0.0)), np.finfo(np.float64).tiny)
        before = float(rank_loads(scaled, current).max(axis=1).sum())
        after = float(rank_loads(scaled, made).max(axis=1).sum())
        score = cost.moe_time_fraction * (1 - after / before) if before > 0 else 0.0
    if not at_start:
        topology = current.topology
        if cost is None:
            score -= MOVE_PRICE * moves / max(1, made.physical_to_logical.size)
        else:
            seconds = moves * cost.seconds_per_slot(topology.ep_size, topology.num_nodes)
            score -= seconds / cost.seconds_in_use
        score -= SHARE_PRICE * (policy != "stay") + 2 * noise * (moves > 0)
    if crossing is not None:
        score -= CROSSING_PRICE * crossing
    return score


def best_candidate(
    candidates: list[Candidate], num_slots: int, moves_are_free: bool
) -> tuple[Candidate, str]:
    """The largest score; among equals (within 1e-9) the earlier, quieter candidate. With its reason."""
    best = candidates[0]
    for candidate in candidates[1:]:
        if candidate.score > best.score + 1e-9:
            best = candidate

    def describe(candidate: Candidate) -> str:
        value = "no data" if candidate.balancedness is None else f"{candidate.balancedness:.4f}"
        text = f"{candidate.policy} {value} with {candidate.moves / max(1, num_slots):.2%} moved"
        if candidate.crossing is not None:
            text += f", {candidate.crossing:.1%} between nodes"
        return text

    rest = "; ".join(describe(c) for c in candidates if c is not best)
    why = (
        "moves are free at the start"
        if moves_are_free
        else "balancedness less the price of its moves is highest"
    )
    return best, f"auto takes {describe(best)}, because {why} ({rest})"
