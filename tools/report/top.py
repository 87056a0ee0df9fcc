"""The screen of `evenroute top`: one status, and what top itself has seen change."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from evenroute.dist.wire.control import LayerLoads, RankHealth, RebalancerStatus
from evenroute.tools.report.advice import duration
from evenroute.tools.report.text import number, sparkline
from evenroute.tools.report.top_tables import (
    BAR,
    LAYER_SORTS,
    RANK_SORTS,
    SILENT_S,
    layer_detail,
    layer_strip,
    layers_table,
    rank_map,
    ranks_table,
    side_by_side,
    sorted_layers,
)
from evenroute.tools.report.words import key_text, membership_text, one_line

HISTORY = 240
DECISIONS = 8


class Screen:
    """What is shown, fed with one status after the other.

    `decisions` are what top saw change: a new version, its arrival everywhere, a failed plan, ranks that came or went.
    """

    def __init__(self, *, takes_keys: bool = True) -> None:
        self.takes_keys = takes_keys
        self.balance: deque[float | None] = deque(maxlen=HISTORY)
        self.decisions: deque[tuple[float, str]] = deque(maxlen=DECISIONS)
        self._last: RebalancerStatus | None = None
        self._last_at = 0.0
        self._rate = 0.0  # windows stored a second
        self.unreachable: str | None = None
        self.layer: int | None = None  # shown by itself
        self.detail: LayerLoads | None = None
        self._on_layers = True
        self._chosen = self._layer_sort = self._rank_sort = 0

    def feed(self, status: RebalancerStatus, now: float) -> None:
        """The next status; ``now`` in seconds since 1970."""
        self.unreachable = None
        if self._last is not None:
            for text in changes(self._last, status):
                self.decisions.append((now, text))
            passed = max(now - self._last_at, 1e-3)
            stored = status.counters.get("windows_stored", 0)
            self._rate = max(stored - self._last.counters.get("windows_stored", 0), 0) / passed
        self._last, self._last_at = status, now
        self.balance.append(status.balancedness_total)

    def lost(self, reason: str, now: float) -> None:
        """No answer this time."""
        if self.unreachable is None:
            self.decisions.append((now, "no answer"))
        self.unreachable = reason

    @property
    def healthy(self) -> bool:
        """Whether the last status was."""
        return self._last is not None and self._last.healthy

    @property
    def asks(self) -> bool:
        """Whether a layer is to be shown whose loads are not known yet."""
        return self.layer is not None and (self.detail is None or self.detail.layer != self.layer)

    def key(self, name: str) -> bool:
        """A key was pressed; False when it ends the screen."""
        if name in ("q", "ctrl-c"):
            return False
        status = self._last
        layers = [] if status is None else sorted_layers(status, LAYER_SORTS[self._layer_sort])
        if self.layer is not None:
            if name in ("escape", "left", "backspace"):
                self.layer, self.detail = None, None
            elif name in ("up", "down") and layers:
                self.layer = (self.layer + (1 if name == "down" else -1)) % len(layers)
            return True
        many = len(layers) if self._on_layers else len(status.ranks) if status is not None else 0
        jump = {"up": -1, "down": 1, "page-up": -10, "page-down": 10, "home": -many, "end": many}.get(name)
        if jump is not None:
            self._chosen = max(0, min(self._chosen + jump, many - 1))
        elif name in ("tab", "left", "right"):
            self._on_layers, self._chosen = not self._on_layers, 0
        elif name == "s":
            self._chosen = 0
            if self._on_layers:
                self._layer_sort = (self._layer_sort + 1) % len(LAYER_SORTS)
            else:
                self._rank_sort = (self._rank_sort + 1) % len(RANK_SORTS)
        elif name == "enter" and self._on_layers and self._chosen < len(layers):
            self.layer = layers[self._chosen]
        return True

    def render(self, width: int, height: int) -> RenderableType:
        """The screen for a terminal of this size."""
        status = self._last
        if status is None:
            return Text(self.unreachable or "waiting for the first answer", style="yellow")
        if not status.ep_size:
            told = "waiting for a job: no rank has been heard; ranks find it by AgentConfig(rebalancer=...)"
            return Group(self._head(status), Text(), Text(told, style="yellow"), *self._help())
        figures = self._figures(status, width, short=height < 36)
        head = 1 + len(status.degraded) + figures.row_count
        airy = height >= 36
        map_room = max(min(height // 8, 1 + -(-len(status.ranks) // 64) + airy), 2 + airy)
        decided = min(DECISIONS, max(2, height // 8))
        gaps = 5 if airy else 1
        room = max(height - head - gaps - map_room - decided - 4, 3)
        gap = [Text()] if airy else []
        parts: list[RenderableType] = [self._head(status), *gap, figures, Text()]
        if self.layer is not None:
            parts.append(layer_detail(status, self.layer, self.detail, width, room + map_room + 2))
        else:
            parts += [self._tables(status, width, room), *gap, layer_strip(status, width), *gap]
            parts += [rank_map(status.ranks, width, map_room, legend=airy), *gap]
        return Group(*parts, self._decided(decided - 1), *self._help())

    def _tables(self, status: RebalancerStatus, width: int, room: int) -> RenderableType:
        on_layers, chosen = self._on_layers, self._chosen
        wide = 2 * BAR if width >= 160 else BAR
        layers = layers_table(
            status, LAYER_SORTS[self._layer_sort], chosen if on_layers else 0, room, on_layers, wide
        )
        ranks = ranks_table(
            status, RANK_SORTS[self._rank_sort], 0 if on_layers else chosen, room, not on_layers, wide
        )
        if width < 110:  # one at a time
            return layers if on_layers else ranks
        return side_by_side(layers, ranks)

    def _help(self) -> list[Text]:
        if not self.takes_keys:
            return []
        if self.layer is not None:
            keys = "q quit  up/down another layer  esc back"
        else:
            keys = "q quit  up/down choose  enter layer  s sort  tab ranks or layers"
        return [Text(keys, style="dim", no_wrap=True, overflow="ellipsis")]

    def _head(self, status: RebalancerStatus) -> RenderableType:
        line = Text()
        if self.unreachable:
            line.append("NO ANSWER ", style="bold red")
        elif status.healthy:
            line.append("healthy ", style="bold green")
        else:
            line.append("DEGRADED ", style="bold red")
        line.append(
            f"{status.state}, up {duration(status.uptime_s)}, {one_line(status.address)}"
            + (f", run {status.run:x}" if status.run else "")
        )
        reasons = [Text(f"  ! {one_line(reason)}", style="red") for reason in status.degraded]
        return Group(line, *reasons)

    def _figures(self, status: RebalancerStatus, width: int, *, short: bool) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True, min_width=8)
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
        if status.membership.state:
            grid.add_row("members", membership_text(status.membership))
        grid.add_row("version", f"newest {key_text(status.newest)}, in use {live}")
        if not short or len({rank.held for rank in status.ranks}) > 1:
            grid.add_row("held", held_versions(status.ranks))
        grid.add_row("plans", plan)
        if status.last_reason:
            grid.add_row("decision", one_line(status.last_reason))
        if status.worth:
            grid.add_row("worth", one_line(status.worth))
        grid.add_row(
            "windows",
            f"{status.counters.get('windows_stored', 0):,} stored ({self._rate:.1f}/s), "
            f"lag {status.lag_s:.3f} s, quietest rank {silence:.1f} s" + recording_text(status),
        )
        grid.add_row(
            "balanced",
            f"{number(status.balancedness_total)}, newest plan predicts {number(status.balancedness_predicted)}  "
            + sparkline(list(self.balance), max(min(width - 60, 120), 8)),
        )
        return grid

    def _decided(self, most: int) -> RenderableType:
        lines = [Text("Seen since top started", style="bold")]
        for moment, text in list(self.decisions)[-most:]:
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
    if after.membership.number != before.membership.number:
        found.append(membership_text(after.membership))
    elif after.run != before.run:
        found.append(f"another run of the job: {after.run:x}")
    if after.newest > before.newest:
        predicted = number(after.balancedness_predicted)
        found.append(f"version {key_text(after.newest)} published, predicts {predicted}")
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
