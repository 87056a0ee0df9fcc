"""The screen of `evenroute top`: one status, and what top itself has seen change."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenroute.dist.wire.control import RankHealth, RebalancerStatus
from evenroute.tools.report.advice import duration
from evenroute.tools.report.text import BLOCKS, number, sparkline
from evenroute.tools.report.words import one_line, short

HISTORY = 240
DECISIONS = 8
SILENT_S = 5.0
# Shade by steps behind the most advanced rank's last stored step.
SHADES = ((0, "green"), (1, "yellow"), (4, "dark_orange"), (16, "red"))


def key_text(key: tuple[int, int]) -> str:
    """(epoch, version) as elsewhere: epoch in hex; "none" before the first."""
    return "none" if key == (0, 0) else f"{key[0]:x}/{key[1]}"


class Screen:
    """What is shown, fed with one status after the other.

    `decisions` are what top saw change: a new version, its arrival everywhere, a failed plan, ranks that came or went.
    """

    def __init__(self) -> None:
        self.balance: deque[float | None] = deque(maxlen=HISTORY)
        self.decisions: deque[tuple[float, str]] = deque(maxlen=DECISIONS)
        self._last: RebalancerStatus | None = None
        self._last_at = 0.0
        self._rates: dict[str, float] = {}
        self.unreachable: str | None = None

    def feed(self, status: RebalancerStatus, now: float) -> None:
        """The next status; ``now`` in seconds since 1970."""
        self.unreachable = None
        if self._last is not None:
            for text in changes(self._last, status):
                self.decisions.append((now, text))
            passed = max(now - self._last_at, 1e-3)
            for name in ("windows_stored",):
                grown = status.counters.get(name, 0) - self._last.counters.get(name, 0)
                self._rates[name] = max(grown, 0) / passed
        self._last, self._last_at = status, now
        self.balance.append(status.balancedness_total)

    def lost(self, reason: str, now: float) -> None:
        """No answer this time."""
        if self.unreachable is None:
            self.decisions.append((now, "no answer"))
        self.unreachable = reason

    def render(self, width: int, height: int) -> RenderableType:
        """The screen for a terminal of this size."""
        status = self._last
        if status is None:
            return Text(self.unreachable or "waiting for the first answer", style="yellow")
        parts: list[RenderableType] = [self._head(status), Text(), self._figures(status, width), Text()]
        used = 15 + len(status.degraded) + DECISIONS + bool(status.last_reason) + bool(status.worth)
        parts += [
            layer_strip(status, width),
            Text(),
            rank_map(status.ranks, width, max(height - used, 3)),
            Text(),
        ]
        parts += [self._decided()]
        return Group(*parts)

    def _head(self, status: RebalancerStatus) -> RenderableType:
        line = Text()
        if self.unreachable:
            line.append("NO ANSWER ", style="bold red")
        elif status.healthy:
            line.append("healthy ", style="bold green")
        else:
            line.append("DEGRADED ", style="bold red")
        line.append(
            f"{status.state}, up {duration(status.uptime_s)}, {one_line(status.address)}, run {status.run:x}"
        )
        reasons = [Text(f"  ! {one_line(reason)}", style="red") for reason in status.degraded]
        return Group(line, *reasons)

    def _figures(self, status: RebalancerStatus, width: int) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column(no_wrap=True)
        heard = [rank for rank in status.ranks if rank.heard_s_ago is not None]
        silence = max((rank.heard_s_ago or 0.0 for rank in heard), default=0.0)
        live = key_text(status.live_lowest)
        if status.live_lowest != status.live_highest:
            live += f" .. {key_text(status.live_highest)} (switching)"
        unit = "s" if status.interval_unit == "seconds" else " windows"
        plan = f"{status.plans_succeeded} made, {sum(status.plan_errors.values())} failed, next in "
        plan += f"{status.until_next_plan:.0f}{unit}"
        if status.paused:
            plan = f"paused; {status.plans_succeeded} made, {sum(status.plan_errors.values())} failed"
        if status.plan_seconds is not None:
            plan += f", last took {status.plan_seconds:.2f} s"
        grid.add_row(
            "job",
            f"{one_line(status.model) or 'unnamed'}: {status.num_layers} layers x "
            f"{status.num_logical_experts} experts, {status.num_slots} slots on {status.ep_size} ranks",
        )
        grid.add_row("version", f"newest {key_text(status.newest)}, in use {live}")
        grid.add_row("held", held_versions(status.ranks))
        grid.add_row("plans", plan)
        if status.last_reason:
            grid.add_row("decision", one_line(status.last_reason))
        if status.worth:
            grid.add_row("worth", one_line(status.worth))
        grid.add_row(
            "windows",
            f"{status.counters.get('windows_stored', 0):,} stored ({self._rates.get('windows_stored', 0.0):.1f}/s), "
            f"lag {status.lag_s:.3f} s, quietest rank {silence:.1f} s" + recording_text(status),
        )
        grid.add_row(
            "balanced",
            f"{number(status.balancedness_total)}, newest plan predicts {number(status.balancedness_predicted)}  "
            + sparkline(list(self.balance), max(min(width - 60, 60), 8)),
        )
        return grid

    def _decided(self) -> RenderableType:
        lines = [Text("Seen since top started", style="bold")]
        for moment, text in self.decisions:
            lines.append(Text(f"  {time.strftime('%H:%M:%S', time.gmtime(moment))} {text}", no_wrap=True))
        if len(lines) == 1:
            lines.append(Text("  nothing changed yet"))
        return Group(*lines)


def recording_text(status: RebalancerStatus) -> str:
    """What runs, and how many ranks take part where they write files of their own; empty without a recording."""
    if not status.recording:
        return ""
    if status.recording_mode in ("", "stat"):
        return ", recording"
    kept = [rank.recording for rank in status.ranks if rank.recording is not None]
    good = sum(part.state == "recording" for part in kept)
    dropped = sum(part.dropped for part in kept)
    text = f", recording {status.recording_mode} on {good:,} ranks"
    return text + (f", {dropped:,} passes dropped" if dropped else "")


def held_versions(ranks: Sequence[RankHealth]) -> str:
    """How many ranks hold which version, newest first."""
    counts = Counter(rank.held for rank in ranks if rank.heard_s_ago is not None)
    newest_first = sorted(counts.items(), reverse=True)
    parts = [f"{key_text(key)} on {count:,}" for key, count in newest_first[:3]]
    older = sum(count for _, count in newest_first[3:])
    if older:
        parts.append(f"older ones on {older:,}")
    return ", ".join(parts) or "no rank heard yet"


def changes(before: RebalancerStatus, after: RebalancerStatus) -> list[str]:
    """What happened between two statuses, in words."""
    found = []
    if after.epoch != before.epoch:
        found.append(f"the rebalancer began a new life, epoch {after.epoch:x}")
    if after.run != before.run:
        found.append(f"another run of the job: {after.run:x}")
    if after.newest > before.newest:
        told = number(after.balancedness_predicted)
        found.append(f"version {key_text(after.newest)} published, predicts {told}")
    if after.settled and not before.settled and after.live_lowest == after.newest:
        found.append(f"version {key_text(after.newest)} is in use on all ranks")
    for kind, count in after.plan_errors.items():
        if count > before.plan_errors.get(kind, 0):
            found.append(f"a plan failed ({kind}): {one_line(after.last_plan_error)}")
    for result, count in after.placements.items():
        grown = count - before.placements.get(result, 0)
        if grown > 0 and result != "published":
            found.append(f"{grown} placement{'s' if grown > 1 else ''}: {result}")
    gone = _silent(after) - _silent(before)
    back = _silent(before) - _silent(after)
    if gone:
        found.append(f"silent: {_names(gone)}")
    if back:
        found.append(f"heard again: {_names(back)}")
    return found


def _silent(status: RebalancerStatus) -> set[int]:
    return {
        rank.rank
        for rank in status.ranks
        if not rank.ended and (rank.heard_s_ago is None or rank.heard_s_ago > SILENT_S)
    }


def _names(ranks: set[int]) -> str:
    listed = sorted(ranks)
    more = f" and {len(listed) - 6} more" if len(listed) > 6 else ""
    return f"rank{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed[:6]))}{more}"


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


def rank_map(ranks: Sequence[RankHealth], width: int, height: int) -> RenderableType:
    """One cell per rank: shade = steps its counts lag, `v` = an older version, `x` = silent, `?` = never heard.

    More ranks than cells: a cell shows the worst of its neighbours.
    """
    if not ranks:
        return Text("Ranks: none heard yet")
    newest = max((rank.last_step or 0 for rank in ranks), default=0)
    across = max(min(width - 8, 64), 8)
    per_cell = -(-len(ranks) // (across * max(height - 2, 1)))
    cells = [ranks[start : start + per_cell] for start in range(0, len(ranks), per_cell)]
    behind = sum(rank.behind for rank in ranks)
    silent = sum(rank.heard_s_ago is None or rank.heard_s_ago > SILENT_S for rank in ranks)
    lag = max((newest - (rank.last_step or 0) for rank in ranks), default=0)
    tokens = sum(rank.tokens for rank in ranks)
    title = f"Ranks: {len(ranks)}, {behind} on an older version, {silent} silent, counts at most {lag:,} steps apart, "
    lines = [Text(title + f"{short(tokens)} tokens stored", style="bold")]
    for start in range(0, len(cells), across):
        line = Text(f"{cells[start][0].rank:>6}  ", no_wrap=True)
        for cell in cells[start : start + across]:
            mark, style = max((_mark(rank, newest) for rank in cell), key=lambda found: found[2])[:2]
            line.append(mark, style=style)
        lines.append(line)
    legend = Text("        ")
    for low, style in SHADES:
        legend.append("■", style=style)
        legend.append(f" {low}+ steps  ")
    legend.append(
        "v older version  x silent  ? never heard" + (f"  {per_cell} a cell" if per_cell > 1 else "")
    )
    return Group(*lines, legend)


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
