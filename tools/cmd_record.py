"""`evenroute record start|stop|dump`: keep single windows for a while, and fetch them as a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evenroute.tools.errors import one_line_errors

Address = Annotated[str, typer.Argument(help="ipc://PATH or tcp://HOST:PORT of the rebalancer.")]
Keys = Annotated[Path | None, typer.Option(help="operator.toml (dump: viewer.toml will do).")]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for an answer.")]


def register(app: typer.Typer) -> None:
    """Add the command with its three subcommands."""
    record = typer.Typer(help="Record single windows of counts: start, stop, dump.", no_args_is_help=True)
    app.add_typer(record, name="record")

    @record.command()
    @one_line_errors
    def start(
        address: Address,
        per_rank: Annotated[bool, typer.Option("--per-rank", help="Keep each rank's windows too.")] = False,
        keys: Keys = None,
        timeout: Timeout = 5.0,
    ) -> None:
        """Begin a recording; refused while one runs."""
        from evenroute.dist.control import RecordStart
        from evenroute.dist.status import command

        typer.echo(command(address, RecordStart(per_rank=per_rank), keys=keys, timeout_s=timeout))

    @record.command()
    @one_line_errors
    def stop(address: Address, keys: Keys = None, timeout: Timeout = 5.0) -> None:
        """End the recording; it can still be dumped."""
        from evenroute.dist.control import RecordStop
        from evenroute.dist.status import command

        typer.echo(command(address, RecordStop(), keys=keys, timeout_s=timeout))

    @record.command()
    @one_line_errors
    def dump(
        address: Address,
        output: Annotated[Path, typer.Option("-o", "--output", help="File to write, whole or not at all.")],
        rank: Annotated[int | None, typer.Option(help="One rank's windows instead of the job's.")] = None,
        keys: Keys = None,
        timeout: Timeout = 30.0,
    ) -> None:
        """Write what was recorded, running or ended, as a dump that `evenroute inspect` and `replay` read."""
        number, tokens = write_dump(address, output, rank=rank, keys=keys, timeout_s=timeout)
        typer.echo(f"{output}: {number} windows, {tokens} tokens")


def write_dump(
    address: str, output: Path, *, rank: int | None, keys: Path | None, timeout_s: float
) -> tuple[int, int]:
    """Fetch a recording and write it; returns the number of windows and of tokens."""
    import numpy as np

    from evenroute.dist.status import read_recording
    from evenroute.eplb.dump_format import DumpHeader
    from evenroute.eplb.dump_writer import DumpWriter
    from evenroute.eplb.foreign_source import Window

    parts = read_recording(address, rank=rank, keys=keys, timeout_s=timeout_s)
    first = next(parts)
    shape = (first.num_layers, first.num_logical_experts)
    header = DumpHeader(
        num_layers=first.num_layers,
        num_logical_experts=first.num_logical_experts,
        scope="job" if rank is None else "rank",
        rank=rank,
        ep_size=first.ep_size,
        num_nodes=first.num_nodes,
        num_slots=first.num_slots,
        top_k=first.top_k,
        model=first.model,
    )
    number = tokens = 0
    with DumpWriter(output, header) as writer:
        part = first
        while True:
            for window in part.windows:
                counts = np.frombuffer(window.counts, "<i8").reshape(shape)
                writer.add_window(
                    Window(
                        counts=counts,
                        time=window.time,
                        first_step=window.first_step,
                        last_step=window.last_step,
                        tokens=window.tokens,
                        complete=window.complete,
                    )
                )
                number, tokens = number + 1, tokens + window.tokens
            following = next(parts, None)
            if following is None:
                return number, tokens
            part = following
