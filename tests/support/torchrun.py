"""Runs a module on several ranks, with a time limit, and hands back what it said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def start_torchrun(ranks: int, *words: str, script: Path | None = None) -> subprocess.Popen[str]:
    """Starts `torchrun --standalone` in a process group of its own; `script` instead of the stress module."""
    target = [str(script)] if script is not None else ["-m", "evenroute.tools.stress"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, *target, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end_group(process: subprocess.Popen[str]) -> None:
    """Ends what is left of it, the ranks too: for a test that fails before `finish`."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)


def finish(process: subprocess.Popen[str], limit_s: float) -> tuple[int, str, str]:
    """(exit status, stdout, stderr); kills the whole process group when the limit passes."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(
            f"not done after {limit_s} s; stdout: {out[-2000:]} stderr: {err[-3000:]}"
        ) from None
    return process.returncode, out, err
