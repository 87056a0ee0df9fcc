"""Chaos, the ranks' side: killed, frozen, stuck, late, told to end; who stays leaves in time and names who did not."""

import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from support.chaos import (
    check_stored_of_the_dead,
    end,
    end_and_check,
    job_on,
    rebalancer_in,
    settle,
    versions,
    wait_new_version,
)
from support.control_plane import child_environment, is_gone, patience, wait_for


def seconds_to_the_message(job, ranks):
    """From a rank's last step to its last word; the end of an interpreter on a busy host is not counted."""
    return max((job.folder / f"rank-{rank}.log").stat().st_mtime - job.steps(rank)[-1][1] for rank in ranks)


def check_no_process_left(job):
    for process in job.processes:
        assert not os.path.exists(f"/proc/{process.pid}"), "a process of the job is left"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_kill_9_of_a_rank_ends_the_others_in_time_and_names_it(tmp_path, victim):
    """B28 (b). What it took with it is stated: its counts up to the last step in the store are there, exactly."""
    with rebalancer_in(tmp_path) as rebalancer:
        agent = {"vote_limit_s": 5.0}
        with job_on(tmp_path / "job", rebalancer.bind, 3, agent=agent) as job:
            wait_new_version(job)
            job.processes[victim].kill()
            statuses = [p.wait(timeout=60) for p in job.processes]
            assert seconds_to_the_message(job, {0, 1, 2} - {victim}) < 10
            assert all(status != 0 for status in statuses)
            for rank in {0, 1, 2} - {victim}:
                log = job.log(rank)
                assert "VoteError: vote " in log, log
                # Rank 0 hosts the job's key-value store here; with it goes the roll call.
                named = f"missing: rank {victim}" if victim else "the job's store is gone too"
                assert named in log, log
                assert "version" in log
            settle(0.5)
            job.check_steps()
            lost = check_stored_of_the_dead(job, rebalancer.store)
            assert all(steps <= 60 for steps in lost.values()), lost
            check_no_process_left(job)
        reasons = wait_for(lambda: rebalancer.status().degraded, 10, "degraded")
        assert "not heard for 2 s" in reasons[0]


@pytest.mark.slow
def test_under_torchrun_the_launcher_ends_too_and_nothing_is_left(tmp_path):
    """B28 (b): three ranks under torchrun, one gets SIGKILL: it ends within 30 s, not with 0, and leaves no process."""
    with rebalancer_in(tmp_path) as rebalancer:
        job = job_on(tmp_path / "job", rebalancer.bind, 3, agent={"vote_limit_s": 5.0})
        options = tmp_path / "options.json"
        options.write_bytes(msgspec.json.encode(job.options))
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        with (tmp_path / "torchrun.log").open("wb") as log:
            launcher = subprocess.Popen(
                [sys.executable, *words, "-m", "support.rank_main", str(options)],
                env=child_environment(),
                stderr=log,
                stdout=log,
            )
        try:
            wait_for(lambda: all(len(job.steps(rank)) > 50 for rank in range(3)), 200, "steps under torchrun")
            pids = [json.loads((job.folder / f"run-{rank}.json").read_text())["pid"] for rank in range(3)]
            os.kill(pids[1], signal.SIGKILL)
            began = time.monotonic()
            assert launcher.wait(timeout=150) != 0
            assert time.monotonic() - began < 30 * patience()
            wait_for(lambda: all(map(is_gone, pids)), 60, "no rank is left")
        finally:
            launcher.kill()
            launcher.wait(timeout=60)
        job.check_steps()


@pytest.mark.slow
def test_sigstop_of_a_rank_for_two_seconds(tmp_path):
    with rebalancer_in(tmp_path) as rebalancer, job_on(tmp_path / "job", rebalancer.bind, 3) as job:
        wait_new_version(job)
        job.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        job.processes[1].send_signal(signal.SIGCONT)
        wait_new_version(job)
        end_and_check(job, [rebalancer.store], gap_s=4.0)


@pytest.mark.slow
def test_a_rank_that_never_enters_is_waited_for_as_long_as_stated(tmp_path):
    """B28 (a): limit 3 s; the others leave within 10 s and name operation, version and rank."""
    with rebalancer_in(tmp_path) as rebalancer:
        agent = {"vote_limit_s": 3.0}
        options = {"stuck_rank": 1, "stuck_at": 100, "stuck_s": 60.0}
        with job_on(tmp_path / "job", rebalancer.bind, 3, agent=agent, **options) as job:
            wait_for(lambda: len(job.steps(1)) >= 100, 150, "rank 1 is stuck")
            assert job.processes[0].wait(timeout=60) != 0
            assert job.processes[2].wait(timeout=60) != 0
            assert seconds_to_the_message(job, (0, 2)) < 10
            for rank in (0, 2):
                assert "not reduced within 3 s; missing: rank 1" in job.log(rank), job.log(rank)
                assert "(step 10" in job.log(rank)


@pytest.mark.slow
@pytest.mark.parametrize(("late_s", "limit_s"), [(3.0, 100.0), (200.0, 20.0)])
def test_a_rank_that_comes_late_is_waited_for_up_to_the_limit(tmp_path, late_s, limit_s):
    """B28 (c)."""
    with rebalancer_in(tmp_path) as rebalancer:
        options = {"late_rank": 3, "late_s": late_s, "join_limit_s": limit_s, "endless": False, "steps": 50}
        with job_on(tmp_path / "job", rebalancer.bind, 4, **options) as job:
            if late_s < limit_s:
                assert job.wait(200) == [0, 0, 0, 0], job.logs()
                job.check_steps()
                return
            for rank in (0, 1, 2):
                assert job.processes[rank].wait(timeout=150) != 0
            assert "3/4 ranks joined within 20 s, missing: rank 3" in job.log(0), job.log(0)


@pytest.mark.slow
def test_sigterm_while_blocked_in_a_vote_ends_at_once(tmp_path):
    """B36 (d): a rank that waits for the others' vote in native code answers SIGTERM."""
    with rebalancer_in(tmp_path) as rebalancer:
        options = {"stuck_rank": 1, "stuck_at": 60, "stuck_s": 60.0}
        with job_on(tmp_path / "job", rebalancer.bind, 2, **options) as job:
            wait_for(lambda: len(job.steps(1)) >= 60, 150, "rank 1 is stuck")
            time.sleep(0.5)
            began = time.monotonic()
            job.processes[0].send_signal(signal.SIGTERM)
            assert job.processes[0].wait(timeout=60) == -signal.SIGTERM
            assert time.monotonic() - began < 5 * patience()


@pytest.mark.slow
def test_ranks_end_in_time_while_the_rebalancer_is_stopped_and_count_what_is_unsent(tmp_path):
    """B36 (a): close waits its stated limit, then says how much was not known to be stored."""
    with rebalancer_in(tmp_path) as rebalancer:
        with job_on(tmp_path / "job", rebalancer.bind, agent={"close_limit_s": 1.0}) as job:
            wait_new_version(job)
            rebalancer.signal(signal.SIGSTOP)
            time.sleep(1.0)
            assert job.finish(60) == [0, 0], job.logs()
            for rank in (0, 1):
                assert 1.0 <= end(job, rank)["close_s"] < 5.0
                assert not end(job, rank)["all_stored"]
                assert "not known to be stored" in job.log(rank), job.log(rank)
            rebalancer.signal(signal.SIGCONT)
            settle(1.0)
        check_stored_of_the_dead(job, rebalancer.store)


@pytest.mark.slow
def test_uncounted_steps_are_no_load(tmp_path):
    """Warm-up steps (`count=False`) are routed and agreed on like all others, and leave no count behind."""
    with rebalancer_in(tmp_path) as rebalancer:
        with job_on(tmp_path / "job", rebalancer.bind, 2, uncounted_steps=33) as job:
            wait_new_version(job)
            end_and_check(job, [rebalancer.store])
        assert versions(job)[0] == (0, 0)


@pytest.mark.slow
def test_an_idle_rank_reports_zero_and_not_missing(tmp_path):
    """B09 (b) on the control plane: rank 1 has no tokens at all, and takes part in everything."""
    with rebalancer_in(tmp_path) as rebalancer:
        with job_on(tmp_path / "job", rebalancer.bind, 2, idle_rank=1) as job:
            wait_new_version(job)
            status = rebalancer.status()
            assert status.ranks[1].tokens == 0
            assert status.ranks[1].last_seq > 0
            assert not status.degraded
            end_and_check(job, [rebalancer.store])
        assert not job.total(1).any()
