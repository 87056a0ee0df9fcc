"""Failures over real NCCL: damaged weights in verifying mode, and a rank that stands still until the watchdog acts."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.multigpu

SMALL = ["--ranks", "2", "--layers", "3", "--experts", "64", "--slots", "80", "--hidden", "512"]
SMALL += ["--intermediate", "256", "--chunk-mib", "2"]


def _bench(*flags: str, limit_s: float) -> tuple[subprocess.CompletedProcess[str], float]:
    command = [sys.executable, "-m", "evenroute.tools.bench.migration", *SMALL, *flags]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    return done, time.monotonic() - began


def test_verifying_mode_finds_nothing_wrong_in_what_is_right_and_damage_in_what_is_not() -> None:
    flags = ["--parts", "endurance,damage", "--verify", "--endurance-steps", "300", "--check-every", "50"]
    done, _ = _bench(*flags, limit_s=150)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["endurance"]["layers_switched"] >= 3
    found = report["damage"]
    assert {name: found[name] for name in ("refused", "noticed", "layer_stayed", "taken_up_after")} == {
        "refused": True,
        "noticed": True,
        "layer_stayed": True,
        "taken_up_after": True,
    }
    assert "staging of layer 2: checksum mismatch in local slot" in done.stderr
    assert report["outputs"]["worst_relative_error"] < 2e-2


def test_the_watchdog_ends_ranks_whose_peer_stands_still() -> None:
    done, seconds = _bench("--parts", "stall", "--transfer-limit-s", "3", "--limit-s", "60", limit_s=120)
    assert done.returncode != 0
    assert "stands still at step" in done.stderr
    assert "evenroute: error: migration: transfer of layer 0 (chunk" in done.stderr, done.stderr[-3000:]
    assert "did not complete within 3 s" in done.stderr
    assert seconds < 60
