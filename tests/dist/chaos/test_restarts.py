"""`torchrun --max-restarts`: ranks that are killed and started again go on with the rebalancer that was there (C6)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from support.chaos import job_on, rebalancer_in
from support.control_plane import child_environment, wait_for
from support.ports import free_port

KILLS = 2


def told(job, rank):
    """Run and process of a rank's latest life; the run is 0 before the first one."""
    path = job.folder / f"run-{rank}.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return 0, 0
    return found["run"], found["pid"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rendezvous", ["c10d", "static"])
def test_ranks_that_torchrun_restarts_go_on_with_the_newest_placement(tmp_path, rendezvous):
    with rebalancer_in(tmp_path) as rebalancer:
        job = job_on(tmp_path / "job", rebalancer.bind)
        path = job.folder / "options.json"
        path.write_bytes(msgspec.json.encode(job.options))
        words = ["--nproc-per-node", "2", "--max-restarts", str(KILLS)]
        if rendezvous == "c10d":
            words += ["--standalone"]
        else:
            words += ["--nnodes", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        with (job.folder / "torchrun.log").open("wb") as log:
            torchrun = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *words, "-m", "support.rank_main", str(path)],
                env=child_environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            runs = []
            for life in range(KILLS + 1):
                wait_for(
                    lambda: (
                        torchrun.poll() is not None
                        or (told(job, 0)[0] not in (0, *runs) and told(job, 0)[0] == told(job, 1)[0])
                    ),
                    240,
                    f"life {life}",
                )
                assert torchrun.poll() is None, (job.folder / "torchrun.log").read_text()[-3000:]
                run, victim = told(job, life % 2)
                runs.append(run)
                before = rebalancer.status().version
                # It plans for this run: counts come in, and all of its ranks take up what comes of them.
                wait_for(
                    lambda run=run, before=before: (
                        (found := rebalancer.status()).run == run
                        and found.version > before
                        and found.live_lowest == found.newest
                    ),
                    240,
                    f"a new placement in use in life {life}",
                )
                if life < KILLS:
                    os.kill(victim, signal.SIGKILL)
            job.stop_file.touch()
            assert torchrun.wait(timeout=240) == 0, (job.folder / "torchrun.log").read_text()[-3000:]
            assert len(set(runs)) == KILLS + 1
            found = rebalancer.status()
            assert (found.run, found.state, found.degraded) == (runs[-1], "finished", [])
        finally:
            if torchrun.poll() is None:
                os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait(60)
    job.check_counts(rebalancer.store)  # of the last life
