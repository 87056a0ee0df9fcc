"""`evenroute launch -- COMMAND`: the ranks of a job whose ranks come and go, on this host."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from evenroute.tools.errors import fail

_LOOK_S = 0.02
_ASK_S = 1.0

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}


def launch(
    command: Annotated[list[str], typer.Argument(help="What each rank runs, behind `--`.")],
    ranks: Annotated[int, typer.Option(min=1, max=4096, help="Processes to start.")],
    rebalancer: Annotated[
        str, typer.Option(help="Address of the job's rebalancer, which decides who is in it.")
    ],
    keys: Annotated[Path | None, typer.Option(help="rank.toml, to tell it of processes that ended.")] = None,
    operator_keys: Annotated[
        Path | None, typer.Option(help="operator.toml or viewer.toml, to ask it.")
    ] = None,
    join: Annotated[bool, typer.Option(help="They join a job that serves.")] = False,
) -> None:
    """Start the ranks of a job whose ranks come and go, on this host: a rank that dies leaves the others alone.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun does. When `evenroute scale` wants more
    ranks than live, more are started, and join. Ends when all have: exit status 0 if one ended as it should.
    """
    from evenroute.tools.elastic.launcher import Launcher

    try:
        launcher = Launcher(
            command, rebalancer=rebalancer, keys=keys, say=lambda text: typer.echo(text, err=True)
        )
    except ValueError as error:
        fail(f"launch: {error}")
    stopped: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        if join:
            for _ in range(ranks):
                launcher.join()
        else:
            launcher.start(ranks)
        asked_at = time.monotonic()
        while launcher.living() and not stopped:
            launcher.poll()
            if time.monotonic() - asked_at >= _ASK_S:
                asked_at = time.monotonic()
                for _ in range(launcher.lacking(rebalancer, operator_keys)):
                    launcher.join()
            time.sleep(_LOOK_S)
        launcher.poll()
        status = 1 if stopped else launcher.status()
    except OSError as error:
        fail(f"launch: {command[0]}: {error.strerror or error}")
    finally:
        launcher.close()
    raise typer.Exit(status)
