"""Whether the counts of an interval are whole enough to plan from. No state."""

from __future__ import annotations

from evenroute.dist.config import PlannerSettings
from evenroute.dist.protocol.receipt import LoadView

_LEAST_COVERAGE = 0.5  # steps that all ranks cover over steps that any covers; below, wait for those behind


def lacking(view: LoadView, settings: PlannerSettings) -> str:
    """What the interval lacks, for people; empty if it can be planned from."""
    if view.missing_ranks:
        return f"no counts of ranks {_short(view.missing_ranks)} in this interval"
    holes = [rank.rank for rank in view.ranks if rank.num_missing]
    if holes:
        return f"windows of ranks {_short(holes)} are missing; the interval is not planned from"
    if settings.interval_unit == "windows" and whole_windows(view) < settings.interval:
        behind = [r.rank for r in view.ranks if r.num_windows < settings.interval]
        return f"windows of ranks {_short(behind)} are not here yet"
    if view.tokens < settings.min_tokens:
        return f"{view.tokens} tokens counted, planner.min_tokens is {settings.min_tokens}"
    if view.coverage < _LEAST_COVERAGE:
        return f"the ranks' windows cover different steps (common part {view.coverage:.2f})"
    return ""


def whole_windows(view: LoadView) -> int:
    """Windows that every reporting rank has delivered."""
    return 0 if view.missing_ranks or not view.ranks else min(rank.num_windows for rank in view.ranks)


def most_windows(view: LoadView) -> int:
    """Windows of the rank that has delivered most."""
    return max((rank.num_windows for rank in view.ranks), default=0)


def _short(ranks: tuple[int, ...] | list[int]) -> str:
    names = ", ".join(map(str, ranks[:8]))
    return names if len(ranks) <= 8 else f"{names} and {len(ranks) - 8} more"
