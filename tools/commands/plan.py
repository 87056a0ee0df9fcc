"""`evenroute plan`: a placement for a file of loads."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenroute.tools.errors import check_output
from evenroute.tools.options import AsJson, Layout, NumExperts
from evenroute.tools.report.words import visible

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from evenroute.eplb.loads.source import LoadSource
    from evenroute.eplb.placement.placement import Placement
    from evenroute.eplb.planner.plan import Plan

MOST_WINDOWS = 64
PNG_FRACTIONS = (0.0, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.10)


def _read_windows(sources: Sequence[LoadSource]) -> tuple[NDArray[np.float64], int]:
    """Loads ``[W, L, E]`` of the sources, oldest first, and how many windows there were in all.

    Of a longer history the newest `MOST_WINDOWS` are kept.
    """
    from collections import deque

    import numpy as np

    from evenroute.tools.inputs import all_windows

    newest: deque[NDArray[Any]] = deque(maxlen=MOST_WINDOWS)
    found = 0
    for window in all_windows(sources):
        newest.append(window)
        found += 1
    if not found:
        raise ValueError(f"{sources[0].path}: holds no window of loads")
    return np.stack(newest).astype(np.float64), found


def plan(
    loads: Annotated[
        list[Path], typer.Argument(help="A store, dumps or other engines' files, oldest first, or -.")
    ],
    ep_size: Annotated[int, typer.Option(help="EP ranks.")],
    num_slots: Annotated[int, typer.Option(help="Physical experts over all ranks.")],
    num_nodes: Annotated[int, typer.Option(help="Nodes the ranks lie on.")] = 1,
    num_groups: Annotated[int, typer.Option(help="Expert groups of the model.")] = 1,
    current: Annotated[
        Path | None, typer.Option(help="Placement file in use; by default the newest that a store states.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="global, hierarchical, incremental, weighted, joint, shares, stay or auto.")
    ] = "global",
    target: Annotated[float | None, typer.Option(help="Balancedness that is enough.")] = None,
    max_moves: Annotated[int | None, typer.Option(help="Moved slots over all layers.")] = None,
    max_moves_per_rank: Annotated[int | None, typer.Option(help="Moved slots on any rank.")] = None,
    spill: Annotated[
        float, typer.Option(help="hierarchical: part of slots that may leave their node.")
    ] = 0.0,
    windows: Annotated[str, typer.Option(help="Several files: mean, last, ewma, robust or auto.")] = "mean",
    top_k: Annotated[
        int | None,
        typer.Option(min=1, help="Experts a token: with it (or a known --model) shares come by batch size."),
    ] = None,
    expert_us: Annotated[float | None, typer.Option(help="Microseconds of an expert touched.")] = None,
    token_us: Annotated[float | None, typer.Option(help="Of a token, where they take longer.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the model, for the file.")] = None,
    phase: Annotated[str | None, typer.Option(help="prefill, decode, ..., for the file.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the placement here.")] = None,
    num_experts: NumExperts = None,
    layout: Layout = None,
    as_json: AsJson = False,
    png: Annotated[Path | None, typer.Option(help="Plot balancedness against moved slots.")] = None,
) -> None:
    """Plan a placement: predicted balancedness, moved slots, and why."""
    from evenroute.eplb.loads.whole import require_whole
    from evenroute.eplb.placement.file import load_placement, save_placement
    from evenroute.eplb.placement.topology import check_plan_numbers
    from evenroute.eplb.planner.classes.times import given_times
    from evenroute.eplb.planner.plan import plan_placement
    from evenroute.tools.in_use import placement_in_use
    from evenroute.tools.inputs import open_loads

    check_output("-o", output)
    check_output("--png", png)
    sources = require_whole(open_loads(loads, num_experts=num_experts, layout=layout), ep_size)
    array, found = _read_windows(sources)
    if found > len(array):
        print(f"note: {found} windows found, the newest {len(array)} are planned from", file=sys.stderr)
    topology = check_plan_numbers(array.shape[2], num_slots, num_groups, num_nodes, ep_size)
    in_use = None if current is None else load_placement(current)
    before: Placement | None
    if in_use is not None:
        before, baseline = in_use[0], str(current)
    else:
        recorded = placement_in_use(sources, topology, num_slots, newest=True)
        before, baseline = recorded or (None, "experts in order, redundant slots round-robin")
    made = plan_placement(
        array,
        topology=topology,
        num_slots=num_slots,
        num_groups=num_groups,
        current=before,
        policy=policy,
        target=target,
        max_moves=max_moves,
        max_moves_per_rank=max_moves_per_rank,
        spill=spill,
        windows=windows,
        top_k=top_k or _known_top_k(sources, model),
        expert_times=given_times(expert_us, token_us),
    )
    if png is not None:
        start = before or _initial(made.placement)
        _write_png(png, array, start, made)
    if output is not None:
        content = None if in_use is None else in_use[1]
        old_model, old_phase = (content.model, content.phase) if content else ("", "")
        save_placement(
            output,
            made.placement,
            model=old_model if model is None else model,
            phase=old_phase if phase is None else phase,
        )
    facts = _facts(made, output, png) | {"baseline": baseline}
    if as_json:
        json.dump(facts, sys.stdout)
        print()
    else:
        _print_table(facts)


def _known_top_k(sources: Sequence[LoadSource], model: str | None) -> int | None:
    from evenroute.eplb.placement.models import MODEL_SHAPES

    shape = MODEL_SHAPES.get(model or "")
    return next((source.top_k for source in sources if source.top_k), None if shape is None else shape.top_k)


def _initial(like: Placement) -> Placement:
    from evenroute.eplb.placement.placement import Placement

    return Placement.initial(like.num_layers, like.num_logical_experts, like.num_slots, like.topology)


def _facts(made: Plan, output: Path | None, png: Path | None) -> dict[str, Any]:
    from evenroute.eplb.placement.classes import told

    return {
        "policy": made.policy,
        "reason": made.reason,
        "notices": list(made.notices),
        "balancedness_before": made.before.as_dict(),
        "balancedness_predicted": made.predicted.as_dict(),
        "moved_slots": int(made.moves.sum()),
        "moved_slots_per_layer": made.moves.tolist(),
        "num_layers": made.placement.num_layers,
        "num_slots": made.placement.num_slots,
        "uneven_shares": made.placement.shares is not None,
        "small_batches": told(made.placement.physical_to_logical, made.placement.classes),
        "digest": made.placement.digest(),
        "output": None if output is None else str(output),
        "png": None if png is None else str(png),
    }


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
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    slots = facts["num_layers"] * facts["num_slots"]
    share = f" ({facts['moved_slots'] / slots:.2%})" if slots else ""
    console.print(f"before: {visible(facts['baseline'])}")
    console.print(f"moved slots: {facts['moved_slots']} of {slots}{share}")
    console.print(visible(facts["reason"]))
    for notice in facts["notices"]:
        console.print(f"note: {visible(notice)}")
    for name in ("output", "png"):
        if facts[name]:
            console.print(f"written: {visible(facts[name])}")


def _write_png(path: Path, windows: NDArray[np.float64], start: Placement, made: Plan) -> None:
    """Plot the mean balancedness that each budget of moves buys, with even and with exact shares."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ValueError("--png needs matplotlib: pip install 'evenroute[report]'") from None
    matplotlib.use("Agg")
    import io

    from matplotlib import pyplot

    from evenroute.eplb._io import write_beside_and_rename
    from evenroute.eplb.planner.plan import plan_placement

    slots = max(1, start.physical_to_logical.size)
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for policy, label in (("incremental", "even shares"), ("weighted", "exact shares")):
        points = []
        for fraction in PNG_FRACTIONS:
            budgeted = plan_placement(
                windows,
                topology=start.topology,
                num_slots=start.num_slots,
                current=start,
                policy=policy,
                max_moves=int(fraction * slots),
            )
            points.append((budgeted.moves.sum() / slots * 100, budgeted.predicted.mean or 0.0))
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    chosen = (made.moves.sum() / slots * 100, made.predicted.mean or 0.0)
    axes.plot(*chosen, marker="*", markersize=14, linestyle="none", label=f"this plan ({made.policy})")
    axes.set_xlabel("moved slots, % of all")
    axes.set_ylabel("mean balancedness over layers")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    pyplot.close(figure)
    write_beside_and_rename(path, buffer.getvalue())
