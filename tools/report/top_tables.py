"""Parts of `evenroute top`: layers and ranks by name, hottest first; one layer by itself; maps of all of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenroute.dist.wire.control import LayerLoads, RankHealth, RebalancerStatus
from evenroute.tools.report.text import BLOCKS, number
from evenroute.tools.report.words import short

LAYER_SORTS = ("balance", "number")
RANK_SORTS = ("load", "silence", "number")
BAR = 10
SILENT_S = 5.0
# Shade by steps behind the most advanced rank's last stored step.
SHADES = ((0, "green"), (1, "yellow"), (4, "dark_orange"), (16, "red"))


def bar(part: float, width: int = BAR) -> str:
    """A bar of this many eighths."""
    eighths = round(8 * width * min(max(part, 0.0), 1.0))
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def sorted_layers(status: RebalancerStatus, order: str) -> list[int]:
    """Layers, the least balanced first; those without data last."""
    values = status.balancedness_per_layer
    layers = list(range(len(values)))
    if order == "balance":
        layers.sort(key=lambda layer: (2.0 if (found := values[layer]) is None else found, layer))
    return layers


def sorted_ranks(status: RebalancerStatus, order: str) -> list[RankHealth]:
    """Ranks, the hottest or the most silent first."""
    loads = status.rank_load
    ranks = list(status.ranks)
    if order == "load" and loads:
        ranks.sort(key=lambda rank: (-loads[rank.rank] if rank.rank < len(loads) else 0.0, rank.rank))
    elif order == "silence":
        ranks.sort(key=lambda rank: (-(1e9 if rank.heard_s_ago is None else rank.heard_s_ago), rank.rank))
    return ranks


def shown_from(chosen: int, many: int, room: int) -> int:
    """Number of the first row, so that the chosen one is seen."""
    return max(0, min(chosen - room // 2, many - room))


def layers_table(
    status: RebalancerStatus, order: str, chosen: int, room: int, focused: bool, wide: int = BAR
) -> Table:
    """Layers with their balancedness, hottest rank and hottest expert."""
    table = _table(focused, f"layer by {order}", "balanced", "", "hottest", "expert")
    layers = sorted_layers(status, order)
    first = shown_from(chosen, len(layers), room)
    for place in range(first, min(first + room, len(layers))):
        layer = layers[place]
        value = status.balancedness_per_layer[layer]
        known = value is not None and layer < len(status.hottest_rank) and status.hottest_rank[layer] >= 0
        colour = "" if value is None else "green" if value > 0.9 else "yellow" if value > 0.75 else "red"
        table.add_row(
            f"layer {layer}",
            number(value),
            Text(bar(value or 0.0, wide), style=colour),
            f"rank {status.hottest_rank[layer]}" if known else "",
            f"{status.hottest_expert[layer]} ({status.hottest_expert_load[layer]:.1%})" if known else "",
            style="reverse" if focused and place == chosen else "",
        )
    if not layers:
        table.add_row("no data yet")
    return table


def ranks_table(
    status: RebalancerStatus, order: str, chosen: int, room: int, focused: bool, wide: int = BAR
) -> Table:
    """Ranks with their load over the mean, silence and rows."""
    table = _table(focused, f"rank by {order}", "load", "", "heard", "step", "rows")
    ranks = sorted_ranks(status, order)
    first = shown_from(chosen, len(ranks), room)
    for place in range(first, min(first + room, len(ranks))):
        rank = ranks[place]
        load = status.rank_load[rank.rank] if rank.rank < len(status.rank_load) else None
        heard = "never" if rank.heard_s_ago is None else f"{rank.heard_s_ago:.1f} s ago"
        table.add_row(
            f"rank {rank.rank}" + (" old" if rank.behind else ""),
            "no data" if load is None else f"{load:.2f}x",
            bar((load or 0.0) / 2, wide),
            "ended" if rank.ended else heard,
            "" if rank.last_step is None else f"{rank.last_step:,}",
            short(rank.tokens),
            style="reverse" if focused and place == chosen else "",
        )
    return table


def layer_detail(
    status: RebalancerStatus, layer: int, found: LayerLoads | None, width: int, room: int
) -> RenderableType:
    """One layer: its ranks, hottest first, beside its experts."""
    known = layer < len(status.balancedness_per_layer)
    value = status.balancedness_per_layer[layer] if known else None
    title = Text(f"Layer {layer}: balancedness {number(value)} in the last interval", style="bold")
    if found is None or found.layer != layer:
        return Group(title, Text("  asking"))
    if not found.rank_load:
        return Group(title, Text("  no counts of this layer in the last interval"))
    rows = max(room - 2, 3)
    ranks = _table(True, "rank", "load", "")
    hottest = sorted(enumerate(found.rank_load), key=lambda one: (-one[1], one[0]))
    for rank, load in hottest[:rows]:
        ranks.add_row(f"rank {rank}", f"{load:.2f}x", bar(load / 2, BAR if width < 120 else 3 * BAR))
    experts = _table(True, "expert", "of the load", "on ranks")
    for one in found.experts[:rows]:
        named = ", ".join(map(str, one.ranks[:6])) + (", ..." if len(one.ranks) > 6 else "")
        experts.add_row(f"expert {one.expert}", f"{one.load:.1%}", named)
    return Group(title, side_by_side(ranks, experts))


def side_by_side(*parts: RenderableType) -> Table:
    """Parts beside each other."""
    grid = Table.grid(padding=(0, 3))
    for _ in parts:
        grid.add_column()
    grid.add_row(*parts)
    return grid


def _table(focused: bool, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold" if focused else "dim")
    for place, column in enumerate(columns):
        right: Sequence[str] = ("balanced", "load", "step", "rows", "heard", "of the load")
        table.add_column(column, justify="right" if place and column in right else "left", no_wrap=True)
    return table


def layer_strip(status: RebalancerStatus, width: int) -> RenderableType:
    """One character per layer (or group of layers): balancedness of the last interval."""
    values = status.balancedness_per_layer
    known = [value for value in values if value is not None]
    if not known:
        return Text("Layers: no data yet")
    worst = min(range(len(values)), key=lambda i: 2.0 if values[i] is None else values[i])  # type: ignore[arg-type, return-value]
    line = Text(f"Layers, worst {worst}: {number(values[worst])}  ", style="bold")
    room = max(width - len(line.plain) - 1, 16)
    groups = min(room, len(values))
    for group in range(groups):
        part = values[group * len(values) // groups : (group + 1) * len(values) // groups]
        lowest = min((value for value in part if value is not None), default=None)
        if lowest is None:
            line.append("·", style="dim")
        else:
            style = "green" if lowest > 0.9 else "yellow" if lowest > 0.75 else "red"
            line.append(BLOCKS[min(int(lowest * len(BLOCKS)), len(BLOCKS) - 1)], style=style)
    return line


def rank_map(ranks: Sequence[RankHealth], width: int, height: int, *, legend: bool = True) -> RenderableType:
    """One cell per rank: shade = steps its counts lag, `v` = an older version, `x` = silent, `?` = never heard.

    More ranks than cells: a cell shows the worst of its neighbours.
    """
    if not ranks:
        return Text("Ranks: none heard yet")
    newest = max((rank.last_step or 0 for rank in ranks), default=0)
    across = max(min(width - 8, 64), 8)
    per_cell = -(-len(ranks) // (across * max(height - 1 - legend, 1)))
    cells = [ranks[start : start + per_cell] for start in range(0, len(ranks), per_cell)]
    behind = sum(rank.behind for rank in ranks)
    silent = sum(rank.heard_s_ago is None or rank.heard_s_ago > SILENT_S for rank in ranks)
    lag = max((newest - (rank.last_step or 0) for rank in ranks), default=0)
    tokens = sum(rank.tokens for rank in ranks)
    many = f"{len(ranks)}" + (f" ({per_cell} a cell)" if per_cell > 1 else "")
    title = (
        f"Ranks: {many}, {behind} on an older version, {silent} silent, counts at most {lag:,} steps apart, "
    )
    title += f"{short(tokens)} tokens stored"
    lines = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    for start in range(0, len(cells), across):
        line = Text(f"{cells[start][0].rank:>6}  ", no_wrap=True)
        for cell in cells[start : start + across]:
            mark, style = max((_mark(rank, newest) for rank in cell), key=lambda found: found[2])[:2]
            line.append(mark, style=style)
        lines.append(line)
    if legend:
        line = Text("        ", no_wrap=True, overflow="ellipsis")
        for low, style in SHADES:
            line.append("■", style=style)
            line.append(f" {low}+ steps  ")
        line.append("v older version  x silent  ? never heard")
        lines.append(line)
    return Group(*lines)


def _mark(rank: RankHealth, newest: int) -> tuple[str, str, int]:
    """Character, style and rank of badness of one rank."""
    if rank.ended:
        return ".", "dim", 0
    if rank.heard_s_ago is None:
        return "?", "bold red", 9
    if rank.heard_s_ago > SILENT_S:
        return "x", "bold red", 8
    if rank.behind:
        return "v", "bold yellow", 7
    lag = newest - (rank.last_step or 0)
    badness = max(place for place, (low, _) in enumerate(SHADES) if lag >= low)
    return "■", SHADES[badness][1], badness
