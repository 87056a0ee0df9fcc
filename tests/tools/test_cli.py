"""The command's shell: help lists every command, wrong words are one line, nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from evenroute.tools.cli import command_names
from evenroute.tools.errors import one_line_errors


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
