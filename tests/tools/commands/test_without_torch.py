"""The base install has no torch: the rebalancer and the offline commands run, for real, where it can't be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evenroute.tools.cli import command_names
from support.compiled import compile_planner
from support.control_plane import RebalancerProcess, wait_for
from support.job import Job

BLOCKER = '''
import sys

class Blocker:
    """No torch, no triton: also in the processes that this one starts."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is blocked by the test")
        return None

sys.meta_path.insert(0, Blocker())
'''
LAYERS, EXPERTS = 4, 16


@pytest.fixture(scope="module")
def blocked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which every Python process refuses to import torch and triton."""
    folder = tmp_path_factory.mktemp("blocked")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def loads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loads") / "loads.json"
    counts = np.random.default_rng(5).zipf(1.6, (LAYERS, EXPERTS)).clip(max=5000) * 10
    path.write_text(json.dumps({"logical_count": counts.tolist()}))
    return path


def run(env: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evenroute.tools.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=env,
        timeout=180,
    )


def test_the_block_holds(blocked: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], capture_output=True, text=True, env=blocked, timeout=180
    )
    assert done.returncode != 0
    assert "torch is blocked by the test" in done.stderr


def test_every_command_says_its_help(blocked: dict[str, str]) -> None:
    """One process for all of them: each module is imported, none of them needs torch for that."""
    code = (
        "import sys\n"
        "from evenroute.tools.cli import build_app, command_names\n"
        "import typer\n"
        "tree = typer.main.get_command(build_app(command_names()))\n"
        "for name in tree.commands:\n"
        "    context = tree.commands[name].make_context(name, [], parent=None, resilient_parsing=True)\n"
        "    print(name, len(tree.commands[name].get_help(context)))\n"
        "assert not {'torch', 'triton', 'numba'} & set(sys.modules), 'heavy imports for a help text'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=blocked, timeout=180
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == set(command_names())


def test_plan_then_inspect(blocked: dict[str, str], loads: Path, tmp_path: Path) -> None:
    placement = tmp_path / "placement.json"
    done = run(blocked, "plan", loads, "--ep-size", 4, "--num-slots", 20, "-o", placement, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["balancedness_predicted"]["mean"] > facts["balancedness_before"]["mean"]
    done = run(blocked, "inspect", loads, "--placement", placement, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    done = run(blocked, "inspect", loads)
    assert done.returncode == 0, done.stderr
    assert str(EXPERTS) in done.stdout


def test_replay(blocked: dict[str, str], loads: Path) -> None:
    done = run(
        blocked,
        "replay",
        loads,
        "--ep-size",
        4,
        "--num-slots",
        20,
        "--interval",
        1,
        "--policy",
        "global",
        "--json",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_a_pt_file_is_refused_in_one_line(blocked: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "dump.pt"
    path.write_bytes(b"PK\x03\x04 whatever")
    done = run(blocked, "inspect", path)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "torch" in done.stderr


@pytest.fixture
def rebalancer(
    blocked: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RebalancerProcess]:
    compile_planner()
    process = RebalancerProcess(tmp_path, flags=["--interval", "2w", "--policy", "global"])
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", blocked["PYTHONPATH"])
        process.start()
    yield process
    process.__exit__()


def test_the_rebalancer_serves_a_job_and_its_store_is_read(
    rebalancer: RebalancerProcess, blocked: dict[str, str], tmp_path: Path
) -> None:
    """Counts come in, a plan is made (in the planner's own process), ranks switch; status and inspect see it."""
    agent = {
        "rebalancer": rebalancer.bind,
        "top_k": 1,
        "window_steps": 10,
        "agree_every": 4,
        "heartbeat_s": 0.3,
        "resend_s": 0.3,
    }
    with Job(tmp_path / "job", 2, agent=agent, endless=True) as job:
        job.wait_key(lambda key: key[1] >= 1, limit_s=90, what="a switch planned without torch")
        status = run(blocked, "status", rebalancer.bind, "--json")
        assert job.finish() == [0, 0], job.logs()
    assert status.returncode in (0, 1), status.stderr
    assert json.loads(status.stdout)["ep_size"] == 2
    wait_for(lambda: rebalancer.status().placements.get("published", 0) >= 1, 10, "a published placement")
    assert rebalancer.stop() == 0
    inspected = run(blocked, "inspect", rebalancer.store, "--json")
    assert inspected.returncode == 0, inspected.stderr
    assert json.loads(inspected.stdout)
    gone = run(blocked, "status", rebalancer.bind)
    assert gone.returncode == 2


@pytest.mark.parametrize("name", ["router", "migration", "ep"])
def test_benches_that_need_torch_say_their_help_and_name_the_extra(
    blocked: dict[str, str], name: str
) -> None:
    done = run(blocked, "bench", name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: evenroute bench {name} ")
    done = run(blocked, "bench", name)
    assert done.returncode == 2
    assert done.stderr == (
        f"evenroute: error: bench {name} needs torch, which is not installed: pip install 'evenroute[rank]'\n"
    )


def test_the_stress_run_says_its_help_and_names_the_extra(blocked: dict[str, str]) -> None:
    done = run(blocked, "stress", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--routing" in done.stdout
    done = run(blocked, "stress", "--nproc-per-node", 2)
    assert done.returncode == 2
    assert done.stderr == (
        "evenroute: error: stress needs torch, which is not installed: pip install 'evenroute[rank]'\n"
    )


def test_bench_says_its_help(blocked: dict[str, str]) -> None:
    done = run(blocked, "bench", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "NAME --help for its flags" in " ".join(done.stdout.split())
