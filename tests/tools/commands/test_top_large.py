"""`evenroute top` follows 1,024 simulated ranks of a real rebalancer at 1 Hz. Slow."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evenroute.dist.wire.messages import JobShape
from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import RebalancerProcess, child_environment

FLAGS = ["--interval", "3600", "--planner", "support.stub_planner:plan"]
RANKS, FRAMES = 1024, 15


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_1024_ranks_at_1_hz(tmp_path: Path) -> None:
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        job = SimulatedJob(
            rebalancer.address, JobShape(58, 256, 1024, RANKS, 1, 8, False, "large"), period_s=10.0
        )
        ending = threading.Event()

        def keep_turning() -> None:
            while not ending.is_set():
                job.turn(0.05)

        job.start(120)
        turning = threading.Thread(target=keep_turning)
        turning.start()
        try:
            began = time.monotonic()
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "evenroute.tools.cli", "top", rebalancer.address),
                    *("--frames", str(FRAMES), "--interval", "1", "--timeout", "10"),
                ],
                capture_output=True,
                text=True,
                timeout=120,
                env=child_environment(),
            )
            spent = time.monotonic() - began
        finally:
            ending.set()
            turning.join()
            job.close()
    assert done.returncode in (0, 1), done.stderr
    print(f"{FRAMES} looks in {spent:.1f} s")
    assert f"Ranks: {RANKS}" in done.stdout
    assert FRAMES - 1 <= spent < 1.25 * FRAMES + 3
