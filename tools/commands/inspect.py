"""`evenroute inspect PATH...`: what is in a store, a dump, or another engine's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenroute.tools.errors import check_output
from evenroute.tools.options import AsJson, Layout, NumExperts, Unfinished
from evenroute.tools.report.words import one_line, visible

if TYPE_CHECKING:
    from evenroute.eplb.analysis.history import History
    from evenroute.eplb.analysis.inspection import InspectSettings


Paths = Annotated[
    list[Path], typer.Argument(metavar="PATH...", help="Store, dump, folder, foreign file, or - (stdin).")
]
Layer = Annotated[int | None, typer.Option(help="Detail of one layer, by the model's index.")]
Diff = Annotated[bool, typer.Option("--diff", help="What changed from the first to the second.")]
Windows = Annotated[
    list[str] | None, typer.Option(help="Only windows FIRST:END; twice with --diff and one PATH.")
]
OnPlacement = Annotated[Path | None, typer.Option(help="Put the loads on this placement (any known form).")]
EpSize = Annotated[int | None, typer.Option(min=1, help="Ranks, where the file does not state them.")]
NumNodes = Annotated[int | None, typer.Option(min=1, help="Nodes that hold the ranks.")]
NumSlots = Annotated[int | None, typer.Option(min=1, help="Slots over all ranks.")]
Top = Annotated[int, typer.Option(min=1, help="How many experts and ranks to list.")]
PlanSlots = Annotated[
    int | None,
    typer.Option(
        min=1, help="Show what a plan with so many slots would bring; in pictures by default one more a rank."
    ),
]
Html = Annotated[Path | None, typer.Option(help="Write one self-contained page with heatmaps.")]
Png = Annotated[Path | None, typer.Option(help="Write a picture for a ticket (needs matplotlib).")]


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
    layout: Layout = None,
    top: Top = 10,
    as_json: AsJson = False,
    plan_slots: PlanSlots = None,
    html: Html = None,
    png: Png = None,
    unfinished: Unfinished = False,
) -> None:
    """Show loads, balancedness, hot experts and ranks, placements and their effect."""
    from evenroute.eplb.analysis.inspection import InspectSettings, difference, facts_of_sources
    from evenroute.tools.inputs import open_placement, open_sources, tell_unfinished

    ranges = tuple(window_range(text) for text in windows or [])
    if plan_slots is not None and diff:
        raise ValueError(f"--plan-slots {plan_slots}: not with --diff, which compares loads")
    check_output("--html", html)
    check_output("--png", png)
    settings = InspectSettings(layer, ranges, ep_size, num_nodes, num_slots, top, plan_slots)
    opened = open_sources(paths, num_experts, layout, unfinished=unfinished)
    if not opened.sources and (lines := opened.errors or opened.unfinished):
        raise ValueError(lines[0] + _more(len(lines) - 1))
    override = None if placement is None else open_placement(placement)
    if diff:
        if opened.errors:
            raise ValueError(opened.errors[0] + _more(len(opened.errors) - 1))
        result, histories = difference(opened.sources, settings, override)
    else:
        result, histories = facts_of_sources(opened.sources, settings, override, opened.errors)
    pictures = {name: path for name, path in (("html", html), ("png", png)) if path is not None}
    if pictures:
        _draw(histories, settings, pictures)
    result["unfinished"] = opened.unfinished
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _show(result, list(pictures.values()))
        for line in opened.unfinished:
            tell_unfinished(line)
    for error in result["errors"]:
        typer.echo(f"evenroute: error: {one_line(error)}", err=True)
    raise typer.Exit(2 if result["errors"] else 0)


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


def _more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _draw(histories: list[History], settings: InspectSettings, pictures: dict[str, Path]) -> None:
    from evenroute.tools.report.pictures import history_html, history_png

    if not histories:
        raise ValueError("--html and --png need a source of loads")
    if "html" in pictures:
        history_html(pictures["html"], histories, settings)
    if "png" in pictures:
        history_png(pictures["png"], histories, settings)


def _show(result: dict[str, Any], written: list[Path]) -> None:
    from evenroute.tools.report import detail as report_detail
    from evenroute.tools.report import text as report_text

    console = report_text.console()
    if "diff" in result:
        console.print(report_detail.diff(result["diff"]))
        return
    sources = result["sources"]
    for facts in sources if len(sources) == 1 else []:
        console.print(report_text.summary(facts, console.width))
    if len(sources) > 1:
        console.print(report_detail.comparison(sources))
        for facts in sources:
            if "plan" in facts:
                console.print(
                    f"{visible(facts['path'])}: plan for {facts['plan']['num_slots']} slots, {facts['plan']['reason']}"
                )
    for facts in sources:
        if "layer" in facts:
            console.print()
            console.print(report_detail.layer_detail(facts["layer"], console.width))
    for path in written:
        console.print(f"wrote {visible(str(path))}")
