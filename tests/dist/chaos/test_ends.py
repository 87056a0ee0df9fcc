"""Ends in awkward moments (B36): in the middle of a broadcast, and one of two torchrun agents alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from support.chaos import job_on, rebalancer_in
from support.control_plane import RebalancerProcess, child_environment, is_gone, patience, wait_for
from support.ports import free_port

# ------------------------------------------------------------- (b) SIGINT in the middle of a broadcast

RANKS = 64
READERS = f"""
import sys
from evenroute.dist.wire.messages import JobShape
from evenroute.tools.run.simulated_job import SimulatedJob
job = SimulatedJob(sys.argv[1], JobShape(92, 64, 1024, {RANKS}, 1, 2, False, "big"), period_s=0.3)
job.start(120)
while not all(rank.stored for rank in job.ranks):
    job.turn(0.01)
print("stored", flush=True)
while True:
    job.turn(0.01)
"""
PLANNER = """
import os, time
import numpy as np
from types import SimpleNamespace
from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
def plan(loads, *, current, topology, **_):
    while not os.path.exists(os.environ["GO_FILE"]):
        time.sleep(0.01)
    os.unlink(os.environ["GO_FILE"])  # one plan, however long the test takes to end it
    experts = current.num_logical_experts
    turned = Placement((current.physical_to_logical + 1) % experts, experts, topology)
    found = balancedness(rank_loads(loads, current))
    return SimpleNamespace(placement=turned, policy="turn", reason="test", before=found,
                           predicted=balancedness(np.ones((len(loads), topology.ep_size))),
                           moves=current.moved_slots(turned))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_broadcast_ends_it_in_five_seconds(tmp_path, monkeypatch, number):
    """The readers are frozen and a placement (0.4 MB) is more than a socket holds: parts of it are unsent for ever."""
    (tmp_path / "turning.py").write_text(PLANNER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("GO_FILE", str(tmp_path / "go"))
    flags = ["--interval", "1s", "--planner", "turning:plan"]
    with RebalancerProcess(tmp_path, flags=flags) as rebalancer:
        readers = subprocess.Popen(
            [sys.executable, "-c", READERS, rebalancer.address],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        try:
            assert readers.stdout.readline() == "stored\n"
            wait_for(lambda: rebalancer.status().plan_cycle >= 1, 60, "a plan is asked for")
            readers.send_signal(signal.SIGSTOP)
            (tmp_path / "go").touch()
            wait_for(lambda: rebalancer.status().version >= 1, 60, "a placement is published")
            children = planner_children(rebalancer.process.pid)
            began = time.monotonic()
            rebalancer.process.send_signal(number)
            assert rebalancer.process.wait(timeout=60) == 0
            assert time.monotonic() - began < 5.0 * patience()
            log = rebalancer.log()
            assert f"ends on signal {int(number)}" in log
            assert "published 1 placements" in log
            assert f"{RANKS} ranks are not known to hold the newest placement" in log
            assert not os.path.exists(rebalancer.address.removeprefix("ipc://"))
            assert not rebalancer.ready.exists()
            wait_for(lambda: all(map(is_gone, children)), 60, "no planner left")
        finally:
            readers.kill()
            readers.wait(timeout=60)
            readers.stdout.close()


def planner_children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        found = [int(word) for word in file.read().split()]
    assert found, "there is a planner"
    return found


# ------------------------------------------------------------------------- (c) two torchrun agents


def agent(options, port, name, node, log):
    """One of two torchrun agents, both on this host; the first one holds the meeting point."""
    words = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", name, "--local-addr", "127.0.0.1"]
    words += ["--rdzv-conf", f"is_host={int(node == 0)}"]
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, "-m", "support.rank_main", str(options)],
            env=child_environment(),
            stderr=file,
            stdout=file,
        )


def start_job(folder, address, port, name, **options):
    job = job_on(folder, address, 2, agent={"vote_limit_s": 5.0}, **options)
    path = folder / "options.json"
    path.write_bytes(msgspec.json.encode(job.options))
    job.processes = [agent(path, port, name, node, folder / f"agent-{node}.log") for node in (0, 1)]
    return job


def end_all(processes):
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=60)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1], ids=["with the meeting point", "without it"])
def test_one_of_two_agents_is_stopped_and_the_job_starts_again_at_once(tmp_path, victim):
    """The other agent's rank names who is missing and ends in time; the next job meets at the same port at once."""
    port = free_port()
    started = []
    with rebalancer_in(tmp_path) as rebalancer:
        try:
            first = start_job(tmp_path / "first", rebalancer.bind, port, "first")
            started += first.processes
            wait_for(lambda: all(len(first.steps(rank)) > 100 for rank in range(2)), 240, "steps")
            pids = [json.loads((first.folder / f"run-{rank}.json").read_text())["pid"] for rank in range(2)]
            first.processes[victim].send_signal(signal.SIGTERM)
            began = time.monotonic()
            statuses = [process.wait(timeout=150) for process in first.processes]
            assert time.monotonic() - began < 45 * patience()
            assert statuses[1 - victim] != 0
            wait_for(lambda: all(map(is_gone, pids)), 60, "no rank is left")
            log = (first.folder / f"agent-{1 - victim}.log").read_text()
            assert "VoteError: vote " in log, log
            first.check_steps()

            second = start_job(tmp_path / "second", rebalancer.bind, port, "second", endless=False, steps=300)
            started += second.processes
            assert [process.wait(timeout=240) for process in second.processes] == [0, 0], second.folder
            second.check_steps()
            second.check_counts(rebalancer.store)
            assert second.run_id() != first.run_id()
        finally:
            end_all(started)
