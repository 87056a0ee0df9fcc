"""The process from outside: start-up errors, one master, status and its exit codes, recording, metrics."""

import json
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from evenroute.dist.client import query_status
from evenroute.dist.web.metrics import metric_names
from evenroute.eplb.dump.reader import DumpReader
from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import (
    RebalancerProcess,
    child_environment,
    command_start_s,
    patience,
    wait_for,
)
from support.outside import FLAGS, JOB, refused, run, stored, turn_until
from support.ports import free_port

# ----------------------------------------------------------------------------------------- start (B34)


def test_an_address_in_use_is_named_with_its_setting(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        bind = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
        began = time.monotonic()
        found = run("rebalancer", "--bind", bind, "--store", tmp_path / "run.db")
        spent = time.monotonic() - began
    assert spent - command_start_s() < 5 * patience(), "it waits for the address"
    refused(found, bind, "--bind", "in use")


def test_a_path_that_is_too_long_is_told_with_the_limit(tmp_path):
    path = f"/tmp/{'d' * 120}/r.sock"
    refused(run("rebalancer", "--bind", f"ipc://{path}", "--store", tmp_path / "run.db"), "107", path)


def test_a_store_that_cannot_be_written_is_told_at_once(tmp_path):
    bind = f"ipc://{tmp_path}/r.sock"
    refused(run("rebalancer", "--bind", bind, "--store", "/proc/run.db"), "/proc/run.db")
    text = tmp_path / "text.db"
    text.write_text("this is not a store\n" * 100)
    refused(run("rebalancer", "--bind", bind, "--store", text), "text.db")
    assert text.read_text().startswith("this is not a store")
    assert not (tmp_path / "r.sock").exists()


def test_a_full_disk_at_the_start_is_one_line(tmp_path):
    def no_room():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    found = run(
        "rebalancer", "--bind", f"ipc://{tmp_path}/r.sock", "--store", tmp_path / "run.db", preexec_fn=no_room
    )
    refused(found, "run.db", "cannot be")


def test_check_config_needs_neither_ranks_nor_a_free_address(tmp_path):
    config = tmp_path / "evenroute.toml"
    config.write_text(
        f"[rebalancer]\nbind = 'ipc://{tmp_path}/r.sock'\nstore = '{tmp_path}/run.db'\n[planner]\ninterval = 5"
    )
    found = run("rebalancer", "--config", config, "--check-config")
    assert found.returncode == 0, found
    assert "planner.interval=5.0" in found.stdout
    assert not (tmp_path / "run.db").exists()
    config.write_text("[planner]\nintervall = 5")
    refused(run("rebalancer", "--config", config, "--check-config"), "intervall", "did you mean 'interval'?")
    refused(run("rebalancer", "--bind", f"ipc://{tmp_path}/r.sock", "--check-config"), "rebalancer.store")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_automatic_ports_never_collide(tmp_path):
    """B34 (b): 32 processes at once, 20 rounds: 640 of 640 bind port 0 themselves and publish what they got."""
    started = 0
    for round_ in range(20):
        running = []
        try:
            for number in range(32):
                folder = tmp_path / f"{round_}-{number}"
                folder.mkdir()
                process = RebalancerProcess(
                    folder, bind="tcp://127.0.0.1:0", toml="[planner]\nenabled = false\n"
                )
                running.append(process.start(wait=False))
            for process in running:
                wait_for(lambda p=process: p.ready.exists() or p.process.poll() is not None, 120, "start")
                assert process.process.poll() is None, process.log()
            addresses = {json.loads(process.ready.read_text())["address"] for process in running}
            assert len(addresses) == len(running)
            assert query_status(addresses.pop(), timeout_s=20).state == "waiting"
            started += len(running)
        finally:
            for process in running:
                process.process.terminate()
            for process in running:
                process.__exit__()
    assert started == 640


@pytest.mark.slow
def test_stop_and_start_on_the_same_port_ten_times(tmp_path):
    port = free_port()
    for _ in range(10):
        with RebalancerProcess(tmp_path, bind=f"tcp://127.0.0.1:{port}", flags=FLAGS) as process:
            assert process.status().state == "waiting"
            assert process.stop() == 0


# ------------------------------------------------------------------------------------------ one master


def test_a_second_one_is_refused_by_store_and_by_address_with_the_first_ones_pid(rebalancer, tmp_path):
    pid = str(rebalancer.process.pid)
    found = run("rebalancer", "--bind", f"ipc://{tmp_path}/other.sock", "--store", rebalancer.store)
    refused(found, "store", f"pid {pid}", "--take-over")
    found = run("rebalancer", "--bind", rebalancer.bind, "--store", tmp_path / "other.db")
    refused(found, "bind", f"pid {pid}")
    assert rebalancer.status().pid == int(pid), "the first one is unharmed, its socket is still there"


# ---------------------------------------------------------------------------------------------- status


def test_status_exit_codes_healthy_and_unreachable(rebalancer, job, tmp_path):
    turn_until(job, lambda: stored(job) >= 8, "windows stored")
    found = run("status", rebalancer.address)
    assert found.returncode == 0, found
    assert "healthy, serving" in found.stdout
    assert "4/4 heard" in found.stdout
    assert re.search(r"rank 3: heard .* counts of steps 0\.\.\d+ in \d+ windows, none missing", found.stdout)
    as_json = json.loads(run("status", rebalancer.address, "--json").stdout)
    assert as_json["healthy"] is True
    assert as_json["counters"]["windows_stored"] >= 8
    assert as_json["until_next_plan"] >= 0
    refused(run("status", f"ipc://{tmp_path}/nobody.sock", "--timeout", "0.5"), "no answer within 0.5 s")
    refused(run("status", "somewhere"), "'somewhere' found, expected ipc://PATH")


def test_a_rank_that_falls_silent_degrades_and_is_named(tmp_path):
    toml = "[rebalancer]\nmax_rank_silence_s = 2.0\n"
    with RebalancerProcess(tmp_path, flags=FLAGS, toml=toml) as process:
        simulated = SimulatedJob(process.address, JOB, period_s=3600)
        simulated.start(60)
        wait_for(lambda: simulated.turn(0.05) or process.status().state == "serving", 60, "serving")
        silent = simulated.ranks[2]
        silent.next_status_at = float("inf")

        def told():
            for rank in simulated.ranks:
                if rank is not silent:
                    rank.next_status_at = 0.0
            simulated.turn(0.05)
            return process.status().degraded

        wait_for(lambda: told() == ["not heard for 2 s: rank 2"], 60, "degraded for rank 2 alone")
        found = run("status", process.address)
        assert found.returncode == 1
        assert "DEGRADED" in found.stdout
        simulated.close()


# ------------------------------------------------------------------------------------------- recording


def test_recording_start_stop_dump(rebalancer, job, tmp_path):
    dump = tmp_path / "out.evrdump"
    refused(run("record", "dump", rebalancer.address, "-o", dump), "nothing was recorded")
    refused(run("record", "stop", rebalancer.address), "no recording runs")
    turn_until(job, lambda: stored(job) >= 8, "windows before the recording")
    assert job.drain(60)
    assert run("record", "start", rebalancer.address, "--per-rank").returncode == 0
    refused(run("record", "start", rebalancer.address), "a recording runs already")
    before = [rank.stored for rank in job.ranks]
    job.counting = True
    turn_until(job, lambda: all(r.stored >= b + 5 for r, b in zip(job.ranks, before, strict=True)), "windows")
    assert job.drain(60)
    assert run("record", "stop", rebalancer.address).returncode == 0
    recorded = [rank.stored - b for rank, b in zip(job.ranks, before, strict=True)]
    found = run("record", "dump", rebalancer.address, "-o", dump)
    assert found.returncode == 0, found
    totals = sum(window.counts.astype(np.int64) for window in DumpReader(dump).windows())
    # A fleet-wide window is recorded whole, with what some ranks sent of it just before the start.
    rows = {seq for r, b in zip(job.ranks, before, strict=True) for seq in range(b + 1, r.stored + 1)}
    whole = sum(len(rows & set(range(1, rank.stored + 1))) for rank in job.ranks)
    assert sum(recorded) <= whole < sum(recorded) + 40
    np.testing.assert_array_equal(totals, job.counts * whole)
    assert run("record", "dump", rebalancer.address, "-o", dump, "--rank", "2").returncode == 0
    one = DumpReader(dump)
    assert (one.header.scope, one.header.rank) == ("rank", 2)
    np.testing.assert_array_equal(
        sum(w.counts.astype(np.int64) for w in one.windows()), job.counts * recorded[2]
    )


# --------------------------------------------------------------------------------------------- metrics


def test_every_metric_name_is_in_a_fresh_scrape(rebalancer, job):
    turn_until(job, lambda: stored(job) >= 8, "windows stored")
    address = json.loads(rebalancer.ready.read_text())["metrics"]

    def scrape():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
            return answer.read().decode()

    def value(name):
        found = re.search(rf"^{re.escape(name)} ([0-9.e+-]+)$", scrape(), re.MULTILINE)
        return float(found[1]) if found else 0.0

    turn_until(job, lambda: value("evenroute_windows_received_total") >= 8, "the scrape follows")
    text = scrape()
    for name in metric_names():
        assert f"# TYPE {name.removesuffix('_total')}" in text or f"# TYPE {name}" in text, name
    assert 'evenroute_ranks{state="heard"} 4.0' in text
    assert 'evenroute_rank_version{rank="3"} 0.0' in text


# -------------------------------------------------------------------------------------------- no torch

NO_TORCH = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "triton"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from evenroute.tools.cli import main
main(sys.argv[1:])
"""


def test_rebalancer_status_record_and_keygen_run_without_torch(tmp_path):
    def blocked(*words):
        return subprocess.Popen(
            [sys.executable, "-c", NO_TORCH, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )

    ready = tmp_path / "ready.json"
    process = blocked(
        "rebalancer",
        "--bind",
        f"ipc://{tmp_path}/r.sock",
        "--store",
        tmp_path / "run.db",
        "--ready-file",
        ready,
        *FLAGS,
    )
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, 90, "start without torch")
        assert process.poll() is None, process.stderr.read()
        for words, status in (
            (["status", f"ipc://{tmp_path}/r.sock"], 0),
            (["keygen", tmp_path / "keys"], 0),
            (["record", "start", f"ipc://{tmp_path}/r.sock"], 2),
        ):
            child = blocked(*words)
            _, errors = child.communicate(timeout=120)
            assert child.returncode == status, errors
            assert "blocked" not in errors
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
