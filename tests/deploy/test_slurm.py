"""The sbatch script, run by bash with stand-ins of `srun` and `scontrol`: what it starts where, and a small job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import evenroute
from support.command_lines import parse_evenroute, parse_torchrun
from support.control_plane import child_environment, wait_for
from support.deploy_files import DEPLOY, ROOT
from support.documented import Lines, runs
from support.ports import free_port

SCRIPT = DEPLOY / "slurm/evenroute.sbatch"
NODES = ("node-a", "node-b")

SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] || exit 1
printf '%s\\n' $NODE_NAMES
"""
# Reads `--nodes` and sets what Slurm would, then runs the script as a job's first node does.
SBATCH = """#!/bin/sh
case "$1" in --nodes=*) SLURM_JOB_NUM_NODES=${1#--nodes=}; export SLURM_JOB_NUM_NODES; shift;; esac
[ $# = 1 ] && exec bash "$1"
echo "sbatch: found $*" >&2
exit 1
"""
# Takes its own flags off, notes what it was asked for, and runs the rest: once, or once a node.
SRUN = """#!{python}
import json, os, subprocess, sys, time
flags = []
words = sys.argv[1:]
while words and words[0].startswith("-"):
    flags.append(words.pop(0))
with open(os.environ["SRUN_LOG"], "a") as log:
    log.write(json.dumps([flags, words]) + "\\n")
if os.environ.get("SRUN_DRY"):
    # The job's end takes the rebalancer down: let that one be noted first.
    for _ in range(600):
        if open(os.environ["SRUN_LOG"]).read().count("\\n") > 1:
            sys.exit(0)
        time.sleep(0.05)
    sys.exit(1)
copies = int(os.environ["SLURM_JOB_NUM_NODES"])
running = [subprocess.Popen(words, env={{**os.environ, "SLURM_NODEID": str(n)}}) for n in range(copies)]
sys.exit(max(process.wait() for process in running))
"""
# In a dry run the rebalancer is only noted.
EVENROUTE = """#!{python}
import json, os, sys
if os.environ.get("SRUN_DRY") and sys.argv[1:2] == ["rebalancer"]:
    with open(os.environ["SRUN_LOG"], "a") as log:
        log.write(json.dumps([[], ["evenroute", *sys.argv[1:]]]) + "\\n")
    sys.exit(0)
os.execv(sys.executable, [sys.executable, "-m", "evenroute.tools.cli", *sys.argv[1:]])
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job on two "nodes", with stand-ins first on the PATH."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    programs = {
        "scontrol": SCONTROL,
        "sbatch": SBATCH,
        "srun": SRUN.format(python=sys.executable),
        "evenroute": EVENROUTE.format(python=sys.executable),
        "torchrun": f'#!/bin/sh\nexec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    assert evenroute("keygen", tmp_path / "home/keys").status == 0
    return child_environment() | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "EVENROUTE_HOME": str(tmp_path / "home"),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_JOB_ID": "4711",
        "NODE_NAMES": " ".join(NODES),
        "SRUN_LOG": str(tmp_path / "srun.log"),
    }


def calls(cluster: dict[str, str]) -> list[tuple[list[str], list[str]]]:
    path = Path(cluster["SRUN_LOG"])
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def test_what_is_started_where(cluster: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=cluster | {"SRUN_DRY": "1"}, capture_output=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    wait_for(lambda: len(calls(cluster)) >= 2, 10, "both calls of srun")
    by_program = {words[0]: (flags, words[1:]) for flags, words in calls(cluster)}
    flags, words = by_program["evenroute"]
    assert not flags, "by the script itself, on the first node: not by srun"
    parsed = parse_evenroute(words)
    assert parsed["bind"] == "tcp://0.0.0.0:7421"
    assert str(parsed["store"]).endswith("home/store/4711.db")
    flags, words = by_program["torchrun"]
    assert "--ntasks-per-node=1" in flags
    assert words[words.index("--rdzv-endpoint") + 1] == f"{NODES[0]}:29400"
    options = parse_torchrun(words)
    assert options is not None
    assert (options.topology.ep_size, options.topology.num_nodes) == (16, 2)
    assert options.rebalancer == f"tcp://{NODES[0]}:7421"
    assert options.keys is not None


@runs(
    "deploy/README.md",
    "evenroute keygen ~/evenroute/keys",
    "sbatch --nodes=4 deploy/slurm/evenroute.sbatch",
    'ENGINE_COMMAND="my_engine.serve --some-flag" sbatch --nodes=4',
)
def test_the_readmes_lines_start_a_job(lines: Lines, cluster: dict[str, str], tmp_path: Path) -> None:
    """By bash, from the checkout, with stand-ins of Slurm's programs and a home of the test's own."""
    home = tmp_path / "a home"
    home.mkdir()
    nodes = [f"node-{letter}" for letter in "abcd"]
    environment = cluster | {"SRUN_DRY": "1", "HOME": str(home), "NODE_NAMES": " ".join(nodes)}
    del environment["EVENROUTE_HOME"], environment["SLURM_JOB_NUM_NODES"]
    for number, line in enumerate(lines.texts):
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        if not number:
            assert (home / "evenroute/keys/rank.toml").is_file(), "where the script looks for them"
            continue
        wait_for(lambda: len(calls(cluster)) >= 2, 10, "both calls of srun")
        by_program = {words[0]: (flags, words[1:]) for flags, words in calls(cluster)}
        assert "rebalancer" in by_program["evenroute"][1]
        words = by_program["torchrun"][1]
        assert f"{nodes[0]}:29400" in words
        assert words[words.index("--nnodes") + 1] == "4"
        assert ("my_engine.serve" in words) == ("ENGINE_COMMAND" in line)
        Path(cluster["SRUN_LOG"]).unlink()


def test_script_is_valid_bash() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    lines = SCRIPT.read_text().splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    first_command = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first_command for line in directives), (
        "sbatch reads no directive after a command"
    )
    names = {line.split()[1].split("=")[0] for line in directives}
    assert names <= {
        *("--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--exclusive"),
        *("--time", "--signal", "--output"),
    }


@pytest.mark.slow
def test_a_small_job_of_two_nodes_runs_and_leaves_nothing(cluster: dict[str, str], tmp_path: Path) -> None:
    port, report = free_port(), tmp_path / "report.json"
    engine = (
        f"evenroute.tools.stress --layers 2 --num-nodes 2 --tokens 32 --steps 120 --step-delay 0.02 --routing zipf "
        f"--rebalancer tcp://127.0.0.1:{port} --keys {tmp_path}/home/keys/rank.toml --report {report}"
    )
    environment = cluster | {
        "NODE_NAMES": "127.0.0.1 127.0.0.1",
        "GPUS_PER_NODE": "1",
        "EVENROUTE_PORT": str(port),
        "RENDEZVOUS_PORT": str(free_port()),
        "ENGINE_COMMAND": engine,
    }
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert json.loads(report.read_text())
    assert (tmp_path / "home/store/4711.db").exists()
    wait_for(
        lambda: evenroute("status", f"tcp://127.0.0.1:{port}", "--timeout", 0.5).status == 2, 15, "its end"
    )
