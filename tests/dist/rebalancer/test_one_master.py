"""One rebalancer a store and one job a rebalancer; files that vanish under it; no stranger is ever signalled."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evenroute.dist.config import AgentConfig, PlannerSettings, RebalancerSettings
from evenroute.dist.log import LimitedLog
from evenroute.dist.rebalancer.guards import Holder, JobLock, LockHeldError, StoreLock
from evenroute.dist.rebalancer.planner import check_planner
from evenroute.dist.wire.messages import JobShape
from evenroute.tools.options import parse_interval
from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import LEAST_WAIT_S, RebalancerProcess, child_environment, wait_for

FLAGS = ["--interval", "3600", "--planner", "support.stub_planner:plan"]
SHAPE = JobShape(3, 8, 12, 4, 1, 2, False, "first-model")


def run(*words, limit_s=120):
    return subprocess.run(
        [sys.executable, "-m", "evenroute.tools.cli", "rebalancer", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=child_environment(),
    )


def refused(found, *texts):
    assert found.returncode == 2, found
    assert found.stderr.count("\n") == 1, found.stderr
    for text in texts:
        assert text in found.stderr, found.stderr


# ------------------------------------------------------------------------------------------ two jobs


def turn_until(jobs, condition, what):
    deadline = time.monotonic() + LEAST_WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {LEAST_WAIT_S} s"
        for job in jobs:
            job.turn(0.01)


def test_a_second_living_job_is_turned_away_and_both_are_named_once(tmp_path):
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        first = SimulatedJob(rebalancer.address, SHAPE, period_s=0.2)
        other = JobShape(3, 8, 12, 4, 1, 2, False, "second-model")
        second = SimulatedJob(rebalancer.address, other, period_s=0.2)
        try:
            first.start(60)
            turn_until([first], lambda: all(rank.stored for rank in first.ranks), "the first job's windows")
            stored = {id(rank): rank.stored for rank in first.ranks}
            until = time.monotonic() + 4.0  # some heartbeats of both
            turn_until([first, second], lambda: time.monotonic() > until, "some heartbeats of both")
            turn_until(
                [first, second],
                lambda: all(rank.stored >= stored[id(rank)] + 5 for rank in first.ranks),
                "the first goes on",
            )
            turn_until(
                [first, second],
                lambda: rebalancer.status().counters["rejected_other_job"] >= 8,
                "the second is turned away at each heartbeat",
            )
            found = rebalancer.status()
            assert found.run == first.run
            assert not any(rank.stored for rank in second.ranks)
            reason = next(text for text in found.degraded if "turned away" in text)
            log = [line for line in rebalancer.log().splitlines() if "turned away" in line]
            for text in (reason, *log):
                assert f"job {second.run:x} (second-model) of 4 ranks is turned away" in text
                assert f"job {first.run:x} (first-model) of 4 ranks are alive" in text
            assert len(log) == 1, "once, not at each heartbeat"

            first.close()  # it ends: the other one is taken up, with nothing of it lost
            turn_until([second], lambda: all(rank.stored for rank in second.ranks), "the second job")
            assert rebalancer.status().run == second.run
        finally:
            first.close()
            second.close()


# ------------------------------------------------------------------------------------------ the store


def test_a_hard_link_to_a_store_is_the_same_store(tmp_path):
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        link = tmp_path / "sub" / "link.db"
        link.parent.mkdir()
        link.hardlink_to(rebalancer.store)
        found = run("--bind", f"ipc://{tmp_path}/other.sock", "--store", link)
        refused(found, "rebalancer.store (--store)", str(link), "hard link", f"pid {rebalancer.process.pid}")
        Path(f"{rebalancer.store}.lock").unlink()  # nor does it help to remove the lock's file
        found = run("--bind", f"ipc://{tmp_path}/other.sock", "--store", rebalancer.store)
        refused(found, "lock file was removed", f"pid {rebalancer.process.pid}")
        found = run("--bind", f"ipc://{tmp_path}/other.sock", "--store", link, "--take-over")
        refused(found, "hard link")
        assert rebalancer.status().pid == rebalancer.process.pid
        assert not Path(f"{link}-wal").exists(), "SQLite has not opened it"
    again = RebalancerProcess(tmp_path, name="again", store=link, flags=FLAGS)
    with again:
        assert again.status().state == "waiting"


def test_a_store_lock_sees_its_file_go(tmp_path):
    path = tmp_path / "run.db"
    path.write_bytes(b"")
    lock = StoreLock("store", path)
    assert lock.in_place()
    with pytest.raises(OSError, match="in use by another rebalancer"):
        StoreLock("store", path, limit_s=0.1)
    path.rename(tmp_path / "moved.db")
    assert not lock.in_place()
    path.write_bytes(b"")
    assert not lock.in_place(), "another file of that name is not it"
    lock.release()


def looked_after(rebalancer):
    """Wait until it has looked at its files once more, which it does once a second, between two answers."""
    before = rebalancer.status().uptime_s
    wait_for(lambda: rebalancer.status().uptime_s > before + 1.0, 60, "a second of its life")
    rebalancer.status()


@pytest.mark.parametrize("how", ["removed", "replaced", "log"])
def test_a_store_that_goes_while_in_use_is_told_once_and_shown(tmp_path, how):
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        wait_for(lambda: Path(f"{rebalancer.store}-wal").exists(), 60, "a log")
        looked_after(rebalancer)
        if how == "log":
            Path(f"{rebalancer.store}-wal").unlink()
        else:
            rebalancer.store.unlink()
        if how == "replaced":
            rebalancer.store.write_bytes(b"something else")
        wait_for(lambda: rebalancer.status().counters["store_errors"], 60, "noticed")
        time.sleep(2.5)
        found = rebalancer.status()
        assert found.counters["store_errors"] == 1
        assert any("was removed or replaced while in use" in text for text in found.degraded)
        lines = [line for line in rebalancer.log().splitlines() if "removed or replaced" in line]
        assert len(lines) == 1
        assert str(rebalancer.store) in lines[0]


def test_a_socket_file_that_goes_is_told_once(tmp_path):
    with RebalancerProcess(tmp_path, flags=FLAGS) as rebalancer:
        job = SimulatedJob(rebalancer.address, SHAPE, period_s=3600.0)  # connected before, so still served
        try:
            job.start(60)
            Path(rebalancer.address.removeprefix("ipc://")).unlink()
            wait_for(lambda: "no rank can connect anew" in rebalancer.log(), 60, "noticed")
            time.sleep(2.5)
            assert rebalancer.log().count("no rank can connect anew") == 1
        finally:
            job.close()


# ---------------------------------------------------------------------------------------- take-over

HOLD = """
import fcntl, os, sys, time
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(lock, fcntl.LOCK_EX)
os.pwrite(lock, sys.argv[2].encode(), 0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def bystander():
    """A process that has nothing to do with us."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(timeout=60)


def other_than(holder, **changes):
    values = {name: getattr(holder, name) for name in ("pid", "host", "boot", "space", "started")}
    return Holder(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"boot": "00000000-0000-0000-0000-000000000000", "host": "node-7"}, "of host node-7"),
        ({"space": 1}, "stop it there"),  # another container of this host
        ({"started": 1}, "pid"),  # its number was given to another process since
        (None, "an unknown process"),  # a lock of an earlier release, or of a stranger
    ],
    ids=["host", "container", "recycled", "unknown"],
)
def test_take_over_never_signals_a_process_that_only_has_the_number(tmp_path, bystander, changes, said):
    path = tmp_path / "run.db.lock"
    named = other_than(Holder.of(bystander.pid), **(changes or {}))
    text = str(bystander.pid) if changes is None else named.text()
    keeper = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), text], stdout=subprocess.PIPE, text=True
    )
    try:
        assert keeper.stdout.readline() == "held\n"
        with pytest.raises(LockHeldError, match=said):
            JobLock([("store", tmp_path / "run.db")], take_over=True, limit_s=1.0)
        assert bystander.poll() is None
        assert keeper.poll() is None
    finally:
        keeper.kill()
        keeper.wait(timeout=60)
        keeper.stdout.close()


def test_the_right_process_is_signalled(bystander):
    Holder.parse(Holder.of(bystander.pid).text()).send(signal.SIGTERM)
    assert bystander.wait(timeout=60) == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        Holder.of(2**22 + 1)  # above every pid_max


# -------------------------------------------------------------------------------------------- floods


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr("evenroute.dist.log.time.monotonic", lambda: self.now)


def test_a_flood_that_goes_on_gets_fewer_and_fewer_lines(monkeypatch, caplog):
    clock = Clock(monkeypatch)
    logger = logging.getLogger("flood")
    log = LimitedLog(logger)
    with caplog.at_level(logging.WARNING, "flood"):
        for _ in range(24 * 3600):  # a day, ten messages a second
            clock.now += 1.0
            log.turn(clock.now)
            for _ in range(10):
                log.log(logging.WARNING, "role", "a viewer sent a rank's message; refused", limit=1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "role: a viewer sent a rank's message; refused"
    assert lines.count(lines[0]) == 1, "the first of its kind only"
    assert len(lines) < 40
    assert all("more in the last" in line for line in lines[1:])
    # After a quiet time a new one is told again.
    clock.now += 2 * 3600.0
    log.turn(clock.now)
    clock.now += 3600.0
    log.turn(clock.now)
    assert log.log(logging.WARNING, "role", "again", limit=1)


# ----------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("text", ["4ww", "4ws", "4sw", "inf", "nan", "infw", "1e999", "", "w", " 4", "1_0"])
def test_an_interval_is_a_number_and_one_unit(text, tmp_path):
    with pytest.raises(ValueError, match="--interval: ") as error:
        parse_interval(text)
    assert "\n" not in str(error.value)
    if text in ("4ww", "inf"):
        where = ["--bind", f"ipc://{tmp_path}/r.sock", "--store", tmp_path / "run.db", "--check-config"]
        refused(run(*where, "--interval", text), "--interval", text)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (RebalancerSettings, "listen_s"),
        (RebalancerSettings, "keep_windows_s"),
        (PlannerSettings, "interval"),
        (PlannerSettings, "time_limit_s"),
        (PlannerSettings, "target"),
        (AgentConfig, "vote_limit_s"),
        (AgentConfig, "heartbeat_s"),
    ],
)
def test_times_are_finite(settings, name, value):
    with pytest.raises(ValueError, match=rf"\.{name}: (inf|nan) found, expected") as error:
        settings(**{name: value})
    assert "\n" not in str(error.value)


def test_check_config_sees_a_store_that_can_not_be(tmp_path):
    bind = f"ipc://{tmp_path}/r.sock"
    (tmp_path / "folder.db").mkdir()
    (tmp_path / "text.db").write_text("not a store, but long enough to look at" * 10)
    os.mkfifo(tmp_path / "fifo.db")
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    for store, said in (
        (tmp_path / "loop.db", "symbolic links"),
        (tmp_path / ("long" * 100), "name too long"),
        (tmp_path / "folder.db", "is a folder"),
        (tmp_path / "fifo.db", "not a regular file"),
        (tmp_path / "text.db", "text.db"),
        ("", "folder"),
    ):
        refused(run("--bind", bind, "--store", store, "--check-config"), "rebalancer.store", said)
    loop = f"ipc://{tmp_path}/loop.db"
    refused(run("--bind", loop, "--store", tmp_path / "new.db"), "symbolic links")
    assert (tmp_path / "text.db").read_text().startswith("not a store")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("os:system", "does not take a planner's arguments"),
        ("os:path", "is a module, not a function"),
        ("no_such_module:plan", "cannot be imported"),
        ("support.stub_planner:nothing", "cannot be imported"),
    ],
)
def test_a_planner_is_a_function_with_a_planners_arguments(function, said, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", child_environment()["PYTHONPATH"])
    with pytest.raises(ValueError, match=r"planner\.function") as error:
        check_planner(function)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    check_planner("support.stub_planner:plan")


def test_a_planner_that_hangs_or_crashes_at_import_is_told(tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)\ndef plan(*a, **k): ...")
    (tmp_path / "dies.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{child_environment()['PYTHONPATH']}")
    with pytest.raises(ValueError, match="was not imported within 3 s"):
        check_planner("hangs:plan", limit_s=3.0)
    with pytest.raises(ValueError, match="ended its process with 7"):
        check_planner("dies:plan")


@pytest.mark.parametrize("words", ["a b:plan", "os;x:system", ":plan", "os:", "os.:system"])
def test_only_module_and_function_are_allowed(words):
    with pytest.raises(ValueError, match=r"planner\.function"):
        PlannerSettings(function=words)
