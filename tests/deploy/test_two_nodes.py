"""Two network namespaces as two nodes: torchrun with c10d rendezvous between them, CURVE keys, ranks on both, links cut
and healed. As far as one machine goes, this is deploy/README.md, "Two nodes, by hand"."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.command import evenroute
from support.compiled import compile_planner
from support.control_plane import child_environment, wait_for
from support.job import Job
from support.namespaces import TwoNodes, require_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PORT, RENDEZVOUS = 7421, 29400
CUT_S = 5.0


class NodesJob(Job):  # type: ignore[misc]
    """A job of one rank a node, started by one torchrun a node."""

    def __init__(self, folder: Path, nodes: TwoNodes, **options: Any) -> None:
        super().__init__(folder, 2, **options)
        self.nodes = nodes

    def start(self) -> NodesJob:
        import msgspec

        path = self.folder / "options.json"
        path.write_bytes(msgspec.json.encode(self.options))
        for number, node in enumerate(self.nodes.names):
            own = self.nodes.address(node, "data")
            torchrun = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
            ]
            meeting = f"{self.nodes.address('a', 'data')}:{RENDEZVOUS}"
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "two-nodes"]
            # Host names do not resolve inside the namespaces, so who hosts the meeting is said outright.
            torchrun += ["--rdzv-conf", f"is_host={int(node == 'a')}", "--local-addr", own]
            torchrun += ["-m", "support.rank_main", str(path)]
            environment = child_environment(GLOO_SOCKET_IFNAME=self.nodes.interface(node, "data"))
            with (self.folder / f"rank-{number}.log").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        self.nodes.inside(node, torchrun),
                        env=environment,
                        stderr=log,
                        stdout=subprocess.DEVNULL,
                    )
                )
        return self


@pytest.fixture
def nodes() -> Any:
    require_namespaces()
    with TwoNodes() as made:
        yield made


def start_rebalancer(nodes: TwoNodes, folder: Path) -> subprocess.Popen[bytes]:
    address = f"tcp://{nodes.address('a', 'control')}:{PORT}"
    command = [sys.executable, "-m", "evenroute.tools.cli", "rebalancer", "--bind", address]
    command += ["--store", str(folder / "run.db"), "--keys", str(folder / "keys"), "--interval", "3w"]
    command += ["--policy", "global", "--ready-file", str(folder / "ready.json")]
    with (folder / "rebalancer.log").open("ab") as log:
        process = subprocess.Popen(
            nodes.inside("a", command), env=child_environment(), stderr=log, stdout=subprocess.DEVNULL
        )
    wait_for((folder / "ready.json").exists, 60, "the rebalancer's start")
    return process


def status_from(
    nodes: TwoNodes, node: str, folder: Path, key: str = "viewer"
) -> subprocess.CompletedProcess[str]:
    address = f"tcp://{nodes.address('a', 'control')}:{PORT}"
    command = [sys.executable, "-m", "evenroute.tools.cli", "status", address, "--timeout", "3"]
    command += ["--keys", str(folder / f"keys/{key}.toml")] if key else []
    return subprocess.run(
        nodes.inside(node, command), env=child_environment(), capture_output=True, text=True, timeout=60
    )


def test_two_nodes_with_keys_survive_links_that_are_cut_and_healed(nodes: TwoNodes, tmp_path: Path) -> None:
    assert evenroute("keygen", tmp_path / "keys").status == 0
    compile_planner()
    rebalancer = start_rebalancer(nodes, tmp_path)
    agent = {
        "rebalancer": f"tcp://{nodes.address('a', 'control')}:{PORT}",
        "keys": str(tmp_path / "keys/rank.toml"),
        "top_k": 1,
        "window_steps": 10,
        "agree_every": 4,
        "heartbeat_s": 0.3,
        "resend_s": 0.3,
        "start_limit_s": 20.0,
        "close_limit_s": 20.0,
    }
    try:
        with NodesJob(tmp_path / "job", nodes, agent=agent, endless=True, step_s=0.02) as job:
            job.wait_key(lambda key: key[1] >= 1, limit_s=240, what="a switch on both nodes")
            assert status_from(nodes, "b", tmp_path).returncode in (0, 1)
            assert status_from(nodes, "b", tmp_path, key="").returncode == 2, "answered without a key"

            # The control link: routing goes on, counts of node b wait.
            begin = len(job.steps(1))
            nodes.cut("control")
            time.sleep(CUT_S)
            during = job.steps(1)[begin:]
            nodes.heal("control")
            assert len(during) > 20, f"only {len(during)} steps in {CUT_S} s without a rebalancer"
            longest = max(b[1] - a[1] for a, b in itertools.pairwise(during))
            assert longest < 2.0, f"stood still for {longest:.1f} s"
            version = {key for *_, key in job.steps(0)[-1:]}
            job.wait_key(
                lambda key: f"{key[0]}.{key[1]}" not in version, limit_s=90, what="a switch after the cut"
            )

            # The data link: the collectives of a step wait, then all goes on as if nothing had been.
            nodes.cut("data")
            time.sleep(1.0)
            stood = len(job.steps(0))
            time.sleep(1.0)
            assert len(job.steps(0)) - stood <= 8, "ranks went on without each other"
            nodes.heal("data")
            job.wait_step(len(job.steps(0)) + 50, limit_s=90)
            assert job.finish(120) == [0, 0], job.logs()
        job.check_steps()
        job.check_counts(tmp_path / "run.db")
    finally:
        rebalancer.terminate()
        assert rebalancer.wait(timeout=60) == 0, (tmp_path / "rebalancer.log").read_text()[-2000:]
