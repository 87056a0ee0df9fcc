"""`evenroute plan`: a placement for a file of loads."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from evenroute.tools.errors import one_line_errors


@one_line_errors
def plan(
    loads: Annotated[Path, typer.Argument(help="Loads: {'logical_count': [[...]]} JSON.")],
    ep_size: Annotated[int, typer.Option(help="EP ranks.")],
    num_slots: Annotated[int, typer.Option(help="Physical experts over all ranks.")],
    num_nodes: Annotated[int, typer.Option(help="Nodes the ranks lie on.")] = 1,
    num_groups: Annotated[int, typer.Option(help="Expert groups of the model.")] = 1,
    current: Annotated[Path | None, typer.Option(help="Placement file in use.")] = None,
    policy: Annotated[str, typer.Option(help="global or hierarchical.")] = "global",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the placement here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Plan a placement: predicted balancedness, moved slots, and why."""
    from evenroute.eplb.load_files import read_logical_count
    from evenroute.eplb.placement_file import load_placement, save_placement
    from evenroute.eplb.planner import plan_placement
    from evenroute.eplb.topology import check_plan_numbers

    array = read_logical_count(loads)
    topology = check_plan_numbers(array.shape[1], num_slots, num_groups, num_nodes, ep_size)
    in_use = None if current is None else load_placement(current)
    made = plan_placement(
        array,
        topology=topology,
        num_slots=num_slots,
        num_groups=num_groups,
        current=None if in_use is None else in_use[0],
        policy=policy,
    )
    if output is not None:
        content = None if in_use is None else in_use[1]
        save_placement(
            output,
            made.placement,
            model=content.model if content else "",
            phase=content.phase if content else "",
        )
    facts: dict[str, Any] = {
        "policy": made.policy,
        "reason": made.reason,
        "balancedness_before": made.before.as_dict(),
        "balancedness_predicted": made.predicted.as_dict(),
        "moved_slots": int(made.moves.sum()),
        "moved_slots_per_layer": made.moves.tolist(),
        "num_layers": made.placement.num_layers,
        "num_slots": num_slots,
        "digest": made.placement.digest(),
        "output": None if output is None else str(output),
    }
    if as_json:
        json.dump(facts, sys.stdout)
        print()
        return
    _print_table(facts)


def _print_table(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"plan: {facts['policy']}")
    for name in ("balancedness", "mean", "worst layer", "total"):
        table.add_column(name, justify="left" if name == "balancedness" else "right")
    for name in ("before", "predicted"):
        figures = facts[f"balancedness_{name}"]
        cells = [figures["mean"], figures["worst"], figures["total"]]
        table.add_row(name, *("no data" if cell is None else f"{cell:.4f}" for cell in cells))
    console = Console(soft_wrap=True)
    console.print(table)
    slots = facts["num_layers"] * facts["num_slots"]
    share = f" ({facts['moved_slots'] / slots:.2%})" if slots else ""
    console.print(f"moved slots: {facts['moved_slots']} of {slots}{share}", highlight=False)
    console.print(facts["reason"], highlight=False, markup=False)
    if facts["output"]:
        console.print(f"written: {facts['output']}", highlight=False, markup=False)


def register(app: typer.Typer) -> None:
    """Add the command to the `evenroute` app."""
    app.command("plan")(plan)
