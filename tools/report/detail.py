"""Text tables of `evenroute inspect` beside the summary: several sources, one layer, a difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenroute.tools.report.text import count, number, pairs, plain_table, since
from evenroute.tools.report.words import short


def comparison(all_facts: Sequence[dict[str, Any]]) -> Table:
    """One row per source, for several at once: balancedness (mean, worst layer), skew = hottest expert / mean."""
    rows = []
    for facts in all_facts:
        balance = facts.get("balancedness") or {}
        skew = (facts.get("skew") or {}).get("max_over_mean") or {}
        rows.append(
            [
                str(facts["path"]).rsplit("/", 1)[-1],
                f"{facts['num_layers']}x{facts['num_logical_experts']}",
                str(facts.get("ep_size") or ""),
                f"{facts.get('num_windows', 0):,}",
                short(facts["routed"]) if "routed" in facts else "",
                number(balance.get("mean")),
                number(balance.get("worst")),
                "" if not skew else f"{skew['mean']:.2f}",
            ]
        )
    columns = ["file", "shape", "ranks", "wins", "routed", "balance", "worst", "skew"]
    return plain_table("", columns, rows)


def layer_detail(facts: dict[str, Any], width: int) -> RenderableType:
    """`--layer N`."""
    head = pairs(
        [
            (f"layer {facts['layer']}", f"load {count(facts['load'])}"),
            ("balancedness", number(facts["balancedness"])),
        ]
    )
    rows = [
        [
            str(found["expert"]),
            count(found["load"]),
            f"{found['times_mean']:.2f}",
            f"{found['share'] * 100:.2f} %",
            ", ".join(map(str, found["ranks"][:6])) + ("..." if len(found["ranks"]) > 6 else ""),
            since(found["hot_since"]),
        ]
        for found in facts["experts"]
    ]
    experts = plain_table("Experts", ["expert", "load", "x mean", "of layer", "on ranks", "hot since"], rows)
    return Group(head, Text(), experts, Text(), _bars(facts["rank_loads"], width))


def _bars(loads: Sequence[float], width: int) -> RenderableType:
    highest = max(loads, default=0.0)
    if not highest:
        return Text("Ranks: no data")
    mean = sum(loads) / len(loads)
    room = max(width - 26, 10)
    lines = [Text("Ranks (x mean)", style="bold")]
    for rank, load in enumerate(loads):
        bar = "█" * round(room * load / highest)
        lines.append(Text(f"{rank:>4} {load / mean:>6.2f} {bar}", no_wrap=True))
    return Group(*lines)


def diff(facts: dict[str, Any]) -> RenderableType:
    """`--diff`."""
    if "moves" in facts:
        moved = [f"{layer}: {n}" for layer, n in enumerate(facts["moves_per_layer"]) if n]
        return pairs(
            [
                ("first", facts["first"]),
                ("second", facts["second"]),
                ("slots", " -> ".join(map(str, facts["num_slots"]))),
                ("moved slots", f"{facts['moves']:,}"),
                ("per layer", ", ".join(moved) or "none"),
            ]
        )
    shift = facts["shift"]
    worst = "" if shift["worst_layer"] is None else f" (layer {shift['worst_layer']})"
    head = pairs(
        [
            ("first", facts["first"]),
            ("second", facts["second"]),
            ("tokens", " -> ".join(count(value) for value in facts["tokens"])),
            ("balancedness", " -> ".join(number(value) for value in facts["balancedness"])),
            (
                "popularity moved",
                f"mean {number(shift['mean'])}, worst {number(shift['worst'])}{worst} of a layer's tokens",
            ),
        ]
    )
    rows = [
        [
            str(found["layer"]),
            str(found["expert"]),
            f"{found['share_before'] * 100:.2f} %",
            f"{found['share_after'] * 100:.2f} %",
            f"{(found['share_after'] - found['share_before']) * 100:+.2f}",
        ]
        for found in facts["moved_experts"]
    ]
    table = plain_table("Experts that changed most", ["layer", "expert", "before", "after", "points"], rows)
    return Group(head, Text(), table)
