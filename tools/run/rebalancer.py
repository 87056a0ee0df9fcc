"""`evenroute rebalancer` as a child process: the only way in which stress runs and benches start one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from evenroute.tools.run.folder import RunFolder, end_with_parent

START_LIMIT_S = 90.0
COMPILE_LIMIT_S = 300.0
STOP_LIMIT_S = 10.0
WARM_UP = "from evenroute.eplb.planner.warm_up import warm_up; warm_up()"
# torchrun's: a process beside the ranks must not join their job.
RANK_VARIABLES = ("RANK", "WORLD_SIZE")


class ChildRebalancer:
    """A rebalancer process with a temporary folder of its own. Both end with `close`, or with this process.

    `address` is what ranks connect to, `store` its SQLite file, `pid` the process.
    """

    def __init__(self, planner: Mapping[str, str | float], *, store: Path | None = None) -> None:
        """Start it and return at once; `wait_ready` says when it serves.

        `planner`: keys of the table [planner] of its settings. `store`: keep the history there, not in the folder.
        """
        self._folder = RunFolder()
        path = self._folder.path
        self.address = f"ipc://{path}/r.sock"
        self.store = (path / "run.db" if store is None else store).absolute()
        self._ready, self._log = path / "ready.json", path / "log"
        process = {
            "bind": self.address,
            "store": str(self.store),
            "ready_file": str(self._ready),
            "log_level": "warning",
        }
        settings = path / "rebalancer.toml"
        settings.write_text(_table("rebalancer", process) + _table("planner", planner))
        environment = {name: text for name, text in os.environ.items() if name not in RANK_VARIABLES}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "evenroute.tools", "rebalancer", "--config", str(settings)],
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=end_with_parent,
                process_group=0,  # the terminal's Ctrl-C ends the run, which then ends its rebalancer
            )
        self.pid = self._process.pid

    def wait_ready(self) -> None:
        """Wait until it serves; RuntimeError with the last line of its log if it does not within 90 s."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = " ".join(self._log.read_text().strip().splitlines()[-1:])
                self.close()
                raise RuntimeError(f"the rebalancer did not start: {last or 'no message'}")
            time.sleep(0.02)

    def terminate(self) -> None:
        """Ask it to end, without waiting."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """SIGTERM, SIGKILL after 10 s, then the folder is removed. May be called twice."""
        self.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_LIMIT_S)
        self._folder.remove()

    def __enter__(self) -> Self:
        self.wait_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _table(name: str, keys: Mapping[str, str | float]) -> str:
    return "".join([f"[{name}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())])


class RebalancerSeries:
    """One rebalancer for each of several jobs in turn, the next started ahead where there are cores to spare."""

    def __init__(self, planners: list[Mapping[str, str | float]]) -> None:
        """`planners`: as of `ChildRebalancer`, by job. The planner is compiled beside all that happens meanwhile."""
        self._planners = planners
        self._ahead = (os.cpu_count() or 1) >= 8
        self._started: dict[int, ChildRebalancer] = {}
        self._compiling = subprocess.Popen([sys.executable, "-c", WARM_UP], preexec_fn=end_with_parent)

    def wait_compiled(self) -> None:
        """Wait until the planner comes from the cache; subprocess.TimeoutExpired after 300 s."""
        self._compiling.wait(COMPILE_LIMIT_S)

    def address(self, job: int) -> str:
        """Address of this job's rebalancer, which serves when this returns; the next job's may be starting."""
        for number in (job, job + 1) if self._ahead else (job,):
            if number < len(self._planners) and number not in self._started:
                self._started[number] = ChildRebalancer(self._planners[number])
        self._started[job].wait_ready()
        return self._started[job].address

    def done(self, job: int) -> None:
        """The job is over: its rebalancer may end."""
        self._started[job].terminate()

    def close(self) -> None:
        """End all."""
        if self._compiling.poll() is None:
            self._compiling.kill()
        for one in self._started.values():
            one.terminate()
        for one in self._started.values():
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
