"""The README's console blocks give the output that stands below them, in a bare clone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import evenroute
from support.documented import ROOT, Lines, runs


def shown_below(line: str) -> list[str]:
    """The output below a prompt in the README, in the pieces that `...` leaves of it; white space does not count."""
    text = (ROOT / "README.md").read_text()
    [_, below] = text.split(f"$ {line}\n")
    block = re.split(r"^(?:\$ |```)", below, flags=re.MULTILINE)[0]
    return [
        " ".join(piece.split()) for piece in re.split(r"^\.\.\.$", block, flags=re.MULTILINE) if piece.strip()
    ]


@runs(
    "README.md",
    "evenroute advise examples/data/1_chat.json",
    "evenroute inspect examples/data/1_chat.json",
    "evenroute plan examples/data/1_chat.json",
    "evenroute convert plan.json sglang.json",
    "evenroute replay examples/data",
)
def test_console_blocks_show_what_comes_out(
    lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    pieces = 0
    for line in lines.texts:
        done = evenroute(*line.split()[1:])
        assert done.status == 0, f"{line}: {done.err}"
        came = " ".join(done.out.split())
        for piece in shown_below(line):
            assert piece in came, f"{line}: the README shows {piece!r}, what came is\n{done.out}"
            pieces += 1
    assert pieces >= 5, "the blocks show nothing"
    assert {path.name for path in Path().iterdir()} == {"examples", "story.png", "plan.json", "sglang.json"}


@runs("README.md", "python -m evenroute")
def test_the_module_is_the_command(lines: Lines) -> None:
    words = lines.words()
    done = subprocess.run(
        [sys.executable, *words[1:], "--version"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, evenroute("--version").out), done.stderr


def test_the_sample_loads_are_what_their_script_makes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/make_loads.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    made = sorted(tmp_path.iterdir())
    assert [path.name for path in made] == sorted(path.name for path in (ROOT / "examples/data").iterdir())
    for path in made:
        assert path.read_text() == (ROOT / "examples/data" / path.name).read_text(), path.name


@runs("README.md", "evenroute stress --help")
def test_help_of_the_main_job_names_its_flags(lines: Lines) -> None:
    done = evenroute(*lines.words()[1:])
    assert done.status == 0
    for flag in ("--routing", "--loads", "--moe"):
        assert flag in done.out
