"""The examples run as they are shown."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import evenroute
from support.compiled import compile_planner
from support.control_plane import RebalancerProcess, child_environment, wait_for
from support.deploy_files import ROOT
from support.documented import Lines, runs

EXAMPLES = ROOT / "examples"


def run_example(name: str, *arguments: str, ranks: int = 2, timeout: float = 240) -> str:
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


def said_by_ranks(out: str) -> list[str]:
    """What each rank printed: torchrun's workers are unbuffered, so that two lines' ends can come after both texts."""
    return [f"rank {text.strip()}" for text in out.split("rank ")[1:]]


@pytest.mark.slow
def test_minimal_engine_runs_without_a_rebalancer() -> None:
    lines = said_by_ranks(run_example("minimal_engine.py"))
    assert sorted(lines) == [f"rank {rank}: 600 steps, now with placement start" for rank in (0, 1)]


@runs(
    "README.md",
    ".venv/bin/torchrun --standalone --nproc-per-node 2 examples/minimal_engine.py",
    "evenroute rebalancer --bind ipc:///run/evenroute.sock --store run.db",
    "evenroute status ipc:///run/evenroute.sock",
    "evenroute inspect run.db",
)
def test_an_engine_of_ones_own_with_a_rebalancer_beside_it(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's four lines, with another socket; the engine is told of it, and plans come after two windows."""
    monkeypatch.chdir(tmp_path)
    compile_planner()
    socket = {"ipc:///run/evenroute.sock": f"ipc://{tmp_path}/r.sock"}
    command, *words = lines.words("evenroute rebalancer", socket)
    assert command == "evenroute"
    command, *engine = lines.words(".venv/bin/torchrun", {"examples/": f"{EXAMPLES}/"})
    assert command == ".venv/bin/torchrun"
    words += ["--interval", "2w", "--policy", "global", "--ready-file", "ready.json"]
    with open("log", "wb") as log:
        rebalancer = subprocess.Popen(
            [sys.executable, "-m", "evenroute.tools.cli", *words], stderr=log, env=child_environment()
        )
    try:
        wait_for(lambda: Path("ready.json").exists() or rebalancer.poll() is not None, 90, "its start")
        assert rebalancer.poll() is None, Path("log").read_text()
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *engine, *socket.values()],
            capture_output=True,
            text=True,
            timeout=250,
            env=child_environment(),
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        status = evenroute(*lines.words("evenroute status", socket)[1:], "--json")
        assert status.status in (0, 1), status.err
        assert status.json["placements"]["published"] >= 1, Path("log").read_text()
    finally:
        rebalancer.terminate()
        assert rebalancer.wait(timeout=60) == 0
    printed = said_by_ranks(done.stdout)
    assert len(printed) == 2
    assert all(f"placement {status.json['epoch']:x}/" in line for line in printed), (
        "the run ended on its start placement"
    )
    inspected = evenroute(*lines.words("evenroute inspect")[1:])
    assert inspected.status == 0, inspected.err
    assert "balancedness" in inspected.out.lower()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3", "deepseek"])
def test_transformers_model_answers_as_before_while_experts_move(tmp_path: Path, model: str) -> None:
    pytest.importorskip("transformers", "5.0", reason="transformers 5 is not installed (extra: examples)")
    compile_planner()
    with RebalancerProcess(tmp_path, flags=["--interval", "2w", "--policy", "global"]) as rebalancer:
        lines = said_by_ranks(run_example("transformers_moe.py", model, rebalancer.bind))
    found = [
        re.search(r"(\d+) bytes of experts received, answers differ by ([\d.e+-]+)$", line) for line in lines
    ]
    assert len(found) == 2
    for match in found:
        assert match is not None, lines
        assert int(match[1]) > 0, "no expert moved"
        assert float(match[2]) < 1e-4


def test_the_training_loop_learns_and_balances_by_its_counts() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "training_loop.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env=child_environment(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = re.findall(r"loss ([\d.]+), gradient at the gate ([\d.]+), balance ([\d.]+)", done.stdout)
    losses, gradients, balance = ([float(line[column]) for line in found] for column in range(3))
    assert losses[-1] < losses[0] / 5
    assert min(gradients) > 0
    assert balance[-1] > balance[0]


@pytest.mark.slow
def test_the_serving_loop_switches_while_ranks_fall_idle(tmp_path: Path) -> None:
    compile_planner()
    with RebalancerProcess(tmp_path, flags=["--interval", "2w", "--policy", "global"]) as rebalancer:
        lines = said_by_ranks(run_example("serving_loop.py", rebalancer.bind))
    assert len(lines) == 2
    for line in lines:
        match = re.search(r"(\d+) requests served, (\d+) of \d+ steps idle, (\d+) bytes", line)
        assert match is not None, line
        assert min(int(number) for number in match.groups()) > 0, line


def test_minimal_engine_is_as_short_as_it_says() -> None:
    """Twenty lines of its own use of evenroute: statements, without imports and the stand-in for the experts."""
    tree = ast.parse((EXAMPLES / "minimal_engine.py").read_text())
    statements = 0
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) or getattr(node, "name", "") == "experts":
            continue
        statements += sum(isinstance(child, ast.stmt) for child in ast.walk(node))
    assert statements <= 26


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
