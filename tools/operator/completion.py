"""`evenroute completion SHELL`: the script that lets a shell complete commands and flags."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer

SHELLS = ("bash", "zsh", "fish")


def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
) -> None:
    """Print a script for tab completion: eval "$(evenroute completion bash)" in ~/.bashrc; zsh alike, after compinit.

    In fish: evenroute completion fish | source.
    """
    if shell not in SHELLS:
        raise ValueError(f"SHELL: {shell!r} found, expected {', '.join(SHELLS)}")
    # Typer writes it, in a process that is asked by its environment as the shell will ask.
    environment = {**os.environ, "_EVENROUTE_COMPLETE": f"source_{shell}"}
    done = subprocess.run(
        [sys.executable, "-m", "evenroute.tools.cli"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    typer.echo(done.stdout.strip())
