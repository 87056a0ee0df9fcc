"""Chaos, the rebalancer's side: killed, frozen, late, doubled, without room on its disk, with a clock that jumps."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenroute.eplb.store.writer import StoreReader
from support.chaos import (
    TOML,
    alive,
    check_stored,
    end_and_check,
    job_on,
    rebalancer_in,
    settle,
    versions,
    wait_epoch_above,
    wait_new_version,
)
from support.control_plane import child_environment, patience, wait_for


def test_sigstop_for_five_seconds_then_the_stream_is_whole_again(tmp_path):
    """B23: routing is not blocked, memory stays bounded, nothing is lost, no restart is needed."""
    with rebalancer_in(tmp_path) as rebalancer, job_on(tmp_path / "job", rebalancer.bind) as job:
        wait_new_version(job)
        rebalancer.signal(signal.SIGSTOP)
        at = len(job.steps(0))
        time.sleep(5.0)
        assert len(job.steps(0)) - at > 150 / (2 * patience()), "routing stood still"
        rebalancer.signal(signal.SIGCONT)
        wait_new_version(job)
        status = rebalancer.status()
        assert status.counters["windows_missing"] == 0
        end_and_check(job, [rebalancer.store])
    with StoreReader(rebalancer.store) as reader:
        # Only unsent windows merge: one of them covers the time of the standstill.
        assert max(w.last_step - w.first_step for w in reader.windows()) > 100 / (2 * patience())


@pytest.mark.slow
def test_three_lives_on_one_store(tmp_path):
    with rebalancer_in(tmp_path) as rebalancer, job_on(tmp_path / "job", rebalancer.bind) as job:
        epochs = []
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            wait_new_version(job)
            epochs.append(rebalancer.status().epoch)
            rebalancer.signal(number)
            rebalancer.process.wait(timeout=60)
            rebalancer.start()
            wait_epoch_above(job, epochs[-1])
        assert epochs == sorted(set(epochs))
        end_and_check(job, [rebalancer.store])


@pytest.mark.slow
def test_a_lost_store_heals_from_the_ranks(tmp_path):
    """The next life has never heard of the job: it takes an epoch above the ranks', asks for their rows, goes on."""
    with rebalancer_in(tmp_path) as rebalancer, job_on(tmp_path / "job", rebalancer.bind) as job:
        wait_new_version(job)
        settle()
        first = rebalancer.status()
        rebalancer.kill()
        kept = tmp_path / "lost"
        kept.mkdir()
        for path in tmp_path.glob("run.db*"):
            shutil.move(path, kept / path.name)
        rebalancer.start()
        wait_epoch_above(job, first.epoch)
        settle()
        status = rebalancer.status()
        assert status.counters["windows_missing"] > 0
        assert all(rank.missing_windows for rank in status.ranks)
        assert job.finish(60) == [0, 0], job.logs()
        job.check_steps()
        job.check_gap(2.0)
        # Nothing of it was stored twice, nothing is missing: the two stores together hold all.
        check_stored(job, [kept / "run.db", rebalancer.store])


@pytest.mark.slow
def test_a_job_that_starts_first_is_found_later(tmp_path):
    """B22 (d): it starts on its own placement; the rebalancer says from when it has data; nothing is lost."""
    rebalancer = rebalancer_in(tmp_path)
    with job_on(tmp_path / "job", rebalancer.bind, agent={"start_limit_s": 0.5}) as job:
        job.wait_step(100)
        assert versions(job) == [(0, 0)]
        with rebalancer:
            wait_new_version(job)

            def first_steps():
                return [rank.first_step for rank in rebalancer.status().ranks]

            # The version in use may be the rebalancer's first word, sent before a window came.
            wait_for(lambda: None not in first_steps(), 30, "windows of both ranks")
            assert first_steps() == [0, 0]
            end_and_check(job, [rebalancer.store])


@pytest.mark.slow
def test_a_frozen_master_that_wakes_up_is_ignored(tmp_path):
    """Its locks do not reach the other one (a lease that ran out), which leads: it ends itself and moves nobody."""
    old = rebalancer_in(tmp_path, name="old", bind=f"ipc://{tmp_path}/r.sock")
    with old, job_on(tmp_path / "job", old.bind) as job:
        wait_new_version(job)
        first = old.status().epoch
        old.signal(signal.SIGSTOP)
        with rebalancer_in(tmp_path, name="new", bind=old.bind, store=old.store, without_locks=True):
            wait_epoch_above(job, first, 40)
            second = versions(job)[-1][0]
            old.signal(signal.SIGCONT)
            assert old.process.wait(timeout=60) == 1
            assert "this life ends" in old.log()
            # The old one must not have taken the new one's socket with it.
            wait_new_version(job)
            assert all(key[0] >= second for key in versions(job)[-2:])
            end_and_check(job, [old.store])


@pytest.mark.slow
def test_take_over_on_request(tmp_path):
    first = rebalancer_in(tmp_path, name="first", bind=f"ipc://{tmp_path}/r.sock")
    with first, job_on(tmp_path / "job", first.bind) as job:
        wait_new_version(job)
        epoch = first.status().epoch
        second = rebalancer_in(
            tmp_path, name="second", bind=first.bind, store=first.store, flags=["--take-over"]
        )
        with second:
            assert first.process.wait(timeout=60) == 0
            wait_epoch_above(job, epoch)
            end_and_check(job, [second.store])


@pytest.mark.slow
def test_no_room_on_the_disk_counts_errors_and_routing_goes_on(tmp_path):
    def ignore():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    with (
        rebalancer_in(tmp_path, preexec=ignore) as rebalancer,
        job_on(tmp_path / "job", rebalancer.bind) as job,
    ):
        wait_new_version(job)
        wal = Path(f"{rebalancer.store}-wal")
        soft = max(wal.stat().st_size, Path(rebalancer.store).stat().st_size)
        resource.prlimit(rebalancer.process.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        wait_for(lambda: rebalancer.status().counters["store_errors"] > 2, 20, "store errors counted")
        at = len(job.steps(0))
        time.sleep(1.0)
        assert len(job.steps(0)) - at > 30 / (2 * patience()), "routing stood still"
        status = rebalancer.status()
        assert any("store:" in reason for reason in status.degraded)
        resource.prlimit(rebalancer.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        settle(1.5)
        end_and_check(job, [rebalancer.store])


@pytest.mark.slow
@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_a_clock_that_jumps_changes_nothing_that_counts(tmp_path, jump):
    offset = tmp_path / "offset"
    offset.write_text("0")
    rebalancer = rebalancer_in(tmp_path)
    config = tmp_path / "clock.toml"
    config.write_text(TOML)
    ready = rebalancer.ready
    words = ["rebalancer", "--bind", rebalancer.bind, "--store", rebalancer.store, "--config", config]
    with (tmp_path / "clock.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "support.jumping_clock", *map(str, words), "--ready-file", str(ready)],
            env=child_environment(CLOCK_OFFSET_FILE=str(offset)),
            stderr=log,
        )
    try:
        wait_for(ready.exists, 30, "start")
        rebalancer.address = rebalancer.bind
        with job_on(tmp_path / "job", rebalancer.bind) as job:
            wait_new_version(job)
            offset.write_text(str(jump))
            wait_new_version(job)
            wait_new_version(job)
            status = rebalancer.status()
            assert not status.degraded
            assert all(rank.heard_s_ago < 5 for rank in status.ranks)
            end_and_check(job, [rebalancer.store])
    finally:
        process.kill()
        process.wait(timeout=60)


@pytest.mark.slow
def test_a_misbehaving_planner_leaves_the_placement_in_use(tmp_path, monkeypatch):
    """B29: good, raises, hangs, crashes, garbage, then good again; two ranks route all the time."""
    script = tmp_path / "script"
    script.write_text("good raise hang crash garbage bad")
    monkeypatch.setenv("STUB_PLANNER_SCRIPT", str(script))
    toml = TOML.replace("support.stub_planner:plan", "support.stub_planner:scripted")
    with rebalancer_in(tmp_path, toml=toml) as rebalancer, job_on(tmp_path / "job", rebalancer.bind) as job:
        wait_new_version(job)
        kept = versions(job)[-1]
        degraded = []

        def all_failed():
            alive(job)
            status = rebalancer.status()
            assert status.until_next_plan >= 0
            degraded.extend(status.degraded)
            return sum(status.plan_errors.values()) >= 5 and status

        status = wait_for(all_failed, 60, "five failures")
        assert status.plan_errors == {"exception": 2, "timeout": 1, "crash": 1, "garbage": 1}
        assert versions(job)[-1] == kept or status.plans_succeeded > 1
        assert any("no successful plan for 3 intervals" in reason for reason in degraded)
        wait_new_version(job)
        log = rebalancer.log()
        assert "cycle 2: exception: ValueError: the stub raises" in log
        assert "cycle 3: timeout: planner took longer than 3 s" in log
        wait_for(lambda: not rebalancer.status().degraded, 10, "healthy again")
        end_and_check(job, [rebalancer.store])


@pytest.mark.slow
def test_kill_9_of_the_planner_process(tmp_path):
    with rebalancer_in(tmp_path) as rebalancer, job_on(tmp_path / "job", rebalancer.bind) as job:
        wait_new_version(job)
        pid = rebalancer.process.pid
        for _ in range(2):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            wait_new_version(job)
        assert rebalancer.status().plan_errors.get("crash", 0) >= 1
        end_and_check(job, [rebalancer.store])


@pytest.mark.slow
def test_a_new_job_starts_with_the_newest_placement(tmp_path):
    """B22 (b), (c): versions went on; who starts then has the newest one before its first step."""
    with rebalancer_in(tmp_path) as rebalancer:
        with job_on(tmp_path / "first", rebalancer.bind) as job:
            wait_new_version(job)
            wait_new_version(job)
            assert job.finish(60) == [0, 0], job.logs()
            job.check_steps()
        newest = rebalancer.status().newest
        with job_on(tmp_path / "second", rebalancer.bind, agent={"require_rebalancer": True}) as again:
            again.wait_step(5)
            assert versions(again)[0] >= newest
            wait_new_version(again)
            end_and_check(again, [rebalancer.store])


@pytest.mark.slow
def test_a_required_rebalancer_that_is_not_there_ends_the_start_in_time(tmp_path):
    agent = {"require_rebalancer": True, "start_limit_s": 2.0}
    with job_on(tmp_path / "job", f"ipc://{tmp_path}/nobody.sock", agent=agent) as job:
        assert all(status != 0 for status in job.wait(60))
        assert "no snapshot from the rebalancer within 2 s" in job.log(0)
        assert "rank 0 got no placement" in job.log(1)
