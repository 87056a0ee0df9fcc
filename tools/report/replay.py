"""The table of `evenroute replay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from evenroute.tools.inputs import ExpertSize
from evenroute.tools.report.text import console, number, plain_table, sparkline
from evenroute.tools.report.words import short, visible


def show(
    runs: Sequence[dict[str, Any]],
    worth: Sequence[dict[str, Any]],
    size: ExpertSize,
    experts_share: float,
) -> None:
    """Print one row per way to run, and the answer on redundancy if it was asked."""
    out = console(at_least=100)  # figures are never cut: a narrow terminal wraps
    wide = out.width >= 112
    columns = [
        "ranks",
        "redundant",
        "policy",
        "every",
        "balanced",
        "worst",
        "switches",
        "moves",
        "moved",
        "step time",
    ]
    if wide:
        columns.append("over time")
    rows = []
    for run in runs:
        settings = run["settings"]
        moved = "" if run["moved_bytes"] is None else f"{short(run['moved_bytes'])}B"
        gain = run["step_time_gain"]
        row = [
            str(settings["ep_size"]),
            str(settings["num_redundant_experts"]),
            settings["policy"],
            "" if settings["policy"] == "none" else str(settings["interval"]),
            number(run["balancedness_mean"]),
            number(run["balancedness_worst_window"]),
            str(run["num_switches"]),
            f"{run['moves']:,}",
            moved,
            "no data" if gain is None else f"{-100 * gain + 0.0:+.1f} %".replace("-0.0", "0.0"),
        ]
        if wide:
            row.append(sparkline([point["mean"] for point in run["points"]], min(24, out.width - 102)))
        rows.append(row)
    out.print(plain_table(f"{runs[0]['num_windows']:,} windows", columns, rows))
    out.print()
    for found in worth:
        out.print(
            Text(
                f"Worth it: {found['num_redundant_experts']} redundant experts ({found['policy']}, "
                f"{found['ep_size']} ranks, every {found['interval']}): total balancedness "
                f"{found['balancedness_total']:.4f}, within 1 % of the best here, {found['best_total']:.4f}."
            )
        )
    for begin in dict.fromkeys(run["begins_with"] for run in runs):
        out.print(Text(f"Runs begin with {visible(begin)}."))
    for priced in dict.fromkeys(run["priced"] for run in runs if run["priced"]):
        out.print(Text(f"The rebalancer's moves are priced: {priced}."))
    out.print(
        Text(
            f"Step time is against experts in order without EPLB, with experts taking {100 * experts_share:.0f} % "
            f"of such a step (--experts-share); an expert is "
            + (f"{size.num_bytes / 1e6:.1f} MB" if size.num_bytes else "of unknown size")
            + f" ({size.origin})."
        )
    )
