"""Settings: strict, early, and with the nearest known name (B35); addresses (B34 c); the lock of a job."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

from evenroute.dist.config import (
    PlannerSettings,
    RebalancerSettings,
    load_config,
)
from evenroute.dist.rebalancer.guards import FileLock, JobLock, LockHeldError
from evenroute.dist.rebalancer.host_checks import check_host
from evenroute.dist.wire.address import check_bind, parse_address
from evenroute.tools.options import parse_interval
from support.control_plane import child_environment, patience


def write(tmp_path, text):
    path = tmp_path / "evenroute.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[planner]\nintervall = 5", r"unknown key 'intervall' \(value 5\), did you mean 'interval'\?"),
        ("[planner]\nnum_redundent_experts = 32", "unknown key 'num_redundent_experts'"),
        ("[planer]\ninterval = 5", "unknown table 'planer', did you mean 'planner'"),
        ("[planner]\ninterval = 0", "planner.interval: 0.0 found, expected 0.001 to 3.16224e.07 seconds"),
        ("[planner]\ninterval = -1", "planner.interval: -1.0 found"),
        ("[planner]\ntarget = 1.5", r"planner.target: 1.5 found, expected a balancedness in \(0, 1\]"),
        ("[planner]\npolicy = 'globall'", "planner.policy: 'globall' found, expected auto | global"),
        ("[planner]\ninterval = 'ten'", "planner.interval: 'ten' found, expected float"),
        ("[planner]\nenabled = 1", "planner.enabled: 1 found, expected bool"),
        ("[planner]\ninterval = 2.5\ninterval_unit = 'windows'", "expected a whole number of windows"),
        ("[planner]\nfunction = 'planner'", "planner.function: 'planner' found, expected MODULE:FUNCTION"),
        ("[rebalancer]\nlog_level = 'inof'", "rebalancer.log_level: 'inof' found, expected debug | info"),
        (
            "[rebalancer]\nbind = 'udp://x:1'",
            "rebalancer.bind: 'udp://x:1' found, expected ipc://PATH or tcp",
        ),
        ("[rebalancer]\nbind = 'tcp://x:70000'", "expected ipc://PATH or tcp://HOST:PORT"),
        ("[security]\nkeys = 'k'\ninsecure = true", "security.insecure: True found, expected false when"),
        ("[agent]\nagree_every = 0", "agent.agree_every: 0 found, expected 1 to"),
        ("[agent]\nrequire_rebalancer = true", "expected false when agent.rebalancer is empty"),
        ("", "empty; expected at least one of"),
        ("[planner", "config .*evenroute.toml: "),
        ("planner = 3", "planner must be a table"),
    ],
)
def test_wrong_settings_are_one_clear_error(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        load_config(path)


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no\.toml: No such file"):
        load_config(tmp_path / "no.toml")


def test_flags_win_over_the_file_and_absent_flags_do_not(tmp_path):
    path = write(tmp_path, "[planner]\ninterval = 5\nmin_tokens = 7\n[agent]\ntop_k = 8")
    config = load_config(path, {"planner": {"interval": 9.0, "min_tokens": None}})
    assert (config.planner.interval, config.planner.min_tokens) == (9.0, 7)


def test_defaults_are_in_the_dataclasses_alone():
    config = load_config(None)
    assert config.planner == PlannerSettings()
    assert config.rebalancer == RebalancerSettings()
    assert all(f"{field.name}=" in config.effective() for field in fields(PlannerSettings))


def test_contradictions_and_odd_combinations_are_told(tmp_path):
    base = {"rebalancer": {"bind": f"ipc://{tmp_path}/r.sock", "store": f"{tmp_path}/run.db"}}
    assert check_host(load_config(None, base)) == []
    # An interval longer than what the store keeps apart, and a disabled planner with settings.
    odd = {**base, "planner": {"interval": 7200.0, "enabled": False, "max_moves": 4}}
    warnings = check_host(load_config(None, odd))
    assert any("keep_windows_s 3600 is shorter than planner.interval 7200" in w for w in warnings)
    assert any("planner.enabled is false" in w for w in warnings)
    for section, name, value, message in (
        ("rebalancer", "bind", "tcp://0.0.0.0:7000", "not a loopback address and there are no keys"),
        ("rebalancer", "store", f"{tmp_path}/no/run.db", r"rebalancer\.store: folder .*/no does not exist"),
        ("rebalancer", "store", "", r"rebalancer\.store: not given, expected .* \(--store\)"),
        ("rebalancer", "bind", f"ipc://{tmp_path}/no/r.sock", r"rebalancer\.bind: folder"),
        ("security", "keys", f"{tmp_path}/nokeys", "no such file"),
    ):
        settings = {key: dict(values) for key, values in base.items()}
        settings.setdefault(section, {})[name] = value
        with pytest.raises((ValueError, OSError), match=message):
            check_host(load_config(None, settings))


def test_what_other_users_could_read_is_told(tmp_path):
    """S8: a store for all to read, and metrics for all to see, are allowed and never pass without a word."""
    store = tmp_path / "run.db"
    store.touch(mode=0o600)

    def told(**changed):
        settings = {"bind": f"ipc://{tmp_path}/r.sock", "store": str(store), **changed}
        return check_host(load_config(None, {"rebalancer": settings}))

    assert told(http_bind="127.0.0.1:0") == []
    for mode in (0o644, 0o640, 0o602):
        store.chmod(mode)
        (warning,) = told()
        assert warning.startswith(f"rebalancer.store: {store} has mode {mode:03o}: other users can read")
    store.chmod(0o600)
    (warning,) = told(http_bind="0.0.0.0:0")
    assert warning.startswith(
        "rebalancer.http_bind: 0.0.0.0:0 is not a loopback address: anybody who reaches it"
    )


def test_intervals_in_words():
    assert parse_interval("60") == (60.0, "seconds")
    assert parse_interval("1.5s") == (1.5, "seconds")
    assert parse_interval("4w") == (4.0, "windows")
    assert parse_interval("5m") == (300.0, "seconds")
    assert parse_interval("2h") == (7200.0, "seconds")
    assert parse_interval("500ms") == (0.5, "seconds")
    with pytest.raises(ValueError, match="--interval: 'soon' found"):
        parse_interval("soon")


def test_addresses_and_who_can_reach_them():
    for local in (
        "ipc:///tmp/no-such-evenroute.sock",
        "tcp://127.0.0.1:0",
        "tcp://localhost:1",
        "tcp://[::1]:5",
        "tcp://127.8.8.8:*",
    ):
        check_bind(parse_address(local, field="f"), field="f", has_keys=False, insecure=False)
    for open_ in ("tcp://0.0.0.0:1", "tcp://*:1", "tcp://10.0.0.1:1", "tcp://host:1", "tcp://[::]:1"):
        address = parse_address(open_, field="f")
        with pytest.raises(ValueError, match="there are no keys"):
            check_bind(address, field="f", has_keys=False, insecure=False)
        check_bind(address, field="f", has_keys=True, insecure=False)
        check_bind(address, field="f", has_keys=False, insecure=True)
    long_path = "/tmp/" + "x" * 120
    with pytest.raises(ValueError, match="bind: path of 125 bytes found, at most 107 allowed"):
        parse_address(f"ipc://{long_path}", field="bind")


def test_the_shipped_settings_file_is_good():
    path = Path(__file__).resolve().parents[3] / "deploy" / "systemd" / "evenroute.toml"
    if not path.exists():
        pytest.skip("deploy/systemd/evenroute.toml is not here")
    load_config(path)


def test_a_second_holder_is_refused_with_the_first_ones_pid(tmp_path):
    first = JobLock([("store", tmp_path / "run.db")])
    holder = "import sys; from evenroute.dist.rebalancer.guards import *; from pathlib import Path\n"
    holder += f"path = Path({str(tmp_path / 'run.db')!r})\n"
    holder += "try: JobLock([('store', path)])\nexcept LockHeldError as e: print(e.pid, e)"
    found = subprocess.run(
        [sys.executable, "-c", holder], capture_output=True, text=True, timeout=30, env=child_environment()
    )

    assert found.stdout.split()[0] == str(os.getpid())
    assert "is running already" in found.stdout
    first.release()
    JobLock([("store", tmp_path / "run.db")]).release()


@pytest.mark.parametrize("frozen", [False, True])
def test_take_over_ends_the_holder_also_a_frozen_one(tmp_path, frozen):
    code = (
        "import sys, time, signal; from evenroute.dist.rebalancer.guards import *; from pathlib import Path\n"
    )
    code += f"lock = JobLock([('store', Path({str(tmp_path / 'run.db')!r}))])\n"
    code += "print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    try:
        assert holder.stdout.readline() == "held\n"
        if frozen:
            holder.send_signal(signal.SIGSTOP)
        with pytest.raises(LockHeldError):
            FileLock("store", tmp_path / "run.db.lock")
        began = time.monotonic()
        lock = JobLock([("store", tmp_path / "run.db")], take_over=True, limit_s=4.0)
        assert time.monotonic() - began < 5.0 * patience()
        assert holder.wait(timeout=60) != 0
        lock.release()
    finally:
        holder.kill()
        holder.wait(timeout=60)
        holder.stdout.close()
