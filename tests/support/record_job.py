"""A job of `support.record_rank` processes, and what they routed, to be compared with what evenroute recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from support.control_plane import child_environment, wait_for
from support.ports import free_port
from support.record_rank import RecordOptions, is_counted


class RecordJob:
    """`ep_size` ranks that route until `finish`."""

    def __init__(self, folder: Path, ep_size: int, **options):
        self.folder, self.ep_size = folder, ep_size
        self.options = RecordOptions(folder=str(folder), **options)
        self.processes: list[subprocess.Popen] = []

    def __enter__(self):
        path = self.folder / "options.json"
        path.write_bytes(msgspec.json.encode(self.options))
        port = str(free_port())
        for rank in range(self.ep_size):
            env = child_environment(
                RANK=str(rank), WORLD_SIZE=str(self.ep_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            )
            with (self.folder / f"rank-{rank}.log").open("ab") as log:
                command = [sys.executable, "-m", "support.record_rank", str(path)]
                self.processes.append(
                    subprocess.Popen(command, env=env, stderr=log, stdout=subprocess.DEVNULL)
                )
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait(timeout=60)

    def logs(self):
        return "\n".join((self.folder / f"rank-{r}.log").read_text()[-3000:] for r in range(self.ep_size))

    def rows(self, rank):
        """[(step, rows, time, key)] as routed so far."""
        path = self.folder / f"rows-{rank}.log"
        if not path.exists():
            return []
        lines = [line.split(maxsplit=3) for line in path.read_text().split("\n")[:-1]]
        return [(int(step), int(rows), float(at), key) for step, rows, at, key in lines]

    def wait_more(self, steps, limit_s=120.0):
        """Until every rank has made so many steps more than now."""
        target = max(len(self.rows(rank)) for rank in range(self.ep_size)) + steps

        def reached():
            assert all(p.poll() is None for p in self.processes), self.logs()
            return all(len(self.rows(rank)) >= target for rank in range(self.ep_size))

        wait_for(reached, limit_s, f"step {target} on all ranks")

    def finish(self, limit_s=120.0):
        """Have all ranks end at one step; their exit statuses."""
        (self.folder / "stop").touch()  # at which step is agreed among the ranks: support.job_end
        return [process.wait(timeout=limit_s) for process in self.processes]

    def routed(self, rank):
        """{step: int16 [L, T, K]} of everything that was routed and counted."""
        options = self.options
        data = np.fromfile(self.folder / f"ids-{rank}.bin", np.int16)
        found, at = {}, 0
        for step, rows, _, _ in self.rows(rank):
            size = options.num_layers * rows * options.top_k
            shape = (options.num_layers, rows, options.top_k)
            if at + size > len(data):
                break
            if is_counted(options, step):
                found[step] = data[at : at + size].reshape(shape)
            at += size
        return found
