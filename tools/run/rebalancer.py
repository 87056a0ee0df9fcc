"""The rebalancers of `bench_ep.py`: a real one for every cell, started ahead where there are cores to spare."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import TracebackType

from evenroute.tools.run.folder import RunFolder, end_with_parent

START_LIMIT_S = 90.0
COMPILE_LIMIT_S = 300.0
STOP_LIMIT_S = 10.0
MIN_GAIN = 0.01
"""A second plan for the same traffic gains nothing but sampling noise: it is not published."""

SETTINGS = """[rebalancer]
bind = {bind}
store = {store}
ready_file = {ready}
log_level = "warning"
[planner]
interval = {windows}
interval_unit = "windows"
policy = "{policy}"
min_gain = {min_gain}
"""


class CellRebalancer:
    """`evenroute rebalancer` in a temporary folder, for one cell."""

    def __init__(self, policy: str, windows: int) -> None:
        """Starts it and returns at once."""
        self._temporary = RunFolder()
        self._folder = self._temporary.path
        self.address = f"ipc://{self._folder}/r.sock"
        self._ready, self._log = self._folder / "ready.json", self._folder / "log"
        config = self._folder / "rebalancer.toml"
        paths = {"bind": self.address, "store": f"{self._folder}/run.db", "ready": str(self._ready)}
        quoted = {name: json.dumps(text) for name, text in paths.items()}
        config.write_text(SETTINGS.format(**quoted, windows=windows, policy=policy, min_gain=MIN_GAIN))
        # Ranks set torchrun's variables; a process beside them shall not join the job.
        environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", "evenroute.tools", "rebalancer", "--config", str(config)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent
            )

    def wait_ready(self) -> None:
        """Until it serves; RuntimeError with its last line if it does not."""
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the rebalancer did not start: {self.last_line()}")
            time.sleep(0.02)

    def last_line(self) -> str:
        """Of its log."""
        return " ".join(self._log.read_text().strip().splitlines()[-1:]) or "no message"

    def signal_end(self) -> None:
        """Ask it to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it; its folder goes, too."""
        self.signal_end()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_LIMIT_S)
        self._temporary.remove()


class Rebalancers:
    """One for every cell in turn; rank 0 alone has them."""

    def __init__(self, policies: list[str], windows: int) -> None:
        self._policies, self._windows = policies, windows
        self._ahead = (os.cpu_count() or 1) >= 8
        self._started: dict[int, CellRebalancer] = {}
        # Compiled once, beside everything that happens meanwhile.
        code = "from evenroute.eplb.planner.warm_up import warm_up; warm_up()"
        self._compiling = subprocess.Popen([sys.executable, "-c", code], preexec_fn=end_with_parent)

    def wait_compiled(self) -> None:
        """Until the planner comes from the cache; subprocess.TimeoutExpired beyond all reason."""
        self._compiling.wait(COMPILE_LIMIT_S)

    def address(self, cell: int) -> str:
        """The one of this cell serves when this returns; that of the next cell is on its way."""
        for number in (cell, cell + 1) if self._ahead else (cell,):
            if number < len(self._policies) and number not in self._started:
                self._started[number] = CellRebalancer(self._policies[number], self._windows)
        self._started[cell].wait_ready()
        return self._started[cell].address

    def done(self, cell: int) -> None:
        """The cell is over."""
        self._started[cell].signal_end()

    def close(self) -> None:
        """End all."""
        if self._compiling.poll() is None:
            self._compiling.kill()
        for one in self._started.values():
            one.signal_end()
        for one in self._started.values():
            one.close()

    def __enter__(self) -> Rebalancers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
