"""What the installed Triton makes of the routing kernel for sm_90, compiled here without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
COMPILE = Path(__file__).resolve().parents[2] / "support" / "compile_route.py"


@pytest.mark.parametrize(("model", "form"), [("dsv3", "exact"), ("dsv3", "weighted"), ("qwen3", "hash")])
def test_rows_stay_in_one_warp(model: str, form: str) -> None:
    """Programs of several warps, and no barrier or shared memory between them, whatever Triton's version."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(COMPILE), model, form], env=env, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stderr[-2000:]
    warps, shared, barriers = map(int, run.stdout.split()[-3:])
    assert warps > 1
    assert (shared, barriers) == (0, 0)
