"""A real Slurm cluster on one host: munged, slurmctld and one slurmd a node, each node a network namespace with a host
name of its own. Everything lives in the test's folder; nothing of the host's own Slurm is read or changed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType

import pytest

from support.control_plane import wait_for
from support.namespaces import TwoNodes, require_namespaces

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "unshare", "nsenter")
# Node a is node-0, with the controller. Device files and cores are made up: nothing opens them.
CONFIGURATION = """
ClusterName=evenroute
SlurmctldHost=node-0({addresses[0]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MpiDefault=none
NodeName=node-0 NodeAddr={addresses[0]} CPUs=16 RealMemory=1000 Gres=gpu:8
NodeName=node-1 NodeAddr={addresses[1]} CPUs=16 RealMemory=1000 Gres=gpu:8
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# A node's own host name and host table, as seen by everything that runs on it.
ENTER = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def require_slurm() -> None:
    """Skip where Slurm is not installed, or where this user may not make nodes."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        why = f"not installed: {', '.join(missing)}" if missing else "not root"
        pytest.skip(f"no real Slurm (Debian: slurm-wlm, munge): {why}")
    require_namespaces()


class Slurm:
    """Two nodes, "node-0" and "node-1"; `run` is what a user types on the first."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.nodes = TwoNodes()
        self.addresses = [self.nodes.address(node, "data") for node in self.nodes.names]
        self._environment = environment | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Slurm:
        for name in ("state", "spool-node-0", "spool-node-1", "devices", "munge"):
            (self.folder / name).mkdir()
        for number in range(8):
            (self.folder / f"devices/gpu{number}").touch()
        (self.folder / "munge/key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge/key").chmod(0o400)
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(folder=self.folder, addresses=self.addresses)
        )
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/devices/gpu[0-7]\n")
        table = [f"{address} node-{number}\n" for number, address in enumerate(self.addresses)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(table))
        try:
            with self.nodes:
                pass
        except RuntimeError as error:
            pytest.skip(f"no nodes: {error}")
        self.nodes.__enter__()
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        munge = self.folder / "munge"
        words = [f"--key-file={munge}/key", f"--socket={munge}/socket", f"--pid-file={munge}/pid"]
        words += [f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
        # The folders above the test's own are not munge's to judge.
        self._daemon("munged", ["munged", "--foreground", "--force", *words])
        wait_for((munge / "socket").exists, 20, "munged")
        self._daemon("slurmctld", self.on(0, ["slurmctld", "-D", "-c"]))
        for number in (0, 1):
            self._daemon(f"slurmd-{number}", self.on(number, ["slurmd", "-D", "-N", f"node-{number}"]))
        wait_for(self.idle, 30, "two idle nodes")

    def idle(self) -> bool:
        dead = [process.args for process in self._daemons if process.poll() is not None]
        assert not dead, f"{dead}: {self.logs()}"
        return self.run("sinfo", "--noheader", "--format=%T %D", check=False).split() == ["idle", "2"]

    def _daemon(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    words, env=self._environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
                )
            )

    def on(self, number: int, words: list[str]) -> list[str]:
        """`words` run on a node."""
        # Not `ip netns exec`: its fresh /sys has no cgroups, which slurmd wants to see.
        network = f"--net=/run/netns/{self.nodes.names['ab'[number]]}"
        enter = ["sh", "-c", ENTER, "sh", f"node-{number}", str(self.folder / "hosts")]
        return ["nsenter", network, "unshare", "--mount", "--uts", *enter, *words]

    def run(self, *words: str, check: bool = True, cwd: Path | None = None, **variables: str) -> str:
        """Output of a command typed on node-0."""
        done = subprocess.run(
            self.on(0, list(words)),
            env=self._environment | variables,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 or not check, f"{words}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def job_state(self, job: str) -> tuple[str, str]:
        """(state, exit code) of a job, as `scontrol show job` tells for five minutes after its end."""
        text = self.run("scontrol", "show", "job", job)
        fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return fields["JobState"], fields["ExitCode"]

    def wait_ended(self, job: str, limit_s: float) -> tuple[str, str]:
        """Its last (state, exit code)."""
        waiting = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING"}
        found: tuple[str, str] = wait_for(
            lambda: (state := self.job_state(job))[0] not in waiting and state, limit_s, f"job {job}'s end"
        )
        return found

    def processes(self) -> list[int]:
        """Processes on the nodes, Slurm's daemons aside."""
        own = ("slurmd", "slurmctld", "slurmscriptd", "slurmstepd")
        found = []
        for name in self.nodes.names.values():
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20)
            for pid in listed.stdout.split():
                try:
                    if Path(f"/proc/{pid}/comm").read_text().strip() not in own:
                        found.append(int(pid))
                except OSError:
                    continue
        return found

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._daemons[::-1]:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(timeout=10)
        for name in self.nodes.names.values():  # what a failed test's job left on the nodes
            listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, timeout=20)
            for pid in listed.stdout.split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.1)
        self.nodes.__exit__(None, None, None)
