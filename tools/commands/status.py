"""`evenroute status`: is the control plane healthy? Exit status 0 healthy, 1 degraded, 2 unreachable."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenroute.tools.options import Address
from evenroute.tools.report.words import key_text, membership_text, one_line

if TYPE_CHECKING:
    from evenroute.dist.wire.control import RankHealth, RebalancerStatus

DEGRADED = 1
SILENT_S = 5.0  # a rank that was heard, but not for so long, is silent; as in `evenroute top`


def status(
    address: Address,
    keys: Annotated[Path | None, typer.Option(help="viewer.toml or operator.toml.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the answer.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Ask a rebalancer how it is: state, versions, ranks, planner, counts. Exit 0, 1 degraded, 2 unreachable."""
    from evenroute.dist.client import query_status

    if not timeout > 0:
        raise ValueError(f"--timeout: {timeout:g} found, expected a number above 0")
    found = query_status(address, keys=keys, timeout_s=timeout)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode({"healthy": found.healthy, **msgspec.to_builtins(found)}).decode())
    else:
        typer.echo("\n".join(status_lines(found)))
    raise SystemExit(0 if found.healthy else DEGRADED)


def _share(value: float | None) -> str:
    return "no data" if value is None else f"{value:.4f}"


def status_lines(status: RebalancerStatus) -> list[str]:
    """The status as lines of text."""
    heard = [rank for rank in status.ranks if rank.heard_s_ago is not None]
    ended = sum(rank.ended for rank in status.ranks)
    count = status.counters
    state = "healthy" if status.healthy else "DEGRADED"
    lines = [
        f"{state}, {status.state}, up {status.uptime_s:.0f} s, pid {status.pid}, "
        f"epoch {status.epoch:x}, store {one_line(status.store)}"
    ]
    lines += [f"  ! {one_line(reason)}" for reason in status.degraded]
    if not status.ep_size:
        return [*lines, "job        none heard yet"]
    errors = sum(status.plan_errors.values())
    failed = ", ".join(f"{count} {kind}" for kind, count in sorted(status.plan_errors.items()))
    unit = "s" if status.interval_unit == "seconds" else " windows"
    silence = max((rank.heard_s_ago or 0.0 for rank in heard), default=0.0)
    silent = sum(_is_silent(rank) for rank in heard)
    live = key_text(status.live_lowest)
    if status.live_lowest != status.live_highest:
        live += f" .. {key_text(status.live_highest)} (switching)"
    lines += [
        f"job        {one_line(status.model) or 'unnamed'}: {status.num_layers} layers, "
        f"{status.num_logical_experts} experts in {status.num_slots} slots, {status.ep_size} ranks, run {status.run:x}",
        f"ranks      {len(heard)}/{status.ep_size} heard, {f'{silent} silent, ' if silent else ''}"
        f"{f'{ended} ended, ' if ended else ''}"
        f"the quietest {silence:.1f} s ago",
        *([f"members    {members}"] if (members := membership_text(status.membership)) else []),
        f"version    newest {key_text(status.newest)}, in use {live}"
        + (" (shadow mode: no rank takes a placement up)" if any(rank.shadow for rank in heard) else ""),
        f"planner    {status.plans_succeeded} decisions, {errors} errors{f' ({failed})' if failed else ''}, "
        + (
            "paused"
            if status.paused
            else f"next in {status.until_next_plan:.0f}{unit} of {status.interval:g}{unit}"
        )
        + ("" if status.plan_seconds is None else f", last took {status.plan_seconds:.2f} s"),
        f"balance    {_share(status.balancedness_total)} in the last interval, newest plan predicts "
        f"{_share(status.balancedness_predicted)}",
        *([f"decision   {one_line(status.last_reason)}"] if status.last_reason else []),
        f"costs      {one_line(status.costs)}",
        f"worth      {one_line(status.worth) or 'not known before steps were measured'}",
        f"windows    {count.get('windows_stored', 0)} stored, {count.get('windows_duplicate', 0)} duplicate, "
        f"{count.get('windows_missing', 0)} missing, {count.get('windows_rejected', 0)} rejected",
        f"recording  {recording_text(status)}",
    ]
    if status.last_plan_error:
        lines.append(f"last error {one_line(status.last_plan_error)}")
    lines += _rank_lines(status)
    return lines


def recording_text(status: RebalancerStatus) -> str:
    """Whether a recording runs, its mode, and how it goes on the ranks."""
    text = "on" if status.recording else "off"
    if status.recording and status.recording_per_rank:
        text += " per rank"
    if status.recording_mode in ("", "stat"):
        return text
    kept = [rank.recording for rank in status.ranks if rank.recording is not None]
    states = Counter(part.state for part in kept)
    what = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no rank reported yet"
    last = "" if status.recording else "the last was "
    text += f", {last}{status.recording_mode} {one_line(status.recording_name)}: ranks {what}"
    text += f"; {sum(part.passes for part in kept):,} passes, {sum(part.num_bytes for part in kept):,} bytes"
    dropped = sum(part.dropped for part in kept)
    return text + (f", {dropped:,} passes dropped" if dropped else "")


def _recorded(rank: RankHealth) -> str:
    """What a rank's part in a recording of passes has come to; empty without one."""
    kept = rank.recording
    if kept is None:
        return ""
    text = f", {kept.state}: {kept.passes:,} passes"
    text += f", {kept.dropped:,} dropped" if kept.dropped else ""
    return text + (f" ({one_line(kept.reason)})" if kept.reason else "")


def _rank_lines(status: RebalancerStatus) -> list[str]:
    """One line for each rank with something to tell; all of them in a small job."""
    lines = []
    for rank in status.ranks:
        if len(status.ranks) > 16 and not (
            rank.behind or rank.missing_windows or _is_silent(rank) or _odd(rank)
        ):
            continue
        seen = (
            "ended"
            if rank.ended
            else "never heard"
            if rank.heard_s_ago is None
            else f"heard {rank.heard_s_ago:.1f} s ago"
        )
        data = "no counts yet"
        if rank.first_step is not None:
            data = f"counts of steps {rank.first_step}..{rank.last_step} in {rank.last_seq} windows"
            data += f", {rank.missing_windows} missing" if rank.missing_windows else ", none missing"
        lines.append(
            f"  rank {rank.rank}: {seen}, holds {key_text(rank.held)}{' (behind)' if rank.behind else ''}, {data}"
            f"{_recorded(rank)}"
        )
    return lines


def _is_silent(rank: RankHealth) -> bool:
    return not rank.ended and (rank.heard_s_ago is None or rank.heard_s_ago > SILENT_S)


def _odd(rank: RankHealth) -> bool:
    kept = rank.recording
    return kept is not None and bool(kept.dropped or kept.reason)
