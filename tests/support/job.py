"""A test's job of real rank processes, and what is promised of it, checked from the ranks' own logs."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np

from evenroute.eplb.store.writer import StoreReader
from support.control_plane import child_environment, patience, wait_for
from support.ports import free_port
from support.rank_main import RankOptions


class Job:
    """`ep_size` rank processes with torchrun's environment, but no launcher between them and the test."""

    def __init__(self, folder, ep_size, *, agents=None, **options):
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True, parents=True)
        self.ep_size = ep_size
        self.stop_file = self.folder / "stop"
        if options.pop("endless", False):
            options["until_file"] = str(self.stop_file)
        self.options = RankOptions(folder=str(self.folder), **options)
        self.agents = agents or {}
        self.processes = []
        self._steps, self._read_to = {}, {}

    def start(self):
        port = free_port()
        for rank in range(self.ep_size):
            own = msgspec.structs.replace(
                self.options, agent={**self.options.agent, **self.agents.get(rank, {})}
            )
            path = self.folder / f"options-{rank}.json"
            path.write_bytes(msgspec.json.encode(own))
            env = child_environment(
                RANK=str(rank), WORLD_SIZE=str(self.ep_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            )
            with (self.folder / f"rank-{rank}.log").open("ab") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "support.rank_main", str(path)],
                        env=env,
                        stderr=log,
                        stdout=subprocess.DEVNULL,
                    )
                )
        return self

    def log(self, rank):
        return (self.folder / f"rank-{rank}.log").read_text()

    def logs(self):
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[-3000:]}" for rank in range(self.ep_size))

    def steps(self, rank):
        """[(step, time, microseconds in agent.step, table digest, key text)] as logged so far; cheap to ask again."""
        path = self.folder / f"steps-{rank}.log"
        if path.exists():
            known = self._steps.setdefault(rank, [])
            with path.open("rb") as log:
                log.seek(self._read_to.get(rank, 0))
                whole, newline, _ = log.read().rpartition(b"\n")
            self._read_to[rank] = self._read_to.get(rank, 0) + len(whole) + len(newline)
            for line in whole.decode().split("\n") if newline else ():
                a, b, c, d, e = line.split()
                known.append((int(a), float(b), float(c), int(d), e))
        return list(self._steps.get(rank, ()))

    def wait_step(self, step, limit_s=150.0):
        def reached():
            assert all(p.poll() in (None, 0) for p in self.processes), self.logs()
            return all(len(self.steps(rank)) > step for rank in range(self.ep_size))

        wait_for(reached, limit_s, f"all ranks at step {step}")

    def wait_key(self, condition, limit_s=150.0, what="a key"):
        """Until the last step of rank 0 has one key for all layers and `condition((epoch, version))`."""

        def reached():
            assert all(p.poll() in (None, 0) for p in self.processes), self.logs()
            steps = self.steps(0)
            keys = {tuple(map(int, k.split("."))) for k in steps[-1][4].split(";")} if steps else set()
            return len(keys) == 1 and condition(next(iter(keys)))

        wait_for(reached, limit_s, what)

    def finish(self, limit_s=120.0):
        """Ask for the end (an endless job) and wait for it; exit statuses by rank."""
        self.stop_file.touch()  # at which step is agreed among the ranks: support.job_end
        return self.wait(limit_s)

    def wait(self, limit_s=120.0):
        return [process.wait(timeout=limit_s) for process in self.processes]

    def run_id(self):
        return json.loads((self.folder / "run-0.json").read_text())["run"]

    def total(self, rank):
        shape = (self.options.num_layers, self.options.num_experts)
        return np.array(np.memmap(self.folder / f"total-{rank}.bin", np.int64, "r", shape=shape))

    def totals(self):
        return sum(self.total(rank) for rank in range(self.ep_size))

    # ------------------------------------------------------------------------------- what is promised

    def check_steps(self):
        """Every step that several ranks logged: the same keys and tables on all; keys never go back."""
        by_rank = [self.steps(rank) for rank in range(self.ep_size)]
        first = by_rank[0]
        for rank, steps in enumerate(by_rank):
            assert [s[0] for s in steps] == list(range(len(steps))), f"rank {rank} skipped a step"
            for mine, other in zip(first, steps, strict=False):
                assert (mine[3], mine[4]) == (other[3], other[4]), f"step {mine[0]}: rank 0 and {rank} differ"
        last = None
        for step in first:
            keys = [tuple(map(int, k.split("."))) for k in step[4].split(";")]
            if last is not None:
                assert all(b >= a for a, b in zip(last, keys, strict=True)), (
                    f"step {step[0]}: a key went back"
                )
            last = keys
        return by_rank

    def check_gap(self, limit_s):
        """The longest time between two steps of a rank is below `limit_s`, longer on a busy host."""
        limit_s *= patience()
        for rank in range(self.ep_size):
            times = [s[1] for s in self.steps(rank)]
            gap = max((b - a for a, b in itertools.pairwise(times)), default=0.0)
            assert gap < limit_s, f"rank {rank} stood still for {gap:.2f} s"

    def check_counts(self, store):
        """taken = stored, exactly, for a job whose ranks all ended with everything acknowledged."""
        with StoreReader(store) as reader:
            _, stored = reader.total_counts(self.run_id())
        np.testing.assert_array_equal(stored, self.totals())

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
                process.wait(timeout=60)
