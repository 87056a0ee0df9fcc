"""Each command line of README.md and deploy/README.md is run by a test as it stands there, or, where this machine
lacks what it needs, checked as strictly as can be done without."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from support.documented import (
    DOCUMENTS,
    ROOT,
    Registered,
    command_lines,
    find_line,
    problems,
    registered,
    replaced,
)

# What may be lacking on a machine without a cluster; anything else has to run.
LACKING = {"a Docker daemon", "a Kubernetes cluster", "systemd", "hours"}

ours = functools.cache(registered)
by_document = pytest.mark.parametrize("document", DOCUMENTS)


@by_document
def test_every_command_line_has_its_test(document: str) -> None:
    assert problems((ROOT / document).read_text(), document, ours()) == []


def test_what_is_only_checked_says_what_it_needs() -> None:
    marks = ours()
    assert {mark.needs for mark in marks if mark.needs} <= LACKING
    assert {mark.document for mark in marks} == set(DOCUMENTS)
    checked = sum(bool(mark.needs) for mark in marks)
    assert checked < len(marks) / 3, "most lines are run"


NEW_LINES = {
    "in a shell block": "```sh\nevenroute status ipc:///new --json\n```\n",
    "behind a prompt": "```\n$ evenroute status ipc:///new --json\nepoch 3\n```\n",
    "a target without a prompt": "```\nmake lint\n```\n",
    "continued": "```sh\nevenroute status \\\n  ipc:///new --json\n```\n",
    "another program": "```bash\ncurl -s localhost:9421/metrics\n```\n",
    "in running text": "Then `evenroute status ipc:///new --json` says more.\n",
    "in running text, over two lines": "Then `evenroute status\nipc:///new --json` says more.\n",
}


@by_document
@pytest.mark.parametrize("added", NEW_LINES.values(), ids=NEW_LINES)
def test_a_new_line_without_a_test_is_found(document: str, added: str) -> None:
    text = (ROOT / document).read_text()
    before = problems(text, document, ours())
    [found] = [line for line in problems(f"{text}\n{added}", document, ours()) if line not in before]
    assert "no test runs" in found


@by_document
def test_a_changed_or_removed_line_is_found(document: str) -> None:
    text = (ROOT / document).read_text()
    mark = next(mark for mark in ours() if mark.document == document and "evenroute plan" in mark.start)
    gone = text.replace("evenroute plan", "evenroute plain")
    found = problems(gone, document, [mark])
    assert any(mark.test in line and "begins 0 command lines" in line for line in found)
    assert any("no test runs 'evenroute plain" in line for line in found)


def test_a_line_that_two_could_mean_is_found() -> None:
    mark = Registered("README.md", "evenroute plan", "", "test_x.py::test_x")
    text = "```sh\nevenroute plan a\nevenroute plan b\n```\n"
    assert "begins 2 command lines" in problems(text, "README.md", [mark])[0]
    assert find_line(["evenroute plan", "evenroute plan b"], "evenroute plan") == "evenroute plan"


def test_marks_are_read_from_the_tests(tmp_path: Path) -> None:
    body = '@runs("README.md", "make x", needs="hours")\ndef test_x({}):\n    assert lines\n'
    (tmp_path / "test_one.py").write_text(body.format("lines"))
    assert registered(tmp_path) == [Registered("README.md", "make x", "hours", "test_one.py::test_x")]
    (tmp_path / "test_two.py").write_text(body.format(""))
    with pytest.raises(AssertionError, match=r"test_two.py::test_x does not take its lines"):
        registered(tmp_path)


def test_lines_are_read_as_a_shell_would() -> None:
    text = (
        "```\nmake demo     # sets up\n  and more\n| a | b |\n```\n"
        "```python\nprint('evenroute status x')\n```\n"
        "```sh\n# a comment\nA=1 evenroute plan a \\\n  --json\n```\n"
        "`evenroute status` and `evenroute bench router` are names, `evenroute status ADDR` is a line.\n"
    )
    assert command_lines(text) == ["make demo", "A=1 evenroute plan a --json", "evenroute status ADDR"]


def test_a_change_that_changes_nothing_is_an_error() -> None:
    assert replaced(["--to", "tcp://node-0:1"], {"node-0": "127.0.0.1"}) == ["--to", "tcp://127.0.0.1:1"]
    assert replaced(["60", "--at", "x:4601"], {"60": "1"}) == ["1", "--at", "x:4601"], (
        "a whole word where there is one"
    )
    with pytest.raises(AssertionError, match="'node-1' is not in"):
        replaced(["--to", "tcp://node-0:1"], {"node-1": "127.0.0.1"})
