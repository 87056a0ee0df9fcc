"""The placement that a history says was in use: what `advise`, `replay` and `plan` compare with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from evenroute.eplb.loads.source import LoadSource, PlacementEvent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.price.measured import MeasuredCosts


def placement_in_use(
    sources: Sequence[LoadSource], topology: Topology | None, num_slots: int | None, *, newest: bool
) -> tuple[Placement, str] | None:
    """The first or the newest placement recorded in these sources that fits, and where it is from.

    Args:
        topology: the ranks and nodes asked about; None: whatever was recorded.
        num_slots: the slots asked about; None: whatever was recorded.
        newest: the one in use last; else the one in use when the first window was reported.
    """
    for source in reversed(sources) if newest else sources:
        events = source.placements[::-1] if newest else _at_the_beginning(source)
        for event in events:
            made = event.placement
            if topology is not None and made.topology.ep_size != topology.ep_size:
                continue
            if num_slots is not None and made.num_slots != num_slots:
                continue
            if topology is not None and made.topology != topology:
                made = replace(made, topology=topology)
            when = "newest" if newest else "first"
            how = "published" if source.placements_are == "published" else "in use"
            return made, f"the {when} placement {how} in {source.path.name} ({made.num_slots} slots)"
    return None


def _at_the_beginning(source: LoadSource) -> list[PlacementEvent]:
    """The last placement before the first window, as a list; a later one was not known then."""
    if not source.placements:
        return []
    first = next(iter(source.windows()), None)
    if first is None or first.time is None:
        return []
    return [event for event in source.placements if event.time is not None and event.time <= first.time][-1:]


def recorded_redundancy(source: LoadSource, ep_size: int) -> int | None:
    """Slots beyond one an expert that the source states for this many ranks; None where it does not."""
    if source.num_slots is None or source.ep_size != ep_size:
        return None
    return source.num_slots - source.num_logical_experts


def measured_costs(source: LoadSource, ep_size: int) -> TimeCosts:
    """What a store's ranks measured of moves and steps, if it is of a job of this many ranks; else the defaults."""
    if source.measured and source.ep_size == ep_size:
        with suppress(ValueError, TypeError, AttributeError):
            return MeasuredCosts(source.measured).costs(TimeCosts(), ep_size)
    return TimeCosts()
