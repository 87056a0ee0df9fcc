"""Redundant slots that differ by layer, for the same memory: what that gives where an engine allows it.

An engine's expert map has one number of slots for all layers; an EP layer of one's own need not. Learnt on one half of
the loads, judged on both, with exact shares of the load judged and nothing moved.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.planner.history.expected import Expected
from evenroute.eplb.planner.joint import full_joint_placement
from evenroute.eplb.planner.moves import MoveLimits, moved_placement
from evenroute.tools.bench.planning.check import judge
from evenroute.tools.bench.planning.next import mixed_order, start_of
from evenroute.tools.bench.planning.rows import Row, note

Loads = NDArray[np.float64]
CASES = ((32, 288), (64, 320))
STEPS = 4  # budgets tried: none, one, two or three slots a rank
EVERY = 3  # layers: a third of them says as much


def hottest(known: list[Loads], judged: list[Loads], ranks: int, slots: int) -> Loads:
    """``[L]``: mean over the judged loads of the hottest rank, in mean ranks, under one plan for the known ones."""
    expected = Expected(np.stack(known), np.full(len(known), 1 / len(known)))
    plan = full_joint_placement(expected, start_of(known[0], ranks, slots))
    found = []
    for loads in judged:
        made = moved_placement(loads, plan, MoveLimits(max_moves=0), weighted=True)
        shares = None if made.shares is None else made.shares.tolist()
        found.append(judge(made.physical_to_logical.tolist(), shares, loads.tolist(), ranks))
    return np.asarray((1.0 / np.array(found)).mean(axis=0))


def by_layer(values: Loads, budget: int) -> NDArray[np.int64]:
    """Steps ``[L]``, ``budget`` together, that make the sum least; ``values [STEPS, L]`` fall with a layer's step."""
    layers = values.shape[1]
    best = np.full(budget + 1, np.inf)
    best[0] = 0.0
    taken = np.zeros((layers, budget + 1), dtype=np.int64)
    for layer in range(layers):
        after = np.full(budget + 1, np.inf)
        for step in range(len(values)):
            with_step = np.full(budget + 1, np.inf)
            with_step[step:] = best[: budget + 1 - step] + values[step, layer]
            better = with_step < after
            after[better], taken[layer, better] = with_step[better], step
        best = after
    left = int(best.argmin())
    steps = np.zeros(layers, dtype=np.int64)
    for layer in reversed(range(layers)):
        steps[layer] = taken[layer, left]
        left -= int(steps[layer])
    return steps


def layer_budgets(files: list[Loads]) -> Iterator[Row]:
    """The same slots in all layers, and as the known loads want them."""
    half = len(files) // 2
    mixed = [np.ascontiguousarray(loads[::EVERY]) for loads in mixed_order(files)]
    known, others = mixed[:half], mixed[half:]
    for ranks, slots in CASES:
        experts = known[0].shape[1]
        uniform = (slots - experts) // ranks
        sizes = [experts + step * ranks for step in range(STEPS)]
        on_known = np.stack([hottest(known, known, ranks, size) for size in sizes])
        on_others = np.stack([hottest(known, others, ranks, size) for size in sizes])
        layers = np.arange(on_known.shape[1])
        steps = by_layer(on_known, uniform * len(layers))
        for name, values in (("the loads known", on_known), ("the others", on_others)):
            same, chosen = values[uniform].mean(), values[steps, layers].mean()
            yield note(f"EP{ranks}/{slots}, {name}: mean / hottest, equal budgets", 1 / same)
            yield note(f"EP{ranks}/{slots}, {name}: mean / hottest, budgets by layer", 1 / chosen)
        yield note(f"EP{ranks}/{slots}: layers without a redundant slot", float((steps == 0).sum()))
