"""`evenroute trace ADDR -o switch.json`: what all ranks did for switches, on one time line."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evenroute.tools.options import Address

if TYPE_CHECKING:
    from evenroute.dist.wire.tracing import TraceReport

# Rows of a rank: what overlaps in time stands apart.
_ROWS = {"switch": 1, "vote": 2, "open": 3, "commit": 3, "discard": 3}
_TRANSFER_ROW = 10
_NO_RANK = 65535  # behind the last one: who is missing, and no report
_NAMES = {1: "switches", 2: "votes", 3: "open and commit"}


def trace(
    address: Address,
    output: Annotated[Path, typer.Option("--output", "-o", help="Trace file; open it at ui.perfetto.dev.")],
    keys: Annotated[Path | None, typer.Option(help="viewer.toml or operator.toml.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for all ranks.")] = 10.0,
) -> None:
    """Write votes, openings, transfers and commits of the last switches, on all ranks, for ui.perfetto.dev.

    Times are each rank's own clock. A transfer ends at the vote that sees it, up to a period late.
    """
    from evenroute.eplb._io import write_beside_and_rename
    from evenroute.tools.errors import check_output

    check_output("--output", output)
    if not 0 < timeout <= 3600:
        raise ValueError(f"--timeout: {timeout:g} found, expected above 0 and at most 3600")
    reports, missing = collect(address, keys, timeout)
    if not any(report.events for report in reports):
        raise ValueError(f"{address}: no rank has switched yet; ask again after the next placement")
    write_beside_and_rename(output, json.dumps(perfetto(reports), separators=(",", ":")).encode())
    found = [event for report in reports for event in report.events]
    switches = sum(event.name == "switch" for event in found)
    typer.echo(f"{output}: {len(found):,} events of {len(reports):,} ranks, {switches:,} switches of a rank")
    if missing:
        typer.echo(
            f"not heard in time: {len(missing):,} ranks ({', '.join(map(str, missing[:8]))})", err=True
        )
        raise SystemExit(1)


def collect(address: str, keys: Path | None, timeout: float) -> tuple[list[TraceReport], list[int]]:
    """What the ranks report, in rank order, and the ranks that did not within ``timeout`` seconds."""
    from evenroute.dist.client import ControlClient, RefusedError
    from evenroute.dist.wire.control import Refused
    from evenroute.dist.wire.tracing import TraceAnswer, TraceRequest

    number = secrets.randbits(62)
    deadline = time.monotonic() + timeout
    with ControlClient(address, keys=keys, timeout_s=timeout) as client:

        def ask(offset: int) -> TraceAnswer:
            answer = client.ask(TraceRequest(number, offset))
            if not isinstance(answer, TraceAnswer):
                raise RefusedError(answer.reason if isinstance(answer, Refused) else "unexpected answer")
            return answer

        while (missing := ask(_NO_RANK).missing) and time.monotonic() < deadline:
            time.sleep(0.1)
        reports: list[TraceReport] = []
        offset: int | None = 0
        while offset is not None:
            answer = ask(offset)
            reports += answer.reports
            offset = answer.next_offset
    return reports, missing


def perfetto(reports: Iterable[TraceReport]) -> dict[str, Any]:
    """JSON of Chrome's trace event format, which Perfetto opens: a process a rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    for report in reports:
        for name, value in (("name", f"rank {report.rank}"), ("sort_index", report.rank)):
            told = {"name": f"process_{name}", "ph": "M", "pid": report.rank, "tid": 0, "args": {name: value}}
            events.append(told)
        rows: dict[int, str] = {}
        busy: list[float] = []  # until when each row of transfers is taken
        for event in sorted(report.events, key=lambda one: one.began):
            row = _ROWS.get(event.name)
            if row is None:
                place = next((place for place, until in enumerate(busy) if until <= event.began), len(busy))
                busy[place : place + 1] = [event.began + event.seconds]
                row = _TRANSFER_ROW + place
            rows.setdefault(row, _NAMES.get(row, "transfers"))
            title = event.name if event.layer < 0 else f"{event.name} layer {event.layer}"
            args: dict[str, Any] = {"step": event.step}
            if event.layer >= 0:
                args["layer"] = event.layer
            if event.name in ("vote", "switch"):
                args["vote" if event.name == "vote" else "version"] = event.number
            span = {
                "name": title,
                "cat": event.name,
                "ph": "X",
                "ts": event.began * 1e6,
                "dur": event.seconds * 1e6,
            }
            events.append({**span, "pid": report.rank, "tid": row, "args": args})
        events += [
            {"name": "thread_name", "ph": "M", "pid": report.rank, "tid": row, "args": {"name": name}}
            for row, name in rows.items()
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}
