"""`evenroute record start|stop|dump`: keep single windows or passes for a while, and fetch or find what was kept."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenroute.tools.errors import check_output
from evenroute.tools.options import Address
from evenroute.tools.report.words import one_line, short

if TYPE_CHECKING:
    from evenroute.dist.wire.control import RankHealth, RankRecording, RebalancerStatus

MODES = ("stat", "per_pass", "per_token")
_LISTED = 16
_OVER = {"ended", "refused", "failed", "lost"}
_SILENT_S = 2.0  # ranks report every half second or more often

Keys = Annotated[Path | None, typer.Option(help="operator.toml (dump: viewer.toml will do).")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]
Mode = Annotated[
    str,
    typer.Option(
        help="stat: windows, kept by the rebalancer. per_pass: counts of every pass too; per_token: the experts of "
        "every token too; both in files that each rank writes into its agent.record_dir."
    ),
]
Name = Annotated[str, typer.Option(help="Of the ranks' files, NAME-rank0.evd ...; default: the time in UTC.")]

HELP = "Record windows or single passes: start, stop, dump."


def start(
    address: Address,
    mode: Mode = "stat",
    name: Name = "",
    per_rank: Annotated[bool, typer.Option("--per-rank", help="Keep each rank's windows too.")] = False,
    keys: Keys = None,
    timeout: Timeout = 5.0,
) -> None:
    """Begin a recording; refused while one runs. Exit status 1 if some rank does not record."""
    from evenroute.dist.client import command
    from evenroute.dist.wire.control import RecordStart

    check_start(mode, name)
    request = RecordStart(per_rank=per_rank, mode=mode, name=name)  # type: ignore[arg-type]
    typer.echo(command(address, request, keys=keys, timeout_s=timeout))
    if mode != "stat":
        raise typer.Exit(started(address, keys, timeout))


def stop(address: Address, keys: Keys = None, timeout: Timeout = 5.0) -> None:
    """End the recording; it can still be dumped. Exit status 1 if some rank's files are not finished."""
    from evenroute.dist.client import command
    from evenroute.dist.wire.control import RecordStop

    typer.echo(command(address, RecordStop(), keys=keys, timeout_s=timeout))
    raise typer.Exit(stopped(address, keys, timeout))


def dump(
    address: Address,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write, whole or not at all.")
    ] = None,
    rank: Annotated[int | None, typer.Option(help="One rank's windows instead of the job's.")] = None,
    keys: Keys = None,
    timeout: Timeout = 30.0,
) -> None:
    """Write the recorded windows, running or ended, as a dump that `evenroute inspect` and `replay` read.

    Of a recording of passes it also says where the ranks' own files are; without -o it says only that.
    """
    from evenroute.dist.client import query_status

    check_output("-o", output)
    status = query_status(address, keys=keys, timeout_s=timeout)
    if output is None and status.recording_mode in ("", "stat"):
        raise ValueError("-o: missing, expected the file to write the windows to")
    if output is not None:
        number, tokens = write_dump(address, output, rank=rank, keys=keys, timeout_s=timeout)
        typer.echo(f"{output}: {number} windows, {tokens} tokens")
    for line in [*summary_lines(status), *rank_lines(status)]:
        typer.echo(line)


SUBCOMMANDS = (start, stop, dump)


def check_start(mode: str, name: str) -> None:
    """ValueError where the options of `start` cannot be meant."""
    from evenroute.dist.wire.recording import NAME_RULE, is_name

    if mode not in MODES:
        raise ValueError(f"--mode {mode!r}, expected one of {', '.join(MODES)}")
    if name and mode == "stat":
        raise ValueError(f"--name {name!r}: only with --mode per_pass or per_token, whose ranks write files")
    if name and not is_name(name):
        raise ValueError(f"--name {name!r}, expected {NAME_RULE}")


def started(address: str, keys: Path | None, timeout_s: float) -> int:
    """Wait until every rank has said whether it records; the exit status. One without a recording rank is ended."""
    from evenroute.dist.client import command
    from evenroute.dist.wire.control import RecordStop

    known = {"recording", "ended", "refused", "failed", "lost"}
    status = _wait(address, keys, timeout_s, lambda rank: _state(rank) in known)
    ranks = _recorders(status)
    good = [rank for rank in ranks if _state(rank) in ("recording", "ended")]
    if good and len(good) == len(ranks):
        typer.echo(f"{len(good)} ranks record; {_place(good[0])} ...")
        return 0
    for line in rank_lines(status, only_bad=True):
        typer.echo(line, err=True)
    if not any(_state(rank) in ("", "starting", "recording", "ended") for rank in ranks):
        command(address, RecordStop(), keys=keys, timeout_s=timeout_s)
        raise ValueError("no rank records, so the recording was ended; the reasons are above")
    typer.echo(f"{len(good)} of {len(ranks)} ranks record")
    return 1


def stopped(address: str, keys: Path | None, timeout_s: float) -> int:
    """After a recording of passes: wait for the ranks' files and list them; the exit status."""
    from evenroute.dist.client import query_status

    status = query_status(address, keys=keys, timeout_s=timeout_s)
    if status.recording_mode in ("", "stat"):
        return 0
    status = _wait(address, keys, timeout_s, lambda rank: _state(rank) in _OVER)
    for line in [*summary_lines(status), *rank_lines(status)]:
        typer.echo(line)
    return 0 if all(_state(rank) == "ended" for rank in _recorders(status)) else 1


def _recorders(status: RebalancerStatus) -> list[RankHealth]:
    """The ranks that are to record: all, or rank 0 where all see the same tokens."""
    return status.ranks[:1] if status.shared_counts else status.ranks


def _state(rank: RankHealth) -> str:
    return "" if rank.recording is None else rank.recording.state


def _wait(
    address: str, keys: Path | None, timeout_s: float, done: Callable[[RankHealth], bool]
) -> RebalancerStatus:
    """The status once all ranks are `done`, or the last one before the limit."""
    from evenroute.dist.client import ControlClient

    deadline = time.monotonic() + timeout_s
    with ControlClient(address, keys=keys, timeout_s=timeout_s) as client:
        while True:
            status = client.status()
            if all(map(done, _recorders(status))) or time.monotonic() > deadline:
                return status
            time.sleep(0.1)


def _place(rank: RankHealth) -> str:
    assert rank.recording is not None
    return f"{one_line(rank.recording.host)}:{one_line(rank.recording.path)}"


def summary_lines(status: RebalancerStatus) -> list[str]:
    """How many ranks ended their recording of passes, and what to do about those that never did; empty if all did."""
    if status.recording_mode in ("", "stat"):
        return []
    ranks = _recorders(status)
    if not ranks:
        name = one_line(status.recording_name)
        return [f"no rank is heard: their files are {name}-rank*.evd in the agent.record_dir of each"]
    states = Counter(_state(rank) or "not heard of" for rank in ranks)
    running = status.recording and states.keys() <= {"recording", "starting"}
    if running or states.keys() <= {"ended"}:
        return []
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    lines = [f"of {len(ranks)} ranks: {counted}"]
    if any(_never_ended(rank, status) for rank in ranks):
        lines.append(
            "finished files are whole; what else a rank wrote stays in its folder as "
            f".{one_line(status.recording_name)}-rank*.partial, which `evenroute inspect --unfinished FOLDER` reads up "
            "to the last whole record"
        )
    return lines


def _never_ended(rank: RankHealth, status: RebalancerStatus) -> bool:
    state = _state(rank)
    return state == "lost" or (not status.recording and state not in _OVER)


def _heard(rank: RankHealth) -> str:
    return "never heard" if rank.heard_s_ago is None else f"last heard {rank.heard_s_ago:.0f} s ago"


def _rank_line(rank: RankHealth, status: RebalancerStatus) -> str:
    kept = rank.recording
    if kept is None:
        if not status.recording or rank.heard_s_ago is None or rank.heard_s_ago > _SILENT_S:
            return f"rank {rank.rank}: {_heard(rank)}, what it recorded is not known here"
        return f"rank {rank.rank}: no answer (is it of an older evenroute version?)"
    text = f"rank {rank.rank}: {kept.state}"
    never = _never_ended(rank, status)
    if never and kept.state != "lost":
        text += f", did not end ({_heard(rank)})"
    if kept.path:
        text += ", last told:" if never else ","
        text += f" {kept.passes:,} passes, {kept.tokens:,} tokens, {short(kept.num_bytes)}B in "
        text += f"{kept.files} file{'s' if kept.files != 1 else ''}, {_place(rank)}"
        text += f" and what follows it; unfinished: {_partial_names(kept)}" if never else ""
    text += f", {kept.dropped:,} passes dropped" if kept.dropped else ""
    text += f", {kept.merged:,} merged with the pass before" if kept.merged else ""
    return text + (f": {one_line(kept.reason)}" if kept.reason else "")


def _partial_names(kept: RankRecording) -> str:
    """The hidden names of what a rank was writing; which part it was at its end is not known."""
    return f".{Path(one_line(kept.path)).name.removesuffix('.evd')}*.partial"


def rank_lines(status: RebalancerStatus, *, only_bad: bool = False) -> list[str]:
    """One line for each rank of a recording of passes; of many ranks those with something to tell come first."""
    if status.recording_mode in ("", "stat"):
        return []
    found: list[tuple[bool, str]] = []
    for rank in _recorders(status):
        kept = rank.recording
        good = kept is not None and not (kept.dropped or kept.reason or _never_ended(rank, status))
        odd = kept is None or not good or kept.state not in ("recording", "ended")
        found.append((odd, _rank_line(rank, status)))
    found.sort(key=lambda line: not line[0])
    wanted: Sequence[str] = [text for odd, text in found if odd or not only_bad]
    left = len(wanted) - _LISTED
    return [*wanted[:_LISTED], *([f"... and {left} more ranks"] if left > 0 else [])]


def write_dump(
    address: str, output: Path, *, rank: int | None, keys: Path | None, timeout_s: float
) -> tuple[int, int]:
    """Fetch a recording and write it; returns the number of windows and of tokens."""
    import msgspec
    import numpy as np

    from evenroute.dist.client import read_recording
    from evenroute.eplb._fields import JOB_FIELDS, named
    from evenroute.eplb.dump.format import DumpHeader
    from evenroute.eplb.dump.writer import DumpWriter
    from evenroute.eplb.loads.source import LoadWindow, Scope

    parts = read_recording(address, rank=rank, keys=keys, timeout_s=timeout_s)
    first = next(parts)
    shape = (first.num_layers, first.num_logical_experts)
    scope: Scope = "job" if rank is None else "rank"
    header = DumpHeader(scope=scope, rank=rank, **named(JOB_FIELDS, first))
    number = tokens = 0
    with DumpWriter(output, header, replaces_left=True) as writer:
        for window in (window for part in itertools.chain((first,), parts) for window in part.windows):
            counts = np.frombuffer(window.counts, "<i8").reshape(shape)
            writer.add_window(LoadWindow(**{**msgspec.structs.asdict(window), "counts": counts}))
            number, tokens = number + 1, tokens + window.tokens
        return number, tokens
