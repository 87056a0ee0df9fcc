"""Names that strangers chose are printed escaped, and every encoding gets a whole report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evenroute import Placement, Topology
from evenroute.eplb.placement.file import save_placement, update_placement_set
from evenroute.tools.report.words import visible
from support.command import assert_one_line_error, evenroute

EVIL = "e\x1b]0;owned\x07\x1b[2J[bold]$\\frac$\u202e\nevenroute: all is well\x9b31m"
ESCAPED = r"e\x1b]0;owned\x07\x1b[2J[bold]$\frac$\u202e\nevenroute: all is well\x9b31m"


def loads(path: Path) -> Path:
    np.save(path, np.random.default_rng(0).multinomial(4000, np.ones(16) / 16, 3))
    return path


def test_visible_text() -> None:
    assert visible(EVIL) == ESCAPED
    assert visible("größe 模型 ▁█") == "größe 模型 ▁█"
    assert visible(os.fsdecode(b"a\xff")) == r"a\xff"


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "{}"),
        ("inspect", "{}", "--layer", 1, "--plan-slots", 20, "--ep-size", 4),
        ("inspect", "{}", "{other}", "--plan-slots", 20, "--ep-size", 4),
        ("inspect", "{}", "{other}", "--diff"),
        ("inspect", "{}", "--png", "{}.png", "--html", "{}.html"),
        ("inspect", "{}.absent"),
        ("advise", "{}", "{other}", "--ep-size", 4),
        ("replay", "{}", "--ep-size", 4),
        ("plan", "{}", "--ep-size", 4, "--num-slots", 20, "-o", "{}.json"),
        ("plan", "{other}", "--ep-size", 4, "--num-slots", 20, "--current", "{placement}"),
        ("convert", "{placement}", "{}.json", "--to", "sglang"),
        ("convert", "{placement}", "{}", "--to", EVIL),
        ("inspect", "{placement}"),
        ("inspect", "{set}"),
    ],
    ids=lambda words: " ".join(map(str, words)).replace(EVIL, "EVIL"),
)
def test_no_name_reaches_the_terminal_as_it_is(tmp_path: Path, words: tuple[object, ...]) -> None:
    path = loads(tmp_path / f"{EVIL}.npy")
    other = loads(tmp_path / "other.npy")
    placement = Placement.initial(3, 16, 20, Topology(4))
    save_placement(tmp_path / f"{EVIL}.placement", placement, model=EVIL)
    update_placement_set(tmp_path / "set", EVIL, placement, model=EVIL)
    named = {"{other}": other, "{placement}": tmp_path / f"{EVIL}.placement", "{set}": tmp_path / "set"}
    arguments = [named.get(str(word)) or str(word).replace("{}", str(path)) for word in words]
    outcome = evenroute(*arguments)
    assert outcome.status in (0, 2)
    shown = outcome.out + outcome.err
    assert [char for char in shown if not char.isprintable() and char != "\n"] == []
    assert "\nevenroute: all is well" not in shown


def test_json_holds_the_name_itself(tmp_path: Path) -> None:
    update_placement_set(tmp_path / "set", EVIL, Placement.initial(3, 16, 20, Topology(4)), model=EVIL)
    [facts] = evenroute("inspect", tmp_path / "set", "--json").json["sources"]
    assert (facts["key"], facts["model"]) == (EVIL, EVIL)


def test_each_key_of_a_set_is_named(tmp_path: Path) -> None:
    for key in ("prefill", "decode"):
        update_placement_set(tmp_path / "set.json", key, Placement.initial(3, 16, 20, Topology(4)))
    lines = evenroute("inspect", tmp_path / "set.json").out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["set.json", "[decode]"], ["set.json", "[prefill]"]]


def test_long_names_fold_and_figures_stay_whole(tmp_path: Path) -> None:
    paths = [loads(tmp_path / f"{'n' * 90}{letter}.npy") for letter in "ab"]
    outcome = evenroute("inspect", *paths)
    assert "…" not in outcome.out
    assert outcome.out.count("n" * 10) > 2


@pytest.mark.parametrize("encoding", ["cp1252", "utf-8", "C locale"])
def test_every_encoding_gets_the_report(tmp_path: Path, encoding: str) -> None:
    name = tmp_path / "größe 模型.npy"
    np.save(name, np.random.default_rng(0).multinomial(4000, np.ones(16) / 16, (6, 3)))
    given = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": encoding}
    if encoding == "C locale":
        given.pop("PYTHONIOENCODING")
        encoding = "ascii"
    code = "import sys; from evenroute.tools.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", name, "--layer", "1"],
        capture_output=True,
        env={**os.environ, **given},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    assert "Ranks (x mean)" in text
    assert [sign in text for sign in "█#"] == [encoding == "utf-8", encoding != "utf-8"]


def test_an_error_line_keeps_its_one_line(tmp_path: Path) -> None:
    path = tmp_path / f"{EVIL}.json"
    path.write_text(json.dumps({"logical_count": [[1], [1, 2]]}))
    for command in (["inspect"], ["advise"], ["replay"], ["plan", "--ep-size", 2, "--num-slots", 2]):
        assert_one_line_error(evenroute(command[0], path, *command[1:]), r"\x1b]0;owned\x07")
