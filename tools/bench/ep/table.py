"""The table of `bench ep`. No torch: it prints what was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

PHASES = ("before", "during", "after")
FEWEST_CHUNKS = 8
NOTES = {
    "no plan": "no plan gained 0.01",
    "late": "not done in time",
}


def _three(cell: dict[str, Any], figure: Callable[[dict[str, Any]], str]) -> str:
    return " / ".join("-" if cell[name] is None else figure(cell[name]) for name in PHASES)


def _migration(cell: dict[str, Any]) -> str:
    found = cell["bandwidth"]
    if not found:
        return NOTES.get(cell["ended"], "-")
    share = found["of_plain"]
    # A handful of chunks is mostly latency, which a plain exchange has as well.
    plain = "" if found["chunks"] < FEWEST_CHUNKS or share != share else f" ({share:.0%})"
    return f"{found['migration_gb_s']:.3g}{plain}"


def cell_table(report: dict[str, Any]) -> Table:
    """One line a cell."""
    table = Table(
        title=f"{report['ranks']} ranks on {report['device']}: before / during / after the rebalance",
        title_justify="left",
    )
    for name in ("traffic", "red.", "dispatch", "policy"):
        table.add_column(name, no_wrap=name != "traffic", overflow="fold", min_width=4)
    for name in ("step, ms", "1,000 tokens/s", "balancedness", "pred.", "moved", "steps", "GB/s (of plain)"):
        table.add_column(name, justify="right", no_wrap=name != "GB/s (of plain)")
    for cell in report["cells"]:
        after = cell["after"]
        table.add_row(
            cell["source"],
            str(cell["redundant"]),
            cell["dispatch"],
            cell["policy"],
            _three(cell, lambda phase: f"{phase['median']:.3g}"),
            _three(cell, lambda phase: f"{phase['tokens_s'] / 1000:.4g}"),
            _three(cell, lambda phase: f"{phase['balancedness']['mean']:.3f}"),
            "-" if after is None else f"{after['predicted']['mean']:.3f}",
            str(cell["moved_slots"]),
            str(0 if cell["during"] is None else cell["during"]["steps"]),
            _migration(cell),
        )
    return table


def cost_table(report: dict[str, Any]) -> Table:
    """What `agent.step()` costs the host."""
    table = Table(title="agent.step() on the forward thread, all cells", title_justify="left")
    for name in ("step with", "steps", "median, us", "p99, us"):
        table.add_column(name, justify="left" if name == "step with" else "right")
    for kind, found in report["agent_step"].items():
        table.add_row(kind, str(found["count"]), f"{found['median_us']:.0f}", f"{found['p99_us']:.0f}")
    return table


def print_report(report: dict[str, Any], console: Console) -> None:
    """Everything, for a reader."""
    sizes = report["sizes"]
    console.print(
        f"{sizes['layers']} layers of {sizes['experts']} experts ({sizes['expert_mib']:.3g} MiB each), "
        f"top-{sizes['top_k']}, hidden {sizes['hidden']}, {sizes['tokens']} tokens a rank and step",
        highlight=False,
    )
    console.print(cell_table(report))
    console.print(cost_table(report))
    outputs = report["outputs"]
    console.print(
        f"outputs: {outputs['steps_a_rank']} steps a rank, all checked: largest relative error "
        f"{outputs['worst_relative_error']:.1e} (allowed {outputs['allowed']:g}), {outputs['wrong_ids']} wrong ids, "
        f"{outputs['wrong_slots']} slots with wrong weights",
        highlight=False,
    )
    for name in report["not_run"]:
        console.print(f"not run (--limit-s): {name}", highlight=False)
