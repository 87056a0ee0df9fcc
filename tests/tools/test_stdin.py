"""`-` in place of a path: loads from standard input, in every form that is told by its content."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.command import assert_one_line_error, evenroute

COUNTS = np.arange(24).reshape(2, 3, 4) + 7


class Pipe:
    """Standard input that is no terminal."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)

    def isatty(self) -> bool:
        return False


Feed = Callable[[bytes], None]


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Feed:
    return lambda content: monkeypatch.setattr(sys, "stdin", Pipe(content))


def of_numpy(save: Callable[..., None], *arrays: np.ndarray, **named: np.ndarray) -> bytes:
    file = io.BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


FORMS = {
    "JSON": json.dumps({"logical_count": COUNTS.tolist()}).encode(),
    "npy": of_numpy(np.save, COUNTS[0]),
    "npz": of_numpy(np.savez, logical_count=COUNTS[0]),
    "csv": "\n".join(",".join(map(str, row)) for row in COUNTS[0].tolist()).encode(),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_told_by_its_content(feed: Feed, form: str) -> None:
    feed(FORMS[form])
    outcome = evenroute("inspect", "-", "--ep-size", 2, "--json")
    assert outcome.status == 0, outcome
    [source] = outcome.json["sources"]
    assert (source["num_layers"], source["num_logical_experts"]) == (3, 4)


@pytest.mark.parametrize(
    "words",
    [
        ["advise", "-", "--ep-size", 2],
        ["plan", "-", "--ep-size", 2, "--num-slots", 6, "--json"],
        ["replay", "-", "--ep-size", 2, "--json"],
        ["convert", "-", "OUT", "--to", "evenroute", "--what", "loads"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_that_reads_loads_takes_it(tmp_path: Path, feed: Feed, words: list[object]) -> None:
    feed(FORMS["JSON"])
    outcome = evenroute(*(tmp_path / "out.npz" if word == "OUT" else word for word in words))
    assert outcome.status == 0, outcome


def test_wrong_use_is_one_line(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(b"")
    assert_one_line_error(evenroute("inspect", "-"), "standard input is empty")
    feed(FORMS["JSON"])
    assert_one_line_error(evenroute("inspect", "-", "-"), "given twice")
    feed(b"just words, no loads\n")
    assert evenroute("inspect", "-").status == 2
    monkeypatch.setattr(Pipe, "isatty", lambda _: True)
    assert_one_line_error(evenroute("inspect", "-"), "is a terminal")


def test_convert_says_what_it_wrote_as_json(tmp_path: Path) -> None:
    source, target = tmp_path / "loads.json", tmp_path / "out.json"
    source.write_bytes(FORMS["JSON"])
    outcome = evenroute("convert", source, target, "--to", "sglang", "--json")
    assert outcome.json == {"output": str(target), "form": "sglang", "holds": "loads", "windows": 2}
    evenroute("plan", source, "--ep-size", 2, "--num-slots", 6, "-o", tmp_path / "plan.json")
    outcome = evenroute("convert", tmp_path / "plan.json", target, "--to", "sglang", "--json")
    assert outcome.json["holds"] == "placement"
    assert (outcome.json["num_layers"], outcome.json["num_experts"], outcome.json["num_slots"]) == (3, 4, 6)
