"""The command lines of README.md and deploy/README.md, and which test runs each of them.

@runs("deploy/README.md", "evenroute keygen keys")
def test_keys(lines: Lines) -> None: ...           # `lines` are taken from the document, whole

The words in the decorator name a line by its beginning; what the test gets is the document's line. Where a line cannot
run here, `needs="docker"` says what is lacking, and the test checks the line as strictly as can be done without.
`tests/docs/test_every_command.py` finds every line without a test, and every test without a line.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ("README.md", "deploy/README.md")
PROGRAMS = r"(?:[\w./-]*/)?(?:evenroute|torchrun|make|pip|docker|helm|kubectl|sbatch|systemctl|python3?)"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SHELLS = ("sh", "bash", "shell", "console")
# In running text a command is what has a program, and words after it; `evenroute status` alone is a name.
_SPAN = re.compile(rf"`({PROGRAMS} [^`]+)`")
_NAME = re.compile(r"evenroute( bench)? [a-z]+")


def command_lines(text: str) -> list[str]:
    """Every command line of a Markdown text, once, in its order: of shell blocks all lines; of blocks without a
    language those after a prompt, and those that start with a program; and inline commands that have arguments.
    Continuation lines are joined, prompts and comments dropped."""
    found: list[str] = []
    for language, block in _FENCE.findall(text):
        for raw in re.sub(r"\\\n\s*", "", block).splitlines():
            line = re.sub(r"\s+#\s.*$", "", raw).strip()
            prompted = line.startswith("$ ")
            shell = language in _SHELLS and line and not line.startswith("#")
            bare = not language and re.match(rf"{PROGRAMS} ", line) and not raw.startswith((" ", "|"))
            if prompted or shell or bare:
                found.append(line.removeprefix("$ "))
    for span in _SPAN.findall(_FENCE.sub("", text)):
        line = " ".join(span.split())
        if not _NAME.fullmatch(line):
            found.append(line)
    return list(dict.fromkeys(found))


def find_line(lines: Sequence[str], start: str) -> str:
    """The one line that is `start`, or begins with it. LookupError: none does, or several."""
    if start in lines:
        return start
    found = [line for line in lines if line.startswith(start)]
    if len(found) != 1:
        raise LookupError(f"{start!r} begins {len(found)} command lines, expected 1: {found}")
    return found[0]


@dataclass(frozen=True)
class Lines:
    """What a test gets: its lines, as they stand in the document."""

    document: str
    texts: tuple[str, ...]

    def text(self, start: str = "") -> str:
        """One of them, whole."""
        return find_line(self.texts, start)

    def words(self, start: str = "", changes: dict[str, str] | None = None) -> list[str]:
        """One of them as words. `changes` says exactly how the run differs from the document: old -> new; an old one
        that is not there is an error."""
        return replaced(shlex.split(self.text(start)), changes or {})


def replaced(words: list[str], changes: dict[str, str]) -> list[str]:
    """`words` with every old replaced by its new: where it is a word, else inside of words. Each old must be there."""
    for old, new in changes.items():
        assert any(old in word for word in words), f"{old!r} is not in {shlex.join(words)}"
        whole = old in words
        words = [new if word == old else word if whole else word.replace(old, new) for word in words]
    return words


def runs(document: str, *starts: str, needs: str = "") -> Callable[[Any], Any]:
    """Marks the test that runs these lines of `document` (or, `needs`: checks them); gives it `lines`."""
    known = command_lines((ROOT / document).read_text())
    # A beginning that names no line is told by the walk over the documents; here it must not hide all other tests.
    texts = tuple(line for start in starts for line in known if line == start or line.startswith(start))
    name = needs and f"needs {needs}"
    return pytest.mark.parametrize("lines", [pytest.param(Lines(document, texts), id=name or "as written")])


@dataclass(frozen=True)
class Registered:
    """One `@runs(...)` found in the tests."""

    document: str
    start: str
    needs: str
    test: str


def registered(folder: Path | None = None) -> list[Registered]:
    """All `@runs(...)` on tests under `folder`, read from their text: nothing is imported."""
    found = []
    folder = folder or ROOT / "tests"
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        names = _constants(tree)
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
                continue
            takes = {argument.arg for argument in function.args.args}
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and isinstance(mark.func, ast.Name) and mark.func.id == "runs":
                    name = f"{path.relative_to(folder)}::{function.name}"
                    assert "lines" in takes, f"{name} does not take its lines from the document"
                    document, *starts = (_text(argument, names) for argument in mark.args)
                    needs = next((_text(k.value, names) for k in mark.keywords if k.arg == "needs"), "")
                    found += [Registered(document, start, needs, name) for start in starts]
    return found


def _constants(tree: ast.Module) -> dict[str, str]:
    """The texts that a module gives names to."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _text(node: ast.expr, names: dict[str, str]) -> str:
    return names[node.id] if isinstance(node, ast.Name) else str(ast.literal_eval(node))


def problems(text: str, document: str, marks: Sequence[Registered]) -> list[str]:
    """Lines of the document that no test runs or checks, and marks that name no line of it."""
    lines = command_lines(text)
    found, covered = [], set()
    for mark in marks:
        if mark.document == document:
            try:
                covered.add(find_line(lines, mark.start))
            except LookupError as error:
                found.append(f"{document}: {mark.test}: {error}")
    return found + [f"{document}: no test runs {line!r}" for line in lines if line not in covered]
