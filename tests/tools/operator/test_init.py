"""`evenroute init` and `completion`, and the help that lists all commands."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from evenroute.dist.config import RebalancerConfig, load_config
from evenroute.tools.cli import GROUPS, command_names
from evenroute.tools.operator.completion import SHELLS
from evenroute.tools.operator.init import settings_text
from support.command import assert_one_line_error, evenroute
from support.control_plane import child_environment, wait_for
from support.documented import Lines, runs
from support.live_page import Story


def test_the_settings_file_is_good_and_holds_the_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "my job"
    outcome = evenroute("init", folder)
    assert outcome.status == 0, outcome.err
    assert f"next: evenroute rebalancer --config {folder}/evenroute.toml" in outcome.out
    assert (folder / "keys" / "rank.toml").exists()
    checked = evenroute("rebalancer", "--config", folder / "evenroute.toml", "--check-config")
    assert checked.status == 0, checked.err
    found = load_config(folder / "evenroute.toml")
    assert found.planner == RebalancerConfig().planner
    assert found.rebalancer.http_bind == "127.0.0.1:9421"


def test_every_setting_stands_in_it_with_its_default() -> None:
    """The comments, taken off, are the defaults: nothing is left out, and nothing else is said."""
    text = settings_text(Path("/run/job"), "ipc:///run/job/x.sock", with_keys=True)
    plain = re.sub(r"^# \w+ =  # none.*$", "", text, flags=re.MULTILINE)
    found = tomllib.loads(re.sub(r"^# (\w+ = )", r"\1", plain, flags=re.MULTILINE))
    config = RebalancerConfig()
    for section in ("rebalancer", "planner", "security"):
        defaults = dataclasses.asdict(getattr(config, section))
        assert {*found[section], *(name for name, value in defaults.items() if value is None)} == set(
            defaults
        )
        for name, value in found[section].items():
            if (section, name) not in {
                ("rebalancer", "bind"),
                ("rebalancer", "store"),
                ("rebalancer", "http_bind"),
                ("security", "keys"),
            }:
                assert value == defaults[name], name
    for name, value in dataclasses.asdict(config.planner).items():
        assert value is not None or f"# {name} =  # none unless given" in text


def test_an_address_for_others_gets_its_keys(tmp_path: Path) -> None:
    assert evenroute("init", tmp_path / "job", "--bind", "tcp://0.0.0.0:0").status == 0
    assert load_config(tmp_path / "job/evenroute.toml").security.keys == str(tmp_path / "job/keys")
    checked = evenroute("rebalancer", "--config", tmp_path / "job/evenroute.toml", "--check-config")
    assert checked.status == 0, checked.err


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert evenroute("init", tmp_path).status == 0
    before = (tmp_path / "keys/rank.toml").read_text()
    assert_one_line_error(evenroute("init", tmp_path), "settings are never overwritten")
    assert (tmp_path / "keys/rank.toml").read_text() == before
    assert_one_line_error(evenroute("init", tmp_path / "b", "--bind", "udp://x"), "--bind: 'udp://x' found")


def test_help_lists_every_command_once_in_groups() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == command_names()
    text = evenroute("-h").out
    assert evenroute("--help").out == text
    for name in command_names():
        assert re.search(rf"^  {name} ", text, re.MULTILINE), name


def test_help_of_the_rebalancer_shows_defaults_in_groups() -> None:
    text = evenroute("rebalancer", "-h").out
    for group in ("Options:", "Process:", "Planner:", "Security:"):
        assert f"\n{group}\n" in text
    flat = " ".join(text.split())
    for words in ("Default: 60.", "Default: auto.", "Default: info.", "30s, 5m, 2h"):
        assert words in flat


def test_wrong_shell() -> None:
    assert_one_line_error(evenroute("completion", "tcsh"), "expected bash, zsh, fish")


SET_UP = {
    "bash": (["--norc", "--noprofile"], 'eval "$(evenroute completion bash)"'),
    "zsh": (["-f"], 'autoload -Uz compinit; compinit -D -u; eval "$(evenroute completion zsh)"'),
    "fish": (["--no-config"], "evenroute completion fish | source"),
}


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_and_flags(shell: str, tmp_path: Path) -> None:
    """In a terminal, with the Tab key."""
    assert "_EVENROUTE_COMPLETE" in evenroute("completion", shell).out
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell} (apt-get install {shell})")
    program = tmp_path / "evenroute"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m evenroute.tools.cli "$@"\n')
    program.chmod(0o755)
    flags, line = SET_UP[shell]
    main, child = pty.openpty()
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [shell, *flags, "-i"],
        env=child_environment(PATH=path, HOME=str(tmp_path), TERM="xterm"),
        preexec_fn=lambda: os.login_tty(child),
    )
    os.close(child)
    seen = bytearray()

    def shows(words: bytes) -> bool:
        if select.select([main], [], [], 0.1)[0]:
            seen.extend(os.read(main, 65536))
        return words in seen

    try:
        for typed, words in (
            (
                f"{line}; echo set''up done\n",
                b"setup done",
            ),  # typed with quotes, so that the echo is no answer
            ("evenroute roll\t", b"rollback"),
            ("\x15evenroute top --timeo\t", b"--timeout"),
        ):
            os.write(main, typed.encode())
            wait_for(lambda words=words: shows(words), 120, f"{words!r}; the terminal shows {seen!r}")
    finally:
        process.kill()
        process.wait(60)
        os.close(main)


@runs("deploy/README.md", "evenroute init", "evenroute completion", "evenroute backup")
def test_as_the_readme_says(lines: Lines, tmp_path: Path) -> None:
    made = evenroute(*lines.words("evenroute init", {"DIR": str(tmp_path / "job")})[1:])
    assert made.status == 0, made.err
    assert evenroute(*lines.words("evenroute completion")[1:]).status == 0
    story = Story(tmp_path / "run.db", layers=2, experts=8, slots=8, ranks=2)
    story.window(1000.0, 0)
    words = lines.words("evenroute backup", {"STORE": str(story.path), "TO": str(tmp_path / "copy.db")})
    copied = evenroute(*words[1:])
    assert copied.status == 0, copied.err
