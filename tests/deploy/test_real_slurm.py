"""The sbatch script under a real Slurm: munged, slurmctld and slurmd on two nodes (network namespaces), sbatch as the
README types it, real ranks; then a job is cancelled, and a rank is killed. Skips where Slurm is not installed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evenroute.eplb.store.writer import StoreReader
from support.command import evenroute
from support.control_plane import child_environment, wait_for
from support.deploy_files import ROOT
from support.slurm import Slurm, require_slurm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

JOB = "evenroute.tools.stress --layers 2 --num-nodes 2 --tokens 32 --step-delay 0.02 --routing zipf"
ENDLESS = "--steps 100000"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    require_slurm()
    folder = tmp_path_factory.mktemp("slurm")
    programs = folder / "bin"
    programs.mkdir()
    for name, module in (("evenroute", "evenroute.tools.cli"), ("torchrun", "torch.distributed.run")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (programs / name).chmod(0o755)
    assert evenroute("keygen", folder / "home/keys").status == 0
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "EVENROUTE_HOME": str(folder / "home"),
        "GPUS_PER_NODE": "1",
    }
    with Slurm(folder, child_environment() | variables) as cluster:
        yield cluster


def submit(slurm: Slurm, *flags: str) -> str:
    """`sbatch --nodes=2 deploy/slurm/evenroute.sbatch` from the checkout, with a small engine; the job's number."""
    words = [JOB, "--rebalancer tcp://node-0:7421", f"--keys {slurm.folder}/home/keys/rank.toml", *flags]
    output = f"--output={slurm.folder}/job-%j.log"  # the directive's place is the checkout
    script = "deploy/slurm/evenroute.sbatch"
    line = ["sbatch", "--parsable", output, "--nodes=2", script]
    return slurm.run(*line, cwd=ROOT, ENGINE_COMMAND=" ".join(words)).strip()


def log(slurm: Slurm, job: str) -> str:
    path = slurm.folder / f"job-{job}.log"
    return path.read_text() if path.exists() else ""


def status(slurm: Slurm) -> dict[str, Any]:
    """`evenroute status`, typed on the first node."""
    keys = f"{slurm.folder}/home/keys/viewer.toml"
    line = ["evenroute", "status", "tcp://node-0:7421", "--keys", keys, "--json", "--timeout", "1"]
    text = slurm.run(*line, check=False)
    found: dict[str, Any] = json.loads(text) if text.startswith("{") else {"ranks": [], "epoch": 0}
    return found


def wait_running(slurm: Slurm, job: str, above_epoch: int = 0) -> int:
    """Until the rebalancer, of an epoch above, has counts of both ranks; its epoch."""

    def counts() -> int:
        assert slurm.job_state(job)[0] in ("PENDING", "CONFIGURING", "RUNNING"), log(slurm, job)
        told = status(slurm)
        known = [rank for rank in told["ranks"] if rank["last_step"] is not None]
        return int(told["epoch"]) if len(known) == 2 and told["epoch"] > above_epoch else 0

    found: int = wait_for(counts, 120, f"counts of job {job}")
    return found


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.run("scancel", "--user=root")
    wait_for(slurm.idle, 60, "the nodes are idle")


def processes(slurm: Slurm, *words: str) -> list[int]:
    """Processes on the nodes with all these words in their command lines."""
    found = []
    for pid in slurm.processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if all(word in command for word in words):
            found.append(pid)
    return found


def assert_nothing_is_left(slurm: Slurm) -> None:
    wait_for(lambda: not slurm.processes(), 20, "no process on either node")
    wait_for(slurm.idle, 30, "both nodes are idle again")


def test_a_job_on_two_nodes_ends_well_and_leaves_its_counts(slurm: Slurm) -> None:
    report = slurm.folder / "report.json"
    job = submit(slurm, "--steps 100", f"--report {report}")
    assert slurm.wait_ended(job, 150) == ("COMPLETED", "0:0"), log(slurm, job)
    assert json.loads(report.read_text())
    assert "ends on signal 15" in log(slurm, job), "the rebalancer is asked to end, not killed"
    with StoreReader(slurm.folder / f"home/store/{job}.db") as reader:
        _, counts = reader.total_counts()
    assert counts is not None
    assert counts.sum(axis=1).tolist() == [100 * 32 * 2 * 8] * 2, (
        "steps x tokens x ranks x top-8, in each layer"
    )
    assert_nothing_is_left(slurm)


def test_a_killed_rebalancer_comes_back_and_scancel_ends_all(slurm: Slurm) -> None:
    job = submit(slurm, ENDLESS)
    first = wait_running(slurm, job)
    [rebalancer] = processes(slurm, "evenroute.tools.cli rebalancer")
    os.kill(rebalancer, signal.SIGKILL)
    wait_running(slurm, job, above_epoch=first)
    assert "rebalancer ended with status 137; starting it again in 2 s" in log(slurm, job)
    slurm.run("scancel", job)
    assert slurm.wait_ended(job, 60)[0] == "CANCELLED"
    assert "ends on signal 15" in log(slurm, job)
    assert_nothing_is_left(slurm)


def test_a_killed_rank_fails_the_job_on_both_nodes(slurm: Slurm) -> None:
    job = submit(slurm, ENDLESS)
    wait_running(slurm, job)
    ranks = [pid for pid in processes(slurm, "evenroute.tools.stress") if not launches(pid)]
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    state, exit_code = slurm.wait_ended(job, 60)
    assert state == "FAILED", log(slurm, job)
    assert exit_code != "0:0"
    assert_nothing_is_left(slurm)


def launches(pid: int) -> bool:
    """Whether the process is torchrun or srun, which name the ranks' module too."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"torch.distributed.run" in command or any(
        word.endswith((b"srun", b"torchrun")) for word in command
    )
