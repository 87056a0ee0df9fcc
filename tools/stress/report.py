"""The stress run's final table and its JSON report. No torch: it prints what the run measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from evenroute.dist.client import query_status
from evenroute.eplb.placement.placement import Placement
from evenroute.tools.report.words import key_text
from evenroute.tools.stress.options import StressOptions

if TYPE_CHECKING:
    from evenroute.tools.stress.measure import Segment

MARKS = {
    True: "[green]holds [/green]",
    False: "[bold red]BROKEN[/bold red]",
    None: "[yellow]unknown[/yellow]",
}


def _figure(value: float | None) -> str:
    return "no data" if value is None else f"{value:.3f}"


def segment_rows(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    """One dict a segment, JSON-ready; `moved_slots` is against the settled segment before it."""
    rows: list[dict[str, Any]] = []
    before: Placement | None = None
    for segment in segments:
        moved = 0 if before is None else int(before.moved_slots(segment.placement).sum())
        before = segment.placement
        rows.append(
            {
                "first_step": segment.first_step,
                "last_step": segment.last_step,
                "key": list(segment.key) if segment.key else None,
                "popularity": segment.phase,
                "tokens": segment.tokens,
                "balancedness_achieved": segment.achieved().mean,
                "balancedness_predicted": segment.predicted().mean,
                "worst_layer_achieved": segment.achieved().worst,
                "moved_slots": moved,
            }
        )
    return rows


def headline(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The top-level figures: before the first switch, and over the settled steps after the last one.

    Of the steps after the last switch only those with the last popularity count; if the run ended
    inside a switch, the last settled placement is taken.
    """
    settled = [row for row in rows if row["key"] is not None]
    first, last = settled[0], settled[-1]
    keys = list(dict.fromkeys(tuple(row["key"]) for row in settled))
    return {
        "balancedness_before": first["balancedness_achieved"],
        "balancedness_predicted": last["balancedness_predicted"],
        "balancedness_achieved": last["balancedness_achieved"],
        "worst_layer_achieved": last["worst_layer_achieved"],
        "switches": len(keys) - 1,
        "moved_slots": sum(row["moved_slots"] for row in rows),
        "key": last["key"],
    }


def worth_of_rebalancing(address: str) -> dict[str, Any]:
    """What the rebalancer says that it saved and cost this run; nothing where it does not answer or has no figures."""
    try:
        status = query_status(address, timeout_s=5.0)
    except (OSError, ValueError, RuntimeError):
        return {}
    return {
        "saved_gpu_seconds": status.saved_gpu_seconds,
        "cost_gpu_seconds": status.cost_gpu_seconds,
        "said": status.worth,
    }


def _segments_table(report: dict[str, Any]) -> Table:
    table = Table(title="placements, in the order in which they were in use", title_justify="left")
    for name in ("steps", "epoch/version", "popularity"):
        table.add_column(name)
    for name in ("moved slots", "predicted", "achieved", "worst layer"):
        table.add_column(name, justify="right")
    for row in report["segments"]:
        table.add_row(
            f"{row['first_step']}-{row['last_step']}",
            key_text(row["key"]),
            "as at start" if row["popularity"] == 0 else "reshuffled",
            str(row["moved_slots"]),
            _figure(row["balancedness_predicted"]),
            _figure(row["balancedness_achieved"]),
            _figure(row["worst_layer_achieved"]),
        )
    return table


def _cost_rows(cost: dict[str, float]) -> list[tuple[str, str]]:
    """The forward thread's cost beside its yardstick; figures of the worst rank."""

    def pair(name: str, second: str = "p99") -> str:
        return f"{cost[f'{name}_median_us']:.0f} / {cost[f'{name}_{second}_us']:.0f} us"

    rows = [("cost on the forward thread, per step (median / p99)", pair("agent_step"))]
    if cost["switching_steps"]:
        label = f"  in the {cost['switching_steps']:.0f} steps that switched layers (median / max)"
        rows.append((label, pair("switching_step", "max")))
        rows.append(("  in all others (median / p99)", pair("steady_step")))
    rows.append(("  of it, waiting for another rank's vote (median / p99)", pair("vote_wait")))
    rows.append(("a bare copy-and-zero of the counts, same run", pair("copy_and_zero")))
    return rows


def _summary_table(report: dict[str, Any]) -> Table:
    table = Table(title="summary", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    cost = report["forward_thread"]
    rows = [
        ("balancedness before", _figure(report["balancedness_before"])),
        ("balancedness predicted", _figure(report["balancedness_predicted"])),
        ("balancedness achieved", _figure(report["balancedness_achieved"])),
        ("switches", str(report["switches"])),
        ("moved slots", str(report["moved_slots"])),
        ("steps per second", f"{report['steps_per_second']:.1f}"),
    ]
    rows += _cost_rows(cost)
    for name, value in rows:
        table.add_row(name, value)
    said = report.get("worth", {}).get("said")
    if said:
        table.caption, table.caption_justify = said, "left"
    return table


def beginning(options: StressOptions, ranks: int, device: str) -> str:
    """What the run is about to do, in a few lines."""
    shape = options.shape
    groups = f" of {shape.topk_group} in {shape.num_groups} groups" if shape.num_groups > 1 else ""
    planner = {"start": "a rebalancer of its own", "off": "no rebalancer"}.get(
        options.rebalancer, f"the rebalancer at {options.rebalancer}"
    )
    slots = f"{shape.num_layers} layers of {shape.num_logical_experts} experts in {shape.num_slots} slots"
    return (
        f"{options.steps} steps on {ranks} ranks ({device}), {options.tokens} tokens a rank and step, "
        f"{options.routing} routing\n{shape.name}: {slots}, top-{shape.top_k}{groups}; {planner}, policy "
        f"{options.policy}\neach step: every layer's logits are routed, counted and checked; placements switch while "
        "it runs; Ctrl-C ends it with a summary"
    )


def print_report(report: dict[str, Any], console: Console) -> None:
    """Prints what the run found: the placements, the summary, and each invariant by name."""
    console.print(_segments_table(report))
    console.print()
    console.print(_summary_table(report))
    for finding in report["invariants"]:
        mark = MARKS[finding["held"]]
        console.print(f"{mark} {finding['name']}: {finding['detail']}", highlight=False)
