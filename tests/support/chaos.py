"""What the chaos scenarios share: a job and a rebalancer that switch often, and what must hold after each."""

from __future__ import annotations

import json
import time

import numpy as np

from evenroute.eplb.store.writer import StoreReader
from support.control_plane import RebalancerProcess, wait_for
from support.job import Job
from support.rank_main import step_counts

AGENT = {
    "top_k": 1,
    "window_steps": 10,
    "agree_every": 2,
    "start_limit_s": 3.0,
    "heartbeat_s": 0.2,
    "resend_s": 0.3,
    "vote_limit_s": 30.0,
    "close_limit_s": 4.0,
}
TOML = """
[rebalancer]
max_rank_silence_s = 2.0
version_limit_s = 2.0
[planner]
interval = 2
interval_unit = "windows"
function = "support.stub_planner:plan"
time_limit_s = 3.0
"""


def rebalancer_in(folder, *, toml=TOML, **options):
    folder.mkdir(exist_ok=True, parents=True)
    return RebalancerProcess(folder, toml=toml, **options)


def job_on(folder, address, ep_size=2, *, agent=None, **options):
    settings = {**AGENT, "rebalancer": address, **(agent or {})}
    defaults = {"endless": True, "step_s": 0.01, "num_slots": -(-20 // ep_size) * ep_size}
    return Job(folder, ep_size, agent=settings, **{**defaults, **options})


def versions(job):
    """Keys that were common to all layers of rank 0, in order, without repeats."""
    found = []
    for *_, text in job.steps(0):
        keys = {tuple(map(int, key.split("."))) for key in text.split(";")}
        if len(keys) == 1 and (not found or found[-1] != next(iter(keys))):
            found.append(next(iter(keys)))
    return found


LIMIT_S = 60.0
START_LIMIT_S = 150.0  # several interpreters import torch at once, perhaps on a busy host


def wait_started(job):
    """Until every rank has made a step."""
    wait_for(
        lambda: alive(job) and all(job.steps(rank) for rank in range(job.ep_size)),
        START_LIMIT_S,
        "first steps",
    )


def wait_new_version(job, limit_s=LIMIT_S, what="a new version in use"):
    """Until rank 0 has switched once more than now."""
    wait_started(job)
    before = len(versions(job))
    wait_for(lambda: alive(job) and len(versions(job)) > before, limit_s, what)


def alive(job):
    assert all(process.poll() is None for process in job.processes), job.logs()
    return True


def wait_epoch_above(job, epoch, limit_s=LIMIT_S):
    wait_for(
        lambda: alive(job) and versions(job) and versions(job)[-1][0] > epoch,
        limit_s,
        "a higher epoch in use",
    )


def end_and_check(job, stores, *, gap_s=2.0):
    """End the job; every promise: same keys at each step, no way back, no standstill, counts stored exactly once."""
    assert job.finish(150) == [0] * job.ep_size, job.logs()
    job.check_steps()
    job.check_gap(gap_s)
    assert all(end(job, rank)["all_stored"] for rank in range(job.ep_size)), job.logs()
    check_stored(job, stores)


def end(job, rank):
    return json.loads((job.folder / f"end-{rank}.json").read_text())


def check_stored(job, stores):
    """taken = stored, over the stores that the job's rebalancers had."""
    total = 0
    for store in stores:
        with StoreReader(store) as reader:
            total = total + (reader.total_counts(job.run_id())[1] if reader.jobs() else 0)
    np.testing.assert_array_equal(total, job.totals())


def check_stored_of_the_dead(job, store):
    """What is stored of each rank is exactly its counts up to the last step that the store states for it.

    So what a dead rank took with it is what it routed after that step: stated, and never guessed.
    Returns the steps lost, by rank.
    """
    lost = {}
    with StoreReader(store) as reader:
        states = {state.rank: state for state in reader.rank_states(job.run_id())}
        _, stored = reader.total_counts(job.run_id())
    expected = 0
    for rank in range(job.ep_size):
        routed = len(job.steps(rank))
        last = states[rank].last_step if rank in states else -1
        assert last < routed
        for step in range(last + 1):
            expected = expected + step_counts(job.options, rank, step)
        if rank in states:
            assert states[rank].tokens == job.options.tokens * (last + 1)
            assert states[rank].missing == 0
        lost[rank] = routed - 1 - last
    np.testing.assert_array_equal(stored, expected)
    return lost


def settle(seconds=0.6):
    """Let heartbeats and acknowledgements pass."""
    time.sleep(seconds)
