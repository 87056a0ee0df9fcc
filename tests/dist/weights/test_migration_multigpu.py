"""Migrations over real NCCL: the bench's endurance part, small; a rank killed in the middle of one."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.multigpu

SMALL = ["--ranks", "2", "--layers", "3", "--experts", "64", "--slots", "80", "--hidden", "512"]
SMALL += ["--intermediate", "256", "--chunk-mib", "2"]


def _bench(*flags: str, limit_s: float) -> tuple[int, str, str, float]:
    command = [sys.executable, "-m", "evenroute.tools.bench.migration", *SMALL, *flags]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


def test_graphs_delays_and_migrations_never_hang() -> None:
    status, out, err, _ = _bench(
        "--parts", "endurance", "--endurance-steps", "1500", "--check-every", "100", limit_s=200
    )
    assert status == 0, err[-3000:]
    report = json.loads(out.splitlines()[-1])
    assert report["endurance"]["layers_switched"] >= 6
    assert report["endurance"]["received_mib"] > 0
    assert report["outputs"]["checks_a_rank"] == 15
    assert report["outputs"]["worst_relative_error"] < 2e-2


def test_a_killed_rank_ends_the_job_with_operation_and_layer() -> None:
    status, _, err, seconds = _bench("--parts", "kill", limit_s=150)
    assert status != 0
    assert seconds < 120
    assert "killed at step" in err
    rest = err.split("killed at step", 1)[1].split("\n", 1)[1]
    assert "migration: transfer of layer" in rest, rest[-3000:]
