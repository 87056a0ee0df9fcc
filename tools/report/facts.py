"""The facts that `evenroute inspect` shows: of each source, or of the difference between two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenroute.eplb.analysis.history import History
    from evenroute.eplb.loads.source import LoadSource, PlacementMap


@dataclass(frozen=True)
class Settings:
    """The options of one call."""

    layer: int | None = None
    diff: bool = False
    windows: tuple[tuple[int, int | None], ...] = ()
    placement: Path | None = None
    ep_size: int | None = None
    num_nodes: int | None = None
    num_slots: int | None = None
    num_experts: int | None = None
    layout: str | None = None
    top: int = 10
    as_json: bool = False
    plan_slots: int | None = None
    html: Path | None = None
    png: Path | None = None
    unfinished: bool = False


def placement_override(settings: Settings) -> PlacementMap | None:
    """The placement of `--placement`, from a file of any known form."""
    from evenroute.tools.inputs import open_placement

    return None if settings.placement is None else open_placement(settings.placement)


def history_of(
    source: LoadSource,
    settings: Settings,
    override: PlacementMap | None,
    window: tuple[int, int | None] | None,
) -> History:
    """One pass over a source as the options ask for it."""
    from evenroute.eplb.analysis.history import choose_placement, read_history

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


def source_facts(
    sources: list[LoadSource], settings: Settings, override: PlacementMap | None, errors: list[str]
) -> tuple[dict[str, Any], list[History]]:
    """What is in each source; a damaged source is a line among the errors, its good files stay."""
    from evenroute.eplb.analysis.facts import history_facts, layer_facts, placement_only_facts
    from evenroute.eplb.analysis.facts import source_facts as known_facts
    from evenroute.eplb.files.ranks import without_damaged

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
            found.append({**known_facts(source), "time_line": source.time_line})
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


def _plan(history: History, settings: Settings) -> dict[str, Any]:
    """What a full plan for `--plan-slots` gains on this history's loads."""
    from evenroute.eplb.analysis.facts import named_balancedness
    from evenroute.eplb.loads.balance import RankLoadMap, balancedness
    from evenroute.tools.report.pictures import planned

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
    sources: list[LoadSource], settings: Settings, override: PlacementMap | None
) -> tuple[dict[str, Any], list[History]]:
    """What changed from the first to the second of `--diff`."""
    from evenroute.eplb.analysis.facts import diff_facts, diff_placements

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
