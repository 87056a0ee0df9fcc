"""Real processes for the control plane's tests: a rebalancer of one's own, and ranks that route by numpy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from evenroute.dist.client import UnreachableError, query_status

ROOT = Path(__file__).resolve().parents[2]


LEAST_WAIT_S = 60.0


def patience():
    """1 on a host with a core to spare, more on a busy one, now or in the last minute: stretches measured times."""
    running = int(Path("/proc/loadavg").read_text().split()[3].split("/")[0])
    return max(1.0, max(os.getloadavg()[0], running) / len(os.sched_getaffinity(0)))


def wait_for(condition, limit_s, what):
    """Poll gently until `condition()` is true; AssertionError naming `what` past the limit.

    A wait is no measurement, and a busy host must not fail it: no limit is below `LEAST_WAIT_S`. What is promised to
    come within a stated time is measured beside it, with `patience`.
    """
    limit_s = max(limit_s, LEAST_WAIT_S)
    deadline = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what}: not within {limit_s} s"
        time.sleep(0.05)


def is_gone(pid):
    """Whether a process has ended, also where nobody has fetched its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def child_environment(**extra):
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", **extra)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return env


def command_start_s():
    """What any `evenroute` command takes here and now until it says what is wrong with its settings, in seconds."""
    began = time.monotonic()
    command = [sys.executable, "-m", "evenroute.tools.cli", "rebalancer", "--check-config", "--bind", "no"]
    done = subprocess.run(command, capture_output=True, timeout=120, env=child_environment())
    assert done.returncode == 2, done.stderr
    return time.monotonic() - began


WITHOUT_LOCKS = "import fcntl; fcntl.flock = lambda *_: None; from evenroute.tools.cli import main; main()"


@dataclass
class RebalancerProcess:
    """`evenroute rebalancer` as a child process; `log` is its stderr."""

    folder: Path
    name: str = "rebalancer"
    bind: str = ""
    store: Path | None = None
    flags: list[str] = field(default_factory=list)
    toml: str = ""
    preexec: object = None
    without_locks: bool = False  # as on a file system whose locks do not reach the other host
    process: subprocess.Popen | None = None

    def __post_init__(self):
        self.bind = self.bind or f"ipc://{self.folder}/{self.name}.sock"
        self.store = self.store or self.folder / "run.db"
        self.ready = self.folder / f"{self.name}.ready.json"
        self.log_path = self.folder / f"{self.name}.log"

    def start(self, *, wait=True, limit_s=90.0):
        self.ready.unlink(missing_ok=True)
        flags = [
            "--bind",
            self.bind,
            "--store",
            str(self.store),
            "--ready-file",
            str(self.ready),
            *self.flags,
        ]
        if self.toml:
            config = self.folder / f"{self.name}.toml"
            config.write_text(self.toml)
            flags += ["--config", str(config)]
        with self.log_path.open("ab") as log:
            main = ["-c", WITHOUT_LOCKS] if self.without_locks else ["-m", "evenroute.tools.cli"]
            self.process = subprocess.Popen(
                [sys.executable, *main, "rebalancer", *flags],
                stderr=log,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
                preexec_fn=self.preexec,
            )
        if wait:
            wait_for(
                lambda: self.ready.exists() or self.process.poll() is not None, limit_s, "rebalancer's start"
            )
            assert self.process.poll() is None, self.log()
            self.address = json.loads(self.ready.read_text())["address"]
        return self

    def log(self):
        return self.log_path.read_text() if self.log_path.exists() else ""

    def status(self, timeout_s=30.0, keys=None):
        return query_status(self.address, timeout_s=timeout_s, keys=keys)

    def status_or_none(self):
        try:
            return self.status(timeout_s=1.0)
        except UnreachableError:
            return None

    def signal(self, number):
        os.kill(self.process.pid, number)

    def kill(self):
        self.process.kill()
        self.process.wait(timeout=60)

    def stop(self, limit_s=60.0):
        """SIGTERM; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=limit_s)

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(timeout=60)
