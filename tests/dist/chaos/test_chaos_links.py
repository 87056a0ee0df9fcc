"""Chaos between ranks and rebalancer: cut, slow, lossy, duplicating and reordering links, alone and at random."""

import os
import random
import signal
import time

import pytest

from support.chaos import (
    TOML,
    alive,
    end_and_check,
    job_on,
    rebalancer_in,
    settle,
    versions,
    wait_new_version,
)
from support.control_plane import patience, wait_for
from support.link_proxy import LinkProxy


def linked_job(tmp_path, rebalancer, proxies, ep_size=2, **options):
    """A job whose rank r reaches the rebalancer through proxies[r]; rank 0 through the first."""
    agents = {rank: {"rebalancer": proxy.front} for rank, proxy in proxies.items()}
    job = job_on(tmp_path / "job", rebalancer.bind, ep_size, **options)
    job.agents = agents
    return job


def proxy_for(tmp_path, rebalancer, name, **faults):
    return LinkProxy(f"ipc://{tmp_path}/{name}.sock", rebalancer.bind, **faults)


def test_one_rank_cannot_get_the_placement_so_all_stay_and_status_names_it(tmp_path):
    """B26, second part: only what comes down to rank 2 is lost; its statuses and windows arrive."""
    with (
        rebalancer_in(tmp_path, toml=TOML.replace("interval = 2", "interval = 1")) as rebalancer,
        proxy_for(tmp_path, rebalancer, "p") as proxy,
        linked_job(tmp_path, rebalancer, {2: proxy}, 4, step_s=0.02) as job,
    ):
        wait_new_version(job)
        proxy.cut_down = True
        settle(0.5)
        kept = versions(job)[-1]
        time.sleep(5.0)
        alive(job)
        at = versions(job)
        assert at[-1] == kept or len(at) <= at.index(kept) + 2, "a version was taken up without rank 2"
        wait_for(
            lambda: any("rank 2 did not get it" in reason for reason in rebalancer.status().degraded),
            60,
            "status names rank 2",
        )
        proxy.calm()
        wait_new_version(job)
        end_and_check(job, [rebalancer.store])


@pytest.mark.slow
def test_a_delay_of_two_seconds_to_one_rank(tmp_path):
    """B26, first part: versions follow each other quickly, one rank hears of them two seconds later."""
    with (
        rebalancer_in(tmp_path) as rebalancer,
        proxy_for(tmp_path, rebalancer, "p", delay_s=(2.0, 2.0)) as proxy,
    ):
        with linked_job(tmp_path, rebalancer, {2: proxy}, 3, agent={"start_limit_s": 8.0}) as job:
            wait_new_version(job, 60)
            wait_new_version(job, 60)
            proxy.calm()
            settle(2.5)
            end_and_check(job, [rebalancer.store])
        per_step = [s[2] for s in job.steps(0)]
        assert max(per_step) < 1e6, "a step waited for the slow link"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_network_that_drops_duplicates_and_reorders(tmp_path, seed):
    faults = {"seed": seed, "drop": 0.3, "duplicate": 0.3, "delay_s": (0.0, 0.3)}
    with (
        rebalancer_in(tmp_path) as rebalancer,
        proxy_for(tmp_path, rebalancer, "p", **faults) as proxy,
        linked_job(tmp_path, rebalancer, {0: proxy, 1: proxy}, agent={"start_limit_s": 15.0}) as job,
    ):
        wait_new_version(job, 60)
        wait_new_version(job, 60)
        assert proxy.dropped > 10
        assert proxy.duplicated > 10
        proxy.calm()
        settle(1.5)
        end_and_check(job, [rebalancer.store])


@pytest.mark.slow
def test_all_links_cut_for_three_seconds(tmp_path):
    with (
        rebalancer_in(tmp_path) as rebalancer,
        proxy_for(tmp_path, rebalancer, "p") as proxy,
        linked_job(tmp_path, rebalancer, {0: proxy, 1: proxy}) as job,
    ):
        wait_new_version(job)
        for _ in range(2):
            proxy.cut = True
            at = len(job.steps(0))
            time.sleep(3.0)
            assert len(job.steps(0)) - at > 100 / (2 * patience()), "routing stood still"
            proxy.calm()
            wait_new_version(job)
        end_and_check(job, [rebalancer.store])


@pytest.mark.slow
def test_the_proxy_itself_dies_and_comes_back(tmp_path):
    """The connection is lost, not only its messages."""
    with rebalancer_in(tmp_path) as rebalancer:
        with proxy_for(tmp_path, rebalancer, "p") as first:
            job = linked_job(tmp_path, rebalancer, {0: first, 1: first})
            job.start()
            try:
                wait_new_version(job)
            except BaseException:
                job.__exit__()
                raise
        with job_ending(job), proxy_for(tmp_path, rebalancer, "p"):
            time.sleep(1.0)
            wait_new_version(job)
            end_and_check(job, [rebalancer.store])


class job_ending:
    def __init__(self, job):
        self.job = job

    def __enter__(self):
        return self.job

    def __exit__(self, *_):
        self.job.__exit__()


def random_fault(rng, rebalancer, proxy, job):
    """One fault and its end; returns its name."""
    kind = rng.choice(["kill", "term", "stop", "cut", "lossy", "slow", "planner", "rank-stop"])
    pause = rng.uniform(0.2, 2.0)
    if kind in ("kill", "term"):
        rebalancer.signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        rebalancer.process.wait(timeout=60)
        time.sleep(pause)
        rebalancer.start()
    elif kind == "stop":
        rebalancer.signal(signal.SIGSTOP)
        time.sleep(pause)
        rebalancer.signal(signal.SIGCONT)
    elif kind == "cut":
        proxy.cut = True
        time.sleep(pause)
    elif kind == "lossy":
        proxy.drop, proxy.duplicate = rng.uniform(0, 0.6), rng.uniform(0, 0.5)
        time.sleep(pause)
    elif kind == "slow":
        proxy.delay_s = (0.0, rng.uniform(0.1, 1.0))
        time.sleep(pause)
    elif kind == "planner":
        pid = rebalancer.process.pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            for child in file.read().split():
                os.kill(int(child), signal.SIGKILL)
    else:
        process = rng.choice(job.processes)
        process.send_signal(signal.SIGSTOP)
        time.sleep(min(pause, 1.0))
        process.send_signal(signal.SIGCONT)
    proxy.calm()
    return kind


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_faults_for_a_stated_time(tmp_path, seed):
    """EVENROUTE_CHAOS_SECONDS (default 20) seconds of faults one after another; then all promises are checked."""
    rng = random.Random(seed)
    seconds = float(os.environ.get("EVENROUTE_CHAOS_SECONDS", "20"))
    done = []
    with (
        rebalancer_in(tmp_path) as rebalancer,
        proxy_for(tmp_path, rebalancer, "p", seed=seed) as proxy,
        linked_job(tmp_path, rebalancer, {0: proxy, 1: proxy, 2: proxy}, 3) as job,
    ):
        wait_new_version(job)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done.append(random_fault(rng, rebalancer, proxy, job))
            alive(job)
            time.sleep(rng.uniform(0.0, 1.0))
        before = versions(job)[-1]
        wait_for(
            lambda: alive(job) and versions(job)[-1] > before,
            60,
            f"a new version after {done} with seed {seed}",
        )
        settle(1.0)
        end_and_check(job, [rebalancer.store], gap_s=6.0)
