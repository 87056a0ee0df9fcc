"""Ctrl-C: the ranks end together before their next step, and the summary of the steps so far is shown."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path


def test_ctrl_c_ends_with_the_summary_so_far(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "evenroute", "stress", "--nproc-per-node", "2", "--layers", "2"]
    command += ["--num-experts", "32", "--steps", "1000", "--step-delay", "0.005"]
    with open(tmp_path / "err", "w") as err:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        lines = []
        for line in process.stdout:  # ends by pytest's time limit
            lines.append(line)
            if "routing: step 100 of" in line:
                os.killpg(process.pid, signal.SIGINT)  # what the terminal does: to all of its group
                break
        out = "".join(lines) + process.stdout.read()
        status = process.wait(60)
        process.stdout.close()
    told = (tmp_path / "err").read_text()
    assert status == 130, told[-3000:]
    assert "Traceback" not in told + out
    assert out.startswith("1000 steps on 2 ranks (cpu)"), "what it is about to do comes first"
    found = re.search(r"interrupted after (\d+) of 1000 steps", out)
    assert found is not None, out[-3000:]
    assert 100 <= int(found[1]) < 1000
    assert "placements, in the order in which they were in use" in out
    for name in ("same placement", "count sums", "ids map back", "counts stored"):
        assert re.search(rf"^holds +{name}: ", out, flags=re.MULTILINE), out[-3000:]
