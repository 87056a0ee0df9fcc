"""The forward thread's cost: `agent.step()` against a bare copy-and-zero of 58 x 256 counts, in the same run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.chaos import TOML, rebalancer_in
from support.control_plane import child_environment, wait_for
from support.ports import free_port
from support.step_cost import summary

STEPS = 600


def measure(tmp_path, rebalancer, during, *, steps=STEPS, ep_size=2, step_s=0.004):
    """Run two ranks; `during(rebalancer)` happens after they have found the rebalancer. Figures of each rank."""
    agent = {"rebalancer": rebalancer.bind, "start_limit_s": 5.0, "agree_every": 4, "window_steps": 16}
    path = tmp_path / "cost.json"
    path.write_text(json.dumps({"agent": agent, "steps": steps, "step_s": step_s, "folder": str(tmp_path)}))
    port = free_port()
    processes = []
    for rank in range(ep_size):
        env = child_environment(
            RANK=str(rank), WORLD_SIZE=str(ep_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
        )
        with (tmp_path / f"rank-{rank}.log").open("ab") as log:
            processes.append(
                subprocess.Popen([sys.executable, "-m", "support.step_cost", str(path)], env=env, stderr=log)
            )
    try:
        if during is not None:
            wait_for(
                lambda: (s := rebalancer.status_or_none()) and s.state == "serving" and s.run, 60, "the job"
            )
            during(rebalancer)
        assert [process.wait(timeout=240) for process in processes] == [0] * ep_size
    finally:
        for process in processes:
            process.kill()
            process.wait(timeout=60)
    return [summary(json.loads((tmp_path / f"cost-{rank}.json").read_text())) for rank in range(ep_size)]


def stopped(rebalancer):
    rebalancer.signal(signal.SIGSTOP)


def gone(rebalancer):
    rebalancer.kill()


def slow(rebalancer):
    """Half of the time it does nothing."""
    for _ in range(6):
        rebalancer.signal(signal.SIGSTOP)
        time.sleep(0.2)
        rebalancer.signal(signal.SIGCONT)
        time.sleep(0.2)


def allowed_p99(figure):
    """Ten times the bare copy's median; where the host stalls that too, half as much again as its p99."""
    return max(10 * figure["copy_median_us"], 1.5 * figure["copy_p99_us"])


@pytest.mark.slow
@pytest.mark.parametrize("during", [None, stopped, slow, gone], ids=["there", "stopped", "slow", "gone"])
def test_a_step_costs_at_most_twice_a_bare_copy_and_zero(tmp_path, during):
    toml = TOML.replace("interval = 2\n", "interval = 1000000\n")
    with rebalancer_in(tmp_path, toml=toml) as rebalancer:
        figures = measure(tmp_path, rebalancer, during)
        rebalancer.signal(signal.SIGCONT) if rebalancer.process.poll() is None else None
    print(json.dumps(figures))
    busy = os.getloadavg()[0] > 2 * (os.cpu_count() or 1)
    assert min(f["median_ratio"] for f in figures) <= 2.0, figures
    if not busy:  # with others on the cores, the tail is theirs
        assert any(f["step_p99_us"] <= allowed_p99(f) for f in figures), figures
