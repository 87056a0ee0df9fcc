"""The example of an engine, and the torch adapter, go on when a process is killed."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from evenroute.tools.elastic.launcher import Launcher
from evenroute.tools.run.rebalancer import ChildRebalancer
from support.toy_moe import EXPERTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
TESTS = ROOT / "tests"


def run_with_a_kill(command: list[str], log: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Three ranks, one of them killed as soon as a membership is taken up; what the processes said."""
    from evenroute.dist.client import query_status

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    with ChildRebalancer({"interval": 1.0}) as rebalancer:
        words = [rebalancer.address if word == "ADDR" else word for word in command]
        said: list[str] = []
        launcher = Launcher(words, rebalancer=rebalancer.address, say=said.append, log=log)
        try:
            launcher.start(3)
            deadline = time.monotonic() + 120.0
            while query_status(rebalancer.address).membership.number != 1:
                assert time.monotonic() < deadline, log.read_text()
                launcher.poll()
                time.sleep(0.05)
            launcher.children[1].process.kill()
            while launcher.living():
                assert time.monotonic() < deadline + 120.0, log.read_text()
                launcher.poll()
                time.sleep(0.05)
        finally:
            launcher.close()
        assert said == [
            f"process {launcher.children[1].pid} (started as number 1) ended with signal 9 (SIGKILL)"
        ]
        assert launcher.status() == 0
        assert query_status(rebalancer.address).membership.lost == 1
    return log.read_text()


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(ROOT / "examples/elastic_engine.py"), "ADDR", "900"]
    said = run_with_a_kill(command, tmp_path / "log", monkeypatch)
    lines = re.findall(r"member (\d): 900 steps done, the last in membership 2", said)
    assert sorted(lines) == ["0", "2"], said


def test_the_torch_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = str(EXPERTS // 2)
    command = [sys.executable, "-m", "support.elastic_adapted_rank", "ADDR", "600", slots]
    said = run_with_a_kill(command, tmp_path / "log", monkeypatch)
    lines = re.findall(r"member (\d): 600 done", said)
    assert sorted(lines) == ["0", "2"], said
