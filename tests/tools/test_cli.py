"""The command's shell: help lists every command, wrong words are one line, nothing heavy is imported."""

from __future__ import annotations

import argparse
import subprocess
import sys

import click
import pytest
import typer

from evenroute.tools.bench.options import PARSERS, elastic_parser
from evenroute.tools.bench.planner import build_parser as planner_parser
from evenroute.tools.bench.transport import main as transport
from evenroute.tools.cli import build_app, command_names
from evenroute.tools.errors import one_line_errors
from evenroute.tools.flags import FlagParser
from evenroute.tools.sglang import build_parser as sglang_parser
from evenroute.tools.stress.options import build_parser as stress_parser


def evenroute(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "evenroute.tools", *arguments], capture_output=True, text=True, timeout=180
    )


def test_help_lists_every_command() -> None:
    shown = evenroute("--help")
    assert shown.returncode == 0
    missing = [name for name in command_names() if name not in shown.stdout]
    assert missing == []


def test_help_of_a_command_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from evenroute.tools.cli import build_app, command_names\n"
        "build_app(command_names())\n"
        "print(sorted({'torch', 'triton', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=180, check=True
    )
    assert done.stdout.strip() == "[]"


def _typed() -> list[tuple[str, click.Parameter]]:
    found: list[tuple[str, click.Parameter]] = []

    def walk(command: click.Command, name: str) -> None:
        found.extend((f"{name} {one.name}", one) for one in command.params)
        for word, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{name} {word}")

    walk(typer.main.get_command(build_app(command_names())), "evenroute")
    return found


def test_every_flag_says_what_it_is_and_its_default() -> None:
    """Of every command: those of typer, and those that run under torchrun or as a module."""
    silent = [name for name, one in _typed() if isinstance(one, click.Option) and not one.help]
    parsers: list[argparse.ArgumentParser] = [
        stress_parser(),
        planner_parser(),
        elastic_parser(),
        sglang_parser(),
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FlagParser, "parse_args", lambda parser, _: parsers.append(parser) or sys.exit(0))
        for parse in (*PARSERS.values(), transport):
            with pytest.raises(SystemExit):
                parse([])
    assert len({parser.prog for parser in parsers}) == 10
    for parser in parsers:
        shown = " ".join(parser.format_help().split())
        for action in parser._actions:
            flag = f"{parser.prog} {action.option_strings}"
            if not action.help:
                silent.append(flag)
            if action.default not in (None, False, True, "", [], argparse.SUPPRESS) and "default" not in (
                action.help or ""
            ):
                assert f"(default: {action.default})" in shown, flag
    assert silent == []


@pytest.mark.parametrize("words", [["rebalance"], ["--vesion"], ["plan", "--no-such-flag"], ["plan"]])
def test_wrong_words_are_one_line_and_status_2(words: list[str]) -> None:
    done = evenroute(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("evenroute: error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("ep_size: found 0, expected at least 1"), "ep_size: found 0, expected at least 1"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "x.json: No such file or directory"),
    ],
)
def test_wrong_input_becomes_one_line(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @one_line_errors
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"evenroute: error: {line}\n"


def test_a_defect_keeps_its_traceback() -> None:
    @one_line_errors
    def command() -> None:
        raise KeyError("a defect of ours")

    with pytest.raises(KeyError):
        command()
