"""The stress run's own rebalancer: one `evenroute rebalancer` process in a temporary folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as torch_dist
from rich.console import Console

from evenroute.eplb.planner.warm_up import warm_up
from evenroute.tools.run.folder import RunFolder, end_with_parent
from evenroute.tools.stress.options import StressOptions

START_LIMIT_S = 90.0
STOP_LIMIT_S = 6.0


def windows_per_plan(interval_steps: int) -> tuple[int, int]:
    """(steps a window, windows a plan) for `interval_steps`, about three windows to a plan."""
    window_steps = max(1, interval_steps // 3)
    return window_steps, max(1, interval_steps // window_steps)


class OwnRebalancer:
    """A rebalancer process that lives as long as the run; its store stays where `--store` says, else nowhere."""

    def __init__(self, process: subprocess.Popen[bytes], folder: RunFolder, store: Path) -> None:
        self._process = process
        self._folder = folder
        self.store = store
        self.address = f"ipc://{folder.path}/r.sock"

    @classmethod
    def start(cls, options: StressOptions, console: Console) -> OwnRebalancer:
        """Starts it and waits until it serves. RuntimeError with its last line if it does not within 90 s.

        The planner is compiled before, so that the first plan of a short run does not wait for it.
        """
        with console.status("compiling the planner (once, then it comes from the cache)"):
            warm_up()
        made = RunFolder()
        folder = made.path
        ready = folder / "ready.json"
        config = folder / "rebalancer.toml"
        _, windows = windows_per_plan(options.interval_steps)
        store = options.store if options.store is not None else folder / "run.db"
        config.write_text(
            "[rebalancer]\n"
            f'bind = "ipc://{folder}/r.sock"\n'
            f"store = {json.dumps(str(store.absolute()))}\n"
            f"ready_file = {json.dumps(str(ready))}\n"
            'log_level = "warning"\n'
            "[planner]\n"
            f"interval = {windows}\n"
            'interval_unit = "windows"\n'
            f'policy = "{options.policy}"\n'
            f"num_groups = {options.shape.num_groups if options.policy == 'hierarchical' else 1}\n"
        )
        # Ranks set their own thread and torchrun variables; a process beside them shall not join the job.
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "evenroute.tools", "rebalancer", "--config", str(config)],
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=end_with_parent,
            )
        own = cls(process, made, store)
        deadline = time.monotonic() + START_LIMIT_S
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                last = (folder / "log").read_text().strip().splitlines()[-1:]
                own.stop()
                raise RuntimeError(f"the rebalancer did not start: {' '.join(last) or 'no message'}")
            time.sleep(0.05)
        return own

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after its stated limit; removes the temporary folder."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(STOP_LIMIT_S)
        self._folder.remove()


def share_text(text: str, group: torch_dist.ProcessGroup) -> str:
    """Rank 0's `text` (at most 512 bytes) on all ranks of `group`. Collective."""
    data = torch.zeros(512, dtype=torch.uint8)
    encoded = text.encode()
    assert len(encoded) <= data.numel()
    data[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    torch_dist.broadcast(data, group=group, group_src=0)
    return bytes(data.tolist()).rstrip(b"\0").decode()
