"""`evenroute inspect PATH...`: what is in a store, a dump, or another engine's file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenroute.tools.errors import check_output, one_line_errors

if TYPE_CHECKING:
    from evenroute.eplb.foreign_source import LoadSource, PlacementMap
    from evenroute.eplb.load_history import History


Paths = Annotated[list[Path], typer.Argument(metavar="PATH...", help="Store, dump, folder or foreign file.")]
Layer = Annotated[int | None, typer.Option(help="Detail of one layer, by the model's index.")]
Diff = Annotated[bool, typer.Option("--diff", help="What changed from the first to the second.")]
Windows = Annotated[
    list[str] | None, typer.Option(help="Only windows FIRST:END; twice with --diff and one PATH.")
]
OnPlacement = Annotated[Path | None, typer.Option(help="Put the loads on this placement (any known form).")]
EpSize = Annotated[int | None, typer.Option(min=1, help="Ranks, where the file does not state them.")]
NumNodes = Annotated[int | None, typer.Option(min=1, help="Nodes that hold the ranks.")]
NumSlots = Annotated[int | None, typer.Option(min=1, help="Slots over all ranks.")]
NumExperts = Annotated[int | None, typer.Option(min=1, help="Experts, for traces that do not state them.")]
Top = Annotated[int, typer.Option(min=1, help="How many experts and ranks to list.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]
PlanSlots = Annotated[
    int | None,
    typer.Option(
        min=1, help="Show what a plan with so many slots would bring; in pictures by default one more a rank."
    ),
]
Html = Annotated[Path | None, typer.Option(help="Write one self-contained page with heatmaps.")]
Png = Annotated[Path | None, typer.Option(help="Write a picture for a ticket (needs matplotlib).")]


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
    top: int = 10
    as_json: bool = False
    plan_slots: int | None = None
    html: Path | None = None
    png: Path | None = None


@one_line_errors
def inspect(
    paths: Paths,
    layer: Layer = None,
    diff: Diff = False,
    windows: Windows = None,
    placement: OnPlacement = None,
    ep_size: EpSize = None,
    num_nodes: NumNodes = None,
    num_slots: NumSlots = None,
    num_experts: NumExperts = None,
    top: Top = 10,
    as_json: AsJson = False,
    plan_slots: PlanSlots = None,
    html: Html = None,
    png: Png = None,
) -> None:
    """Show loads, balancedness, hot experts and ranks, placements and their effect."""
    ranges = tuple(window_range(text) for text in windows or [])
    if plan_slots is not None and diff:
        raise ValueError(f"--plan-slots {plan_slots}: not with --diff, which compares loads")
    check_output("--html", html)
    check_output("--png", png)
    settings = Settings(
        layer,
        diff,
        ranges,
        placement,
        ep_size,
        num_nodes,
        num_slots,
        num_experts,
        top,
        as_json,
        plan_slots,
        html,
        png,
    )
    raise typer.Exit(run(paths, settings))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(inspect)


def window_range(text: str) -> tuple[int, int | None]:
    """ "10:20" -> (10, 20); "10:" -> (10, None); ValueError names the form."""
    first, colon, end = text.partition(":")
    try:
        bounds = (int(first or 0), int(end) if end else None)
    except ValueError:
        bounds = (-1, None)
    if not colon or bounds[0] < 0 or (bounds[1] is not None and bounds[1] <= bounds[0]):
        raise ValueError(f"--windows {text!r}: expected FIRST:END with 0 <= FIRST < END")
    return bounds


def placement_override(settings: Settings) -> PlacementMap | None:
    """The placement of `--placement`, from a file of any known form."""
    from evenroute.tools.load_inputs import open_placement

    return None if settings.placement is None else open_placement(settings.placement)


def history_of(
    source: LoadSource,
    settings: Settings,
    override: PlacementMap | None,
    window: tuple[int, int | None] | None,
) -> History:
    """One pass over a source as the options ask for it."""
    from evenroute.eplb.load_history import choose_placement, read_history

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


def run(paths: list[Path], settings: Settings) -> int:
    """Read, show, and give the exit status: 2 when something could not be read."""
    from evenroute.eplb.foreign_open import open_sources
    from evenroute.tools.pt_files import read_pt

    opened = open_sources(paths, read_pt=read_pt, num_logical_experts=settings.num_experts)
    if opened.errors and not opened.sources:
        raise ValueError("; ".join(opened.errors[:1]) + _more(len(opened.errors) - 1))
    override = placement_override(settings)
    if settings.diff:
        result, histories = _diff(opened.sources, settings, override)
    else:
        result, histories = _inspect(opened.sources, settings, override, opened.errors)
    if settings.html or settings.png:
        _pictures(histories, settings)
    _show(result, settings)
    for error in result["errors"]:
        typer.echo(f"evenroute: error: {' '.join(error.split())}", err=True)
    return 2 if result["errors"] else 0


def _more(count: int) -> str:
    return f" (and {count} more unreadable files)" if count > 0 else ""


def _inspect(
    sources: list[LoadSource], settings: Settings, override: PlacementMap | None, errors: list[str]
) -> tuple[dict[str, Any], list[History]]:
    from evenroute.eplb.load_report import history_facts, layer_facts, placement_only_facts, source_facts

    if len(settings.windows) > 1:
        raise ValueError("--windows: more than one range needs --diff")
    window = settings.windows[0] if settings.windows else None
    found: list[dict[str, Any]] = []
    histories = []
    errors = list(errors)
    for source in sources:
        if source.time_line:
            found.append({**source_facts(source), "time_line": source.time_line})
            continue
        if not source.has_loads:
            found.append(placement_only_facts(source))
            continue
        try:
            history = history_of(source, settings, override, window)
        except ValueError as error:
            if len(sources) == 1:
                raise
            errors.append(str(error))
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
    """What a full plan for `--plan-slots` brings to this history's loads."""
    from evenroute.eplb.load_report import named_balancedness
    from evenroute.eplb.load_skew import RankLoadMap
    from evenroute.eplb.loads import balancedness
    from evenroute.tools.report_pictures import planned

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


def _diff(
    sources: list[LoadSource], settings: Settings, override: PlacementMap | None
) -> tuple[dict[str, Any], list[History]]:
    from evenroute.eplb.load_report import diff_facts, diff_placements

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


def _pictures(histories: list[History], settings: Settings) -> None:
    from evenroute.tools.report_pictures import history_html, history_png

    if not histories:
        raise ValueError("--html and --png need a source of loads")
    if settings.html is not None:
        history_html(settings.html, histories, settings)
    if settings.png is not None:
        history_png(settings.png, histories, settings)


def _show(result: dict[str, Any], settings: Settings) -> None:
    from evenroute.tools import report_text

    if settings.as_json:
        import json

        typer.echo(json.dumps(result))
        return
    console = report_text.console()
    if "diff" in result:
        console.print(report_text.diff(result["diff"]))
        return
    sources = result["sources"]
    for facts in sources if len(sources) == 1 else []:
        console.print(report_text.summary(facts, console.width))
    if len(sources) > 1:
        console.print(report_text.comparison(sources))
        for facts in sources:
            if "plan" in facts:
                console.print(
                    f"{facts['path']}: plan for {facts['plan']['num_slots']} slots, {facts['plan']['reason']}"
                )
    for facts in sources:
        if "layer" in facts:
            console.print()
            console.print(report_text.layer_detail(facts["layer"], console.width))
    for path in (settings.html, settings.png):
        if path is not None:
            console.print(f"wrote {path}")
