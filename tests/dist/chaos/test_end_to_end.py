"""Two gloo ranks, a real rebalancer over ipc: counts arrive, placements switch, a restarted rebalancer is taken up."""

import json
import time

import pytest

from evenroute.eplb.store.writer import StoreReader
from support.control_plane import RebalancerProcess, wait_for
from support.job import Job

AGENT = {
    "top_k": 1,
    "window_steps": 10,
    "agree_every": 4,
    "start_limit_s": 5.0,
    "heartbeat_s": 0.3,
    "resend_s": 0.3,
}
FLAGS = ["--interval", "3w", "--planner", "support.stub_planner:plan"]


@pytest.fixture
def rebalancer(tmp_path):
    with RebalancerProcess(tmp_path, flags=FLAGS) as process:
        yield process


def test_counts_arrive_and_all_ranks_switch_at_the_same_step(tmp_path, rebalancer):
    steps = 260
    with Job(tmp_path / "job", 2, agent={**AGENT, "rebalancer": rebalancer.bind}, steps=steps) as job:
        assert job.wait(200) == [0, 0], job.logs()
    job.check_steps()
    job.check_counts(rebalancer.store)
    keys = [key for *_, key in job.steps(0)]
    assert len(set(keys)) >= 3, "at least two switches"
    for rank in range(2):
        prepared = json.loads((tmp_path / "job" / f"end-{rank}.json").read_text())["prepared"]
        assert len(prepared) >= 2, "what is costly in a switch is done as its placement arrives"
        assert not any(note["live"] or note["thread"] == "MainThread" for note in prepared), prepared
    status = rebalancer.status()
    assert status.counters["windows_missing"] == 0
    assert status.placements["published"] >= 2
    with StoreReader(rebalancer.store) as reader:
        rows, states = list(reader.windows()), reader.rank_states(job.run_id())
        assert [(state.first_step, state.last_step, state.missing) for state in states] == [
            (0, steps - 1, 0)
        ] * 2
        assert sum(row.rank_steps for row in rows) == 2 * steps, "every step of both ranks, once"
        # A rank merges what it could not send behind a slow disk; its windows then end at steps of their own.
        none_merged = all(state.num_windows == steps // AGENT["window_steps"] for state in states)
        assert all(row.complete for row in rows) or not none_merged
        newest = reader.newest_placement()
    assert newest.balancedness_predicted > newest.balancedness_before


def test_kill_9_of_the_rebalancer_leaves_no_gap_and_its_next_life_is_taken_up(tmp_path, rebalancer):
    with Job(tmp_path / "job", 2, agent={**AGENT, "rebalancer": rebalancer.bind}, endless=True) as job:
        job.wait_key(lambda key: key[1] >= 2, what="a switch in the first life")
        first = rebalancer.status().epoch
        rebalancer.kill()
        at = len(job.steps(0))
        job.wait_step(at + 60)
        rebalancer.start()
        job.wait_key(lambda key: key[0] > first, what="the next life's placement")
        status = wait_for(lambda: (s := rebalancer.status()).state == "serving" and s, 10, "serving")
        assert status.epoch > first
        time.sleep(0.5)
        assert job.finish() == [0, 0], job.logs()
    job.check_steps()
    job.check_gap(1.5)
    job.check_counts(rebalancer.store)
