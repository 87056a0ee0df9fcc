"""The examples run as they are shown."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.compiled import compile_planner
from support.control_plane import RebalancerProcess
from support.deploy_files import ROOT

EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: str, ranks: int = 2, timeout: float = 120) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_minimal_engine_runs_without_a_rebalancer() -> None:
    lines = run_example("minimal_engine.py").splitlines()
    assert sorted(lines) == [f"rank {rank}: routed with placement (0, 0)" for rank in (0, 1)]


def test_minimal_engine_switches_with_a_rebalancer(tmp_path: Path) -> None:
    compile_planner()
    with RebalancerProcess(tmp_path, flags=["--interval", "2w", "--policy", "global"]) as rebalancer:
        lines = run_example("minimal_engine.py", rebalancer.bind).splitlines()
        status = rebalancer.status()
    assert len(lines) == 2
    assert status.placements["published"] >= 1, rebalancer.log()
    assert all(f"({status.epoch}, " in line for line in lines), "the run ended on its start placement"


@pytest.mark.slow
def test_transformers_model_answers_as_before_while_experts_move(tmp_path: Path) -> None:
    pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed (extra: examples)")
    compile_planner()
    with RebalancerProcess(tmp_path, flags=["--interval", "2w", "--policy", "global"]) as rebalancer:
        lines = run_example("transformers_moe.py", rebalancer.bind).splitlines()
    found = [
        re.search(r"(\d+) bytes of experts received, answers differ by ([\d.e+-]+)$", line) for line in lines
    ]
    assert len(found) == 2
    for match in found:
        assert match is not None, lines
        assert int(match[1]) > 0, "no expert moved"
        assert float(match[2]) < 1e-4


def test_minimal_engine_is_as_short_as_it_says() -> None:
    """Twenty lines of its own use of evenroute: statements, without imports and the stand-in for the experts."""
    tree = ast.parse((EXAMPLES / "minimal_engine.py").read_text())
    statements = 0
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "name", "") == "experts":
            continue
        statements += sum(isinstance(child, ast.stmt) for child in ast.walk(node))
    assert statements <= 24


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_readme_shows_the_example_as_it_is(path: Path) -> None:
    """A code block that imports RankAgent must be the example's own text, so that it can't rot."""
    readme = (ROOT / "README.md").read_text()
    blocks = [block.split("```")[0] for block in readme.split("```python\n")[1:]]
    shown = [block for block in blocks if f"examples/{path.name}" in block]
    for block in shown:
        missing = [
            line for line in block.splitlines() if line.strip() and line not in path.read_text().splitlines()
        ]
        assert not missing, f"README.md shows lines that {path.name} has not: {missing[:3]}"
