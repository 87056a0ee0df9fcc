# ruff: noqa: E501  (tables are read by their rows)
"""Every setting and flag: what is wrong with its value is told before anything starts, in one line that names it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from evenroute.dist.config import (
    AgentConfig,
    PlannerSettings,
    RebalancerConfig,
    RebalancerSettings,
    SecuritySettings,
    load_config,
)
from evenroute.dist.wire.keys import generate_keys
from support.command import Outcome, assert_one_line_error, evenroute
from support.control_plane import child_environment

INF, NAN = float("inf"), float("nan")
SECTIONS = {
    "rebalancer": RebalancerSettings,
    "planner": PlannerSettings,
    "security": SecuritySettings,
    "agent": AgentConfig,
}
TEXT = {
    "": None,
    "a\nb": "control characters",
    "a\0b": "control characters",
    " a": "no space",
    5: "found, expected str",
}
TIMES = {0.0: "expected 0.001 to 3.1", -1.0: "to", 1e308: "to", INF: "a finite number", NAN: "a finite number", "5": "found, expected float", True: "True found, expected float", 10**400: "over 300 digits found"}  # fmt: skip
KEEP = {**TIMES, 0.0: "expected 1 to", 0.5: "expected 1 to"}
SWITCH = {1: "1 found, expected bool", "yes": "'yes' found, expected bool"}


def whole(low: int, high: int) -> dict[object, str | None]:
    return {
        low - 1: f"{low - 1} found, expected {low:g} to {high:g}",
        high + 1: "found, expected",
        1.5: "1.5 found, expected int",
        "4": "'4' found, expected int",
        True: "True found, expected int",
    }


# (section, setting): bad value -> words of the message; None = the value is good.
WRONG: dict[tuple[str, str], dict[object, str | None]] = {
    ("rebalancer", "bind"): {**TEXT, "x": "ipc://PATH or tcp://HOST:PORT", "tcp://:5": "'tcp://:5' found", "tcp://h:65536": "port 0..65535", "tcp://a b:5": "expected a host of letters", "tcp://h;x:5": "expected a host", "ipc://": "'ipc://' found", "ipc:///" + "x" * 108: "at most 107 allowed"},
    ("rebalancer", "store"): TEXT,
    ("rebalancer", "http_bind"): {**TEXT, "x": "'x' found, expected HOST:PORT", "9100": "'9100' found, expected HOST:PORT", ":9100": "':9100' found, expected HOST:PORT", "h:": "'h:' found", "h:99999": "port 0..65535", "h:-1": "found", "http://h:5": "'http://h:5' found, expected HOST:PORT", "ipc:///x": "HOST:PORT", "a b:5": "HOST:PORT", "[::1]:0": None},
    ("rebalancer", "ready_file"): TEXT,
    ("rebalancer", "log_level"): {"INFO": "debug | info | warning | error", "": "debug | info", 3: "found, expected str"},
    ("rebalancer", "log_format"): {"JSON": "text | json", "": "text | json", 3: "found, expected str"},
    ("rebalancer", "keep_windows_s"): KEEP,
    ("rebalancer", "roll_up_s"): KEEP,
    ("rebalancer", "max_message_bytes"): whole(65536, 2**30),
    ("rebalancer", "max_rank_silence_s"): TIMES,
    ("rebalancer", "version_limit_s"): TIMES,
    ("rebalancer", "listen_s"): TIMES,
    ("rebalancer", "member_silence_s"): TIMES,
    ("planner", "enabled"): SWITCH,
    ("planner", "interval"): TIMES,
    ("planner", "interval_unit"): {"minutes": "seconds | windows", "": "seconds | windows", 1: "found, expected str"},
    ("planner", "min_tokens"): whole(1, 2**62),
    ("planner", "min_gain"): {-0.1: "expected 0 to 1", 1.1: "expected 0 to 1", NAN: "finite", "0": "expected float"},
    ("planner", "policy"): {"best": "auto | global", "": "auto | global", 1: "expected str"},
    ("planner", "num_groups"): whole(1, 65536),
    ("planner", "life_s"): TIMES,
    ("planner", "slot_s"): {0.0: "expected 1e-09 to 3600", 3601.0: "to 3600", NAN: "finite", "1": "expected float", None: None},
    ("planner", "small_batches"): SWITCH,
    ("planner", "expert_us"): {0.0: "expected 1e-06 to 1e+09", NAN: "finite", "1": "expected float", None: None},
    ("planner", "token_us"): {0.0: "expected 1e-06 to 1e+09", 1.0: "exactly where planner.expert_us is one", "1": "expected float", None: None},
    ("planner", "load_fraction"): {0.0: "a part in (0, 1]", 1.1: "a part in (0, 1]", NAN: "finite", "1": "expected float", None: None},
    ("planner", "target"): {0.0: "a balancedness in (0, 1]", 1.01: "in (0, 1]", -1.0: "in (0, 1]", NAN: "finite", "x": "expected float", None: None},
    ("planner", "max_moves"): {**whole(0, 2**31), None: None},
    ("planner", "time_limit_s"): TIMES,
    ("planner", "degraded_after"): whole(1, 10**9),
    ("planner", "function"): {"plan": "MODULE:FUNCTION", "": None, "a b:c": "MODULE:FUNCTION", "a:b:c": "MODULE:FUNCTION", 1: "expected str"},
    ("security", "keys"): TEXT,
    ("security", "http_token"): TEXT,
    ("security", "insecure"): SWITCH,
    ("agent", "rebalancer"): {**TEXT, "x": "ipc://PATH or tcp://HOST:PORT", "tcp://h:0": "an address to connect to", "tcp://h:*": "an address to connect to", "tcp://*:7": "an address to connect to"},
    ("agent", "keys"): TEXT,
    ("agent", "model"): TEXT,
    ("agent", "top_k"): whole(0, 65536),
    ("agent", "mode"): {"dark": "balance | shadow", "": "balance | shadow", 1: "found, expected str"},
    ("agent", "shared_counts"): SWITCH,
    ("agent", "window_steps"): whole(1, 2**31),
    ("agent", "agree_every"): whole(1, 2**31),
    **{("agent", name): TIMES for name in ("heartbeat_s", "resend_s", "silence_limit_s", "start_limit_s", "vote_limit_s", "close_limit_s")},
    ("agent", "require_rebalancer"): {True: "expected false when agent.rebalancer is empty", "yes": "expected bool"},
    ("agent", "record_dir"): TEXT,
    **{("agent", name): whole(65536, 2**40) for name in ("record_buffer_bytes", "record_part_bytes", "record_max_bytes")},
}  # fmt: skip
CASES = [(*key, value, words) for key, bad in WRONG.items() for value, words in bad.items()]


def as_toml(value: object) -> str | None:
    """The value in a settings file; None where TOML has no word for it."""
    if value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\n", "\\n").replace("\0", "\\u0000") + '"'
    return str(value)


def test_the_table_names_every_setting() -> None:
    known = {
        (section, field.name) for section, kind in SECTIONS.items() for field in dataclasses.fields(kind)
    }
    assert set(WRONG) == known


@pytest.mark.parametrize(
    ("section", "name", "value", "words"), CASES, ids=[f"{s}.{n}-{str(v)[:12]!r}" for s, n, v, _ in CASES]
)
def test_a_wrong_value_is_told(
    tmp_path: Path, section: str, name: str, value: object, words: str | None
) -> None:
    """In Python and in a file."""
    text = as_toml(value)
    path = tmp_path / "evenroute.toml"
    path.write_text("" if text is None else f"[{section}]\n{name} = {text}\n")
    ways = [lambda: SECTIONS[section](**{name: value})]
    ways += [] if text is None else [lambda: load_config(path)]
    for way in ways:
        if words is None:
            way()
            continue
        with pytest.raises(ValueError) as caught:
            way()
        message = str(caught.value)
        assert f"{section}.{name}: " in message
        assert words in message, message
        assert "\n" not in message
        assert len(message) < 400


def test_sections_of_another_type_are_told() -> None:
    for name in ("rebalancer", "planner", "security"):
        with pytest.raises(ValueError, match=f"{name}: a dict found, expected"):
            RebalancerConfig(**{name: {}})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[agent]\nheartbeat_s = 20", "agent.heartbeat_s: 20.0 found, expected less than rebalancer.max_rank_silence_s (10)"),
        ("[agent]\nrecord_part_bytes = 131072\nrecord_max_bytes = 65536", "record_part_bytes: 131072 found, expected at most record_max_bytes (65536)"),
        ("[security]\nkeys = 'k'\ninsecure = true", "security.insecure: True found, expected false when security.keys"),
        ("[planner]\ninterval = 2.5\ninterval_unit = 'windows'", "planner.interval: 2.5 found, expected a whole number"),
        ("[planner]\npolicy = 'global'\nmax_moves = 3", "planner.max_moves: 3 found, expected none with planner.policy global"),
        ("[planner]\npolicy = 'hierarchical'\ntarget = 0.9", "planner.target: 0.9 found, expected none with planner.policy hierarchical"),
        ("[planner]\ninterval = 2e9\ninterval_unit = 'windows'", "planner.interval: 2000000000.0 found, expected 1 to 1e+09 windows"),
    ],
)  # fmt: skip
def test_pairs_that_contradict_each_other(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "evenroute.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert words in str(caught.value)


# -------------------------------------------------------------------------------------- --check-config


def check(tmp_path: Path, *words: object) -> Outcome:
    """`evenroute rebalancer ... --check-config`, with an address and a store where none is given."""
    given = [str(word) for word in words]
    for flag, value in (("--bind", f"ipc://{tmp_path}/r.sock"), ("--store", f"{tmp_path}/run.db")):
        if flag not in given:
            given += [flag, value]
    return evenroute("rebalancer", "--check-config", *given)


def refused(tmp_path: Path, said: str, *words: object) -> None:
    assert_one_line_error(check(tmp_path, *words), *said.split(" | "))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--http-bind", "x"], "rebalancer.http_bind: 'x' found, expected HOST:PORT"),
        (["--http-bind", ""], "rebalancer.http_bind: --http-bind '' found, expected HOST:PORT"),
        (["--store", ""], "rebalancer.store: --store '' found, expected a file's name, in a folder that exists"),
        (["--bind", ""], "rebalancer.bind: --bind '' found, expected ipc://PATH"),
        (["--bind", "no"], "rebalancer.bind: 'no' found, expected ipc://PATH"),
        (["--keys", ""], "security.keys: --keys '' found, expected a folder"),
        (["--config", ""], "--config '' found, expected a TOML file"),
        (["--ready-file", ""], "rebalancer.ready_file: --ready-file '' found"),
        (["--planner", ""], "planner.function: --planner '' found, expected MODULE:FUNCTION"),
        (["--policy", ""], "planner.policy: '' found, expected auto"),
        (["--log-level", ""], "rebalancer.log_level: '' found"),
        (["--interval", ""], "--interval: '' found"),
        (["--interval", "0"], "planner.interval: 0.0 found, expected 0.001 to"),
        (["--interval", "-5"], "planner.interval: -5.0 found"),
        (["--interval", "1e308"], "planner.interval: 1e+308 found"),
        (["--interval", "1e308w"], "planner.interval: 1e+308 found, expected 1 to 1e+09 windows"),
        (["--interval", "nan"], "--interval: 'nan' found"),
        (["--min-tokens", "0"], "planner.min_tokens: 0 found"),
        (["--num-groups", "0"], "planner.num_groups: 0 found"),
        (["--planner", "json:dumps"], "planner.function (--planner): 'json:dumps' failed on a tiny case"),
        (["--planner", "json"], "planner.function: 'json' found, expected MODULE:FUNCTION"),
        (["--keys", "{tmp}/none"], "{tmp}/none/rebalancer.toml: no such file"),
        (["--keys", "{tmp}/file"], "security.keys (--keys): {tmp}/file is a file, expected a folder"),
        (["--keys", "{tmp}/keys", "--insecure"], "security.insecure: True found"),
        (["--ready-file", "{tmp}/run.db"], "rebalancer.ready_file: {tmp}/run.db is the file of rebalancer.store too"),
        (["--ready-file", "{tmp}/r.sock"], "rebalancer.ready_file: {tmp}/r.sock is the file of rebalancer.bind too"),
        (["--ready-file", "{tmp}/no/x"], "rebalancer.ready_file: folder {tmp}/no does not exist"),
        (["--ready-file", "{tmp}/keys"], "rebalancer.ready_file: {tmp}/keys is a folder"),
        (["--store", "{tmp}/r.sock"], "rebalancer.bind: {tmp}/r.sock is the file of rebalancer.store too"),
        (["--store", "{tmp}/file"], "exists and is not an evenroute store"),
        (["--bind", "tcp://127.0.0.1:7000", "--http-bind", "127.0.0.1:7000"], "the address of rebalancer.bind too"),
    ],
)  # fmt: skip
def test_flags_and_files(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "file").write_text("x" * 100)
    generate_keys(tmp_path / "keys")
    refused(tmp_path, said.format(tmp=tmp_path), *(word.format(tmp=tmp_path) for word in words))


def test_what_is_good_passes(tmp_path: Path) -> None:
    generate_keys(tmp_path / "keys")
    words = [
        "--keys",
        tmp_path / "keys",
        "--http-bind",
        "[::1]:0",
        "--ready-file",
        tmp_path / "ready.json",
    ]
    found = check(tmp_path, *words, "--bind", "tcp://0.0.0.0:0", "--interval", "4w")
    assert (found.status, found.err) == (0, "")
    assert "rebalancer.http_bind='[::1]:0'" in found.out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
@pytest.mark.parametrize("name", ["rebalancer.toml", "known_keys.toml"])
def test_keys_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    generate_keys(tmp_path / "keys")
    (tmp_path / "keys" / name).chmod(0)
    refused(tmp_path, f"{name} cannot be read by this user", "--keys", tmp_path / "keys")


@pytest.mark.parametrize(
    ("name", "mode", "said"),
    [
        ("rebalancer.toml", 0o644, "mode 644: it can be read or written by other users"),
        ("rebalancer.toml", 0o620, "mode 620: it can be read or written by other users"),
        ("rebalancer.toml", 0o440, ""),
        ("known_keys.toml", 0o644, ""),
        ("known_keys.toml", 0o666, "mode 666: it can be written by other users"),
    ],
)
def test_keys_that_others_can_use_are_warned_of(tmp_path: Path, name: str, mode: int, said: str) -> None:
    generate_keys(tmp_path / "keys")
    (tmp_path / "keys" / name).chmod(mode)
    found = check(tmp_path, "--keys", tmp_path / "keys")
    assert found.status == 0
    assert said in found.err
    assert bool(found.err) == bool(said)


PLANNERS = """
    import time
    from types import SimpleNamespace
    from support.stub_planner import plan
    def text(loads, **_): return "a plan"
    def picky(loads, **_): raise ValueError("256 experts only")
    def hangs(loads, **_): time.sleep(60)
    def other(loads, *, topology, num_slots, **rest):
        from evenroute.eplb.placement.placement import Placement
        found = plan(loads, topology=topology, num_slots=num_slots, **rest)
        found.placement = Placement.initial(2, loads.shape[1], num_slots, topology)
        return found
"""


@pytest.mark.parametrize(
    ("function", "status", "said"),
    [
        ("plan", 0, ""),
        ("picky", 0, "warning: | refuses a tiny case: 256 experts only"),
        ("text", 2, "failed on a tiny case: AttributeError"),
        ("hangs", 2, "failed on a tiny case"),
        ("other", 2, "answered a tiny case with a placement of another shape"),
    ],
)
def test_a_planner_of_ones_own_is_tried(tmp_path: Path, function: str, status: int, said: str) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(PLANNERS))
    limit_s = 1.0 if function == "hangs" else 60.0  # a busy host may take a second for the others
    (tmp_path / "c.toml").write_text(f"[planner]\ntime_limit_s = {limit_s}\nnum_groups = 2\n")
    environment = child_environment()
    environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    command = [sys.executable, "-m", "evenroute.tools.cli", "rebalancer", "--check-config"]
    command += [
        "--bind",
        f"ipc://{tmp_path}/r.sock",
        "--store",
        f"{tmp_path}/run.db",
        "--config",
        f"{tmp_path}/c.toml",
    ]
    command += ["--planner", f"mine:{function}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment)
    assert found.returncode == status, found.stderr
    for part in said.split(" | "):
        assert part in found.stderr
    assert len(found.stderr.splitlines()) == (1 if said else 0)


def test_a_former_name_is_taken_for_the_new_one(tmp_path):
    """`metrics_bind` of 0.1.0 is `http_bind`; both at once are one too many."""
    file = tmp_path / "evenroute.toml"
    file.write_text("[rebalancer]\nmetrics_bind = '127.0.0.1:9421'\n")
    assert load_config(file).rebalancer.http_bind == "127.0.0.1:9421"
    file.write_text("[rebalancer]\nmetrics_bind = '127.0.0.1:9421'\nhttp_bind = '127.0.0.1:1'\n")
    with pytest.raises(ValueError, match="http_bind is given under its former name too"):
        load_config(file)


@pytest.mark.parametrize("content", ["", "short", "x" * 600, "a token with \x01 in it"])
def test_a_file_that_holds_no_token_is_refused(content, tmp_path):
    from evenroute.dist.rebalancer.host_checks import read_http_token

    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(ValueError, match="holds no token: expected 16 to 512 ASCII signs"):
        read_http_token(SecuritySettings(http_token=str(file)))
    with pytest.raises(OSError, match="No such file"):
        read_http_token(SecuritySettings(http_token=str(tmp_path / "absent")))
    (tmp_path / "http_token").write_text("0123456789abcdef\n")
    assert read_http_token(SecuritySettings(keys=str(tmp_path))) == "0123456789abcdef"
    assert read_http_token(SecuritySettings()) == ""
