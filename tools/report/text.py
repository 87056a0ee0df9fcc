"""Text tables of `evenroute inspect`, sized to the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenroute.tools.report.words import key_text, one_line, visible

BLOCKS = "▁▂▃▄▅▆▇█"
NO_DATA = "no data"


def number(value: float | None) -> str:
    """A figure of balancedness or a ratio; "no data" for None."""
    return NO_DATA if value is None else f"{value:.4f}"


def count(value: float | None) -> str:
    """A count with thin separators; "not known" for None."""
    if value is None:
        return "not known"
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"
    )  # float64 has no odd integer above 2**53


def clock(seconds: float | None) -> str:
    """A time as UTC; empty for None."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """One character per group of values, scaled from 0 to 1; a space where there is no data."""
    if not values:
        return ""
    groups = min(width, len(values))
    result = []
    for group in range(groups):
        part = values[group * len(values) // groups : (group + 1) * len(values) // groups]
        known = [value for value in part if value is not None]
        if not known:
            result.append(" ")
            continue
        mean = sum(known) / len(known)
        result.append(BLOCKS[min(int(mean * len(BLOCKS)), len(BLOCKS) - 1)])
    return "".join(result)


def pairs(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values, one pair a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, one_line(value))
    return grid


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without rules: the first column to the left, the others to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        # Where it is too narrow, names are folded and figures stay whole.
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def summary(facts: dict[str, Any], width: int) -> RenderableType:
    """The whole summary of one source."""
    if facts.get("time_line") is not None:
        return _log_summary(facts, width)
    if "num_windows" not in facts:
        return _placement_only(facts)
    balance = facts["balancedness"]
    parts: list[RenderableType] = [Text(source_name(facts), style="bold"), pairs(_heading(facts))]
    if balance is not None:
        parts += [Text(), _balancedness(facts, balance, width)]
    if "plan" in facts:
        parts += [Text(), _plan(facts["plan"])]
    parts += [Text(), _skew(facts["skew"])]
    if width >= 100:
        side = Table.grid(padding=(0, 4))
        side.add_row(_hot_experts(facts), _hot_ranks(facts))
        parts += [Text(), side]
    else:
        parts += [Text(), _hot_experts(facts), Text(), _hot_ranks(facts)]
    if facts["placements"]:
        parts += [Text(), _placements(facts["placements"], facts["placements_are"] or "since")]
        if facts["placements"][-1]["small_batches"]:
            parts.append(Text(f"Shares of small batches: {facts['placements'][-1]['small_batches']}"))
    return Group(*parts)


def source_name(facts: dict[str, Any], *, folder: bool = True) -> str:
    """The file, and the key where it holds several placements or models."""
    path = facts["path"] if folder else facts["path"].rsplit("/", 1)[-1]
    return visible(f"{path} [{facts['key']}]" if facts["key"] else path)


def _heading(facts: dict[str, Any]) -> list[tuple[str, str]]:
    layers = f"{facts['num_layers']} layers x {facts['num_logical_experts']} experts"
    empty = facts["layers_without_load"]
    if empty:
        layers += f"; no load in layer{'s' if len(empty) > 1 else ''} {_ranges(empty)}"
    shape = [layers]
    if facts.get("ep_size"):
        shape.append(f"{facts['num_slots']} slots on {facts['ep_size']} ranks")
    windows = f"{facts['num_windows']:,} window{'s' if facts['num_windows'] != 1 else ''}"
    if facts["num_incomplete_windows"]:
        windows += f", {facts['num_incomplete_windows']:,} incomplete"
    if facts["first_step"] is not None:
        windows += f"; steps {facts['first_step']:,} to {facts['last_step']:,}"
    if facts["first_time"] is not None:
        windows += f"; {clock(facts['first_time'])} to {clock(facts['last_time'])} UTC"
    lines = [
        ("kind", facts["kind"]),
        ("model", "; ".join(filter(None, [facts["model"] or "not stated", facts["phase"]]))),
        ("shape", "; ".join(shape)),
        ("history", windows),
        ("routed", f"{count(facts['routed'])} (token, expert) pairs; tokens {count(facts['tokens'])}"),
    ]
    return lines + [("note", note) for note in facts["notes"]]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 7 -> "0-2, 7"."""
    runs: list[list[int]] = []
    for value in numbers:
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _balancedness(facts: dict[str, Any], balance: dict[str, Any], width: int) -> RenderableType:
    title = (
        f"Balancedness (mean over ranks / max over ranks; 1 is perfect) with {visible(facts['placement'])}"
    )
    worst = balance["worst_layer"]
    line = f"mean over layers {number(balance['mean'])}   worst {number(balance['worst'])}"
    line += f"{'' if worst is None else f' (layer {worst})'}   total {number(balance['total'])}"
    parts: list[RenderableType] = [Text(title, style="bold"), Text(line)]
    unplaced = facts["num_windows_without_placement"]
    if unplaced:
        which = "the first window is" if unplaced == 1 else f"the first {unplaced:,} windows are"
        parts.append(Text(f"{which} put on experts in order: what was in use then is not recorded"))
    names = facts["layer_ids"] or range(facts["num_layers"])
    cells = [f"{name:>4} {number(v):>7}" for name, v in zip(names, balance["per_layer"], strict=True)]
    across = max(1, (width - 2) // 14)
    down = -(-len(cells) // across)
    parts.append(Text("per layer", style="bold"))
    parts += [Text("  ".join(cells[row::down]), no_wrap=True) for row in range(down)]
    series = [point["mean"] for point in facts["balancedness_over_time"]]
    if len(series) > 1:
        parts.append(Text(f"over time  {sparkline(series, max(width - 14, 10))}", no_wrap=True))
    return Group(*parts)


def _plan(plan: dict[str, Any]) -> RenderableType:
    """`--plan-slots N`."""
    title = Text(f"With a plan for {plan['num_slots']} slots", style="bold")
    balance = plan["balancedness"]
    if balance is None:
        return Group(title, Text(NO_DATA))
    worst = balance["worst_layer"]
    line = f"mean over layers {number(balance['mean'])}   worst {number(balance['worst'])}"
    line += f"{'' if worst is None else f' (layer {worst})'}   total {number(balance['total'])}"
    return Group(title, Text(line), Text(one_line(plan["reason"])))


def _skew(skew: dict[str, Any]) -> Table:
    names = {
        "max_over_mean": "hottest expert / mean",
        "gini": "Gini",
        "top8_share": "share of the 8 hottest experts",
    }
    rows = [
        [
            title,
            NO_DATA if skew[name] is None else f"{skew[name]['mean']:.3f}",
            NO_DATA if skew[name] is None else f"{skew[name]['worst']:.3f}",
            "" if skew[name] is None else str(skew[name]["worst_layer"]),
        ]
        for name, title in names.items()
    ]
    return plain_table("Skew of experts", ["", "mean", "worst", "layer"], rows)


def since(hot: dict[str, Any] | None) -> str:
    if hot is None:
        return "not at the end"
    if hot["time"] is not None:
        return clock(hot["time"])
    return f"window {hot['window']}" if hot["step"] is None else f"step {hot['step']:,}"


def _hot_experts(facts: dict[str, Any]) -> Table:
    rows = [
        [
            str(found["layer"]),
            str(found["expert"]),
            f"{found['times_mean']:.2f}",
            f"{found['share_of_layer'] * 100:.2f} %",
            since(found["hot_since"]),
        ]
        for found in facts["hottest_experts"]
    ]
    return plain_table("Hottest experts", ["layer", "expert", "x mean", "of layer", "hot since"], rows)


def _hot_ranks(facts: dict[str, Any]) -> Table:
    rows = [
        [str(found["layer"]), str(found["rank"]), f"{found['times_mean']:.2f}"]
        for found in facts["hottest_ranks"]
    ]
    return plain_table("Hottest ranks", ["layer", "rank", "x mean"], rows)


def _placements(placements: Sequence[dict[str, Any]], when: str) -> Table:
    rows = [
        [
            key_text((found["epoch"], found["version"])),
            clock(found["time"]) or ("" if found["step"] is None else f"step {found['step']}"),
            found["policy"],
            "" if found["moves"] is None else f"{found['moves']:,}",
            number(found["before"]),
            number(found["predicted"]),
            number(found["achieved"]),
        ]
        for found in placements[-12:]
    ]
    columns = ["key", when, "policy", "moves", "before", "predicted", "achieved"]
    dropped = len(placements) - len(rows)
    title = "Placements and their effect" + (
        f" (the last {len(rows)} of {len(placements)})" if dropped else ""
    )
    return plain_table(title, columns, rows)


def _placement_only(facts: dict[str, Any]) -> RenderableType:
    lines = [
        ("kind", facts["kind"]),
        ("model", "; ".join(filter(None, [facts["model"] or "not stated", facts["phase"]]))),
        ("shape", f"{facts['num_layers']} layers x {facts['num_logical_experts']} experts"),
        ("slots", f"{facts['num_slots']} on {facts['ep_size'] or 'not stated'} ranks"),
        ("replicas", facts["replicas"]),
        *([("small batches", facts["small_batches"])] if facts["small_batches"] else []),
    ]
    notes = [("note", note) for note in facts["notes"]]
    return Group(Text(source_name(facts), style="bold"), pairs(lines + notes))


def _log_summary(facts: dict[str, Any], width: int) -> RenderableType:
    points = facts["time_line"]
    values = [point["balancedness"] for point in points]
    known = [value for value in values if value is not None]
    lines = [
        ("kind", f"{facts['kind']} (balancedness as the engine logged it; no loads)"),
        ("model", facts["model"] or "not stated"),
        ("lines", f"{len(points):,}; steps {points[0]['step']:,} to {points[-1]['step']:,}"),
        ("balancedness", f"mean {number(sum(known) / len(known) if known else None)}"),
        ("lowest, last", f"{number(min(known, default=None))}, {number(values[-1])}"),
        ("over time", sparkline(values, max(width - 20, 10))),
    ]
    notes = [("note", note) for note in facts["notes"]]
    return Group(Text(source_name(facts), style="bold"), pairs(lines + notes))


def console(*, at_least: int = 0) -> Console:
    """The console for results: stdout, plain when it is not a terminal; never narrower than `at_least` columns."""
    # No markup: names come from files and peers, and a "[" in one is no instruction.
    found = Console(highlight=False, soft_wrap=False, markup=False)
    if found.width >= at_least:
        return found
    return Console(highlight=False, soft_wrap=False, markup=False, width=at_least)
