"""`evenroute bench migration` over gloo: its failures on purpose find what they are there for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from support.command import evenroute

SMALL = ["--ranks", "2", "--layers", "2", "--experts", "16", "--slots", "20", "--top-k", "2", "--tokens", "8"]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "evenroute.tools", "bench", "migration", *SMALL, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


def test_steps_and_damage_with_verification() -> None:
    done = run("--parts", "steps,damage", "--verify", "--steps", "8")
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"]["output_bits_unchanged"]
    assert report["steps"]["moved_slots"] > 0
    found = report["damage"]
    assert all(found[name] for name in ("refused", "noticed", "layer_stayed", "taken_up_after")), found
    assert "staging of layer 1: checksum mismatch" in done.stderr


def test_damage_needs_verification() -> None:
    done = evenroute("bench", "migration", "--parts", "damage")
    assert done.status == 2
    assert "without --verify" in done.err
