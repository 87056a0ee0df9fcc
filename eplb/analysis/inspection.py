"""What `evenroute inspect` finds: the facts of each source, or of the difference between two, and a plan's effect."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evenroute.eplb.analysis.facts import (
    diff_facts,
    diff_placements,
    history_facts,
    layer_facts,
    named_balancedness,
    placement_only_facts,
    source_facts,
)
from evenroute.eplb.analysis.history import History, Using, choose_placement, read_history
from evenroute.eplb.files.ranks import without_damaged
from evenroute.eplb.loads.balance import RankLoadMap, balancedness
from evenroute.eplb.loads.source import LoadSource, PlacementMap
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import figure, plan_placement


@dataclass(frozen=True)
class InspectSettings:
    """What one call asks for: `layer` in detail, window ranges [first, end), sizes that files do not state, how many
    experts and ranks to list, slots to plan for."""

    layer: int | None = None
    windows: tuple[tuple[int, int | None], ...] = ()
    ep_size: int | None = None
    num_nodes: int | None = None
    num_slots: int | None = None
    top: int = 10
    plan_slots: int | None = None


def history_of(
    source: LoadSource,
    settings: InspectSettings,
    override: PlacementMap | None,
    window: tuple[int, int | None] | None,
) -> History:
    """One pass over a source as the options ask for it."""
    using = choose_placement(
        source,
        ep_size=settings.ep_size,
        num_nodes=settings.num_nodes,
        num_slots=settings.num_slots,
        override=override,
    )
    keep = None
    if window is not None:
        first, end = window
        keep = lambda index, _: first <= index and (end is None or index < end)  # noqa: E731
    return read_history(source, using, keep=keep, follow_placements=override is None)


def facts_of_sources(
    sources: list[LoadSource], settings: InspectSettings, override: PlacementMap | None, errors: list[str]
) -> tuple[dict[str, Any], list[History]]:
    """What is in each source; a damaged source is a line among the errors, its good files stay."""
    if len(settings.windows) > 1:
        raise ValueError("--windows: more than one range needs --diff")
    window = settings.windows[0] if settings.windows else None
    found: list[dict[str, Any]] = []
    histories = []
    errors = list(errors)
    left = list(sources)
    while left:
        source = left.pop(0)
        if source.time_line:
            found.append({**source_facts(source), "time_line": source.time_line})
            continue
        if not source.has_loads:
            found.append(placement_only_facts(source))
            continue
        try:
            history = history_of(source, settings, override, window)
        except ValueError as error:
            good, lines = without_damaged(source) if source.members else ([], [str(error)])
            errors += lines or [str(error)]
            if not good and not found and not left:
                more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
                raise ValueError(errors[0] + more) from None
            left = good + left if lines else left
            continue
        histories.append(history)
        facts = history_facts(history, top=settings.top)
        if settings.plan_slots is not None:
            facts["plan"] = _plan(history, settings)
        if settings.layer is not None:
            facts["layer"] = layer_facts(history, settings.layer, top=settings.top)
        found.append(facts)
    return {"sources": found, "errors": errors}, histories


def _plan(history: History, settings: InspectSettings) -> dict[str, Any]:
    """What a full plan for `--plan-slots` gains on this history's loads."""
    if not history.total.any():
        return {"num_slots": settings.plan_slots, "balancedness": None, "moves": 0, "reason": "no load"}
    placement, moves, reason = planned(history, settings)
    found = balancedness(RankLoadMap.of(placement)(history.total))
    return {
        "num_slots": placement.num_slots,
        "balancedness": named_balancedness(found, history.source),
        "moves": moves,
        "reason": reason,
    }


def difference(
    sources: list[LoadSource], settings: InspectSettings, override: PlacementMap | None
) -> tuple[dict[str, Any], list[History]]:
    """What changed from the first to the second of `--diff`."""
    if len(sources) == 2 and all(source.placement_map and not source.has_loads for source in sources):
        return {"diff": diff_placements(*sources, ep_size=settings.ep_size), "errors": []}, []
    loads = [source for source in sources if source.has_loads]
    if len(loads) == 2 and len(settings.windows) <= 1:
        window = settings.windows[0] if settings.windows else None
        pairs = [(source, window) for source in loads]
    elif len(loads) == 1 and len(settings.windows) == 2:
        pairs = [(loads[0], window) for window in settings.windows]
    else:
        raise ValueError(
            f"--diff: {len(loads)} sources of loads and {len(settings.windows)} --windows ranges, "
            "expected two sources, or one source and two ranges"
        )
    first, second = (history_of(source, settings, override, window) for source, window in pairs)
    facts = diff_facts(first, second, top=settings.top)
    for name, (source, window) in zip(("first", "second"), pairs, strict=True):
        if window is not None:
            facts[name] = f"{source.path} windows {window[0]}:{'' if window[1] is None else window[1]}"
    return {"diff": facts, "errors": []}, [first, second]


def planned(history: History, settings: InspectSettings) -> tuple[Placement, int, str]:
    """A full plan for the history's totals: placement, moves from the placement in use, and its reason."""
    using = history.using
    assert using is not None
    topology = Topology(using.ep_size, settings.num_nodes or history.source.num_nodes)
    current = current_placement(history, using)
    slots = settings.plan_slots or using.num_slots
    if settings.plan_slots is None and slots == history.source.num_logical_experts:
        slots += using.ep_size  # one redundant slot a rank: without any, a plan can only exchange places
    start = None if current is None else widened(_on(current, topology), slots)
    plan = plan_placement(history.total, topology=topology, num_slots=slots, current=start)
    moves = plan.moves if current is None else _on(current, topology).moved_slots(plan.placement)
    balance = history.balancedness()
    before = None if balance is None else balance.mean
    reason = f"full plan: balancedness {figure(before)} -> {figure(plan.predicted.mean)}, {int(moves.sum()):,} moves"
    return plan.placement, int(moves.sum()), reason


def widened(placement: Placement, num_slots: int) -> Placement | None:
    """The placement with more slots a rank, filled with experts that the rank lacks; None for fewer slots.

    A plan for more slots compares itself with it, and so keeps experts where they are.
    """
    ranks = placement.topology.ep_size
    if num_slots == placement.num_slots:
        return placement
    if num_slots < placement.num_slots or num_slots % ranks:
        return None
    more = num_slots // ranks - placement.num_local_slots
    experts = placement.num_logical_experts
    rows = placement.physical_to_logical.reshape(placement.num_layers, ranks, -1)
    held = placement.holds()
    # A rank's first missing experts, looked for from a different place on every rank.
    order = (np.arange(experts)[None, :] + np.arange(ranks)[:, None] * more) % experts
    missing = ~np.take_along_axis(held, np.broadcast_to(order, held.shape), axis=2)
    place = np.argsort(~missing, axis=2, kind="stable")[:, :, :more]
    extra = np.take_along_axis(np.broadcast_to(order, held.shape), place, axis=2)
    wide = np.concatenate([rows, extra.astype(np.int32)], axis=2).reshape(placement.num_layers, num_slots)
    return Placement(wide, experts, placement.topology)


def _on(placement: Placement, topology: Topology) -> Placement:
    """The same rows over a topology with other nodes."""
    if placement.topology == topology:
        return placement
    return replace(placement, topology=topology)


def current_placement(history: History, using: Using) -> Placement | None:
    """The placement used last, where it is one that obeys the rules."""
    return history.achieved[-1].event.placement if history.achieved else using.placement
