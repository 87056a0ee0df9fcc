"""What tests of the rebalancer's process from outside share."""

import subprocess
import sys
import time

from evenroute.dist.wire.messages import JobShape
from support.control_plane import (
    LEAST_WAIT_S,
    child_environment,
)

JOB = JobShape(3, 8, 12, 4, 1, 2, False, "outside")
FLAGS = ["--interval", "3600", "--planner", "support.stub_planner:plan"]


def run(*words, limit_s=120, **options):
    """`evenroute ...` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "evenroute.tools.cli", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=child_environment(),
        **options,
    )


def refused(found, *texts):
    assert found.returncode == 2, found
    assert found.stderr.count("\n") == 1, found.stderr
    assert "Traceback" not in found.stderr
    for text in texts:
        assert text in found.stderr, found.stderr


def turn_until(job, condition, what):
    deadline = time.monotonic() + LEAST_WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LEAST_WAIT_S} s"
        job.turn(0.01)


def stored(job):
    return sum(rank.stored for rank in job.ranks)
