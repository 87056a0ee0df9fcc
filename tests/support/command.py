"""Runs the `evenroute` command inside the test's process."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from evenroute.tools.cli import main


@dataclass(frozen=True)
class Outcome:
    """Exit status and both streams of one call."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as one JSON value; fails if anything else is on it."""
        return json.loads(self.out)


def evenroute(*arguments: object) -> Outcome:
    """`evenroute ARGUMENTS` without a new process."""
    out, err = io.StringIO(), io.StringIO()
    status: object = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leave:
            status = leave.code
    return Outcome(int(status or 0) if isinstance(status, int | None) else 1, out.getvalue(), err.getvalue())


def evenroute_without(module: str, *arguments: object) -> Outcome:
    """`evenroute ARGUMENTS` in a new process in which `module` cannot be imported."""
    code = f"import sys; sys.modules[{module!r}] = None; from evenroute.tools.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def assert_one_line_error(outcome: Outcome, *parts: str) -> None:
    """Exit status 2, nothing but one line on stderr, which holds all ``parts``."""
    assert outcome.status == 2, outcome
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("evenroute: error: ")
    for part in parts:
        assert part in lines[0], lines[0]
