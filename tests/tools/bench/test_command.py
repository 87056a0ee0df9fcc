"""`evenroute bench`: finds every benchmark, and says what is wrong in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evenroute.tools.commands.bench import BENCHES
from support.command import evenroute

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("name", BENCHES)
def test_each_benchmark_says_its_flags(name: str) -> None:
    done = evenroute("bench", name, "--help")
    assert done.status == 0, done.err
    assert "usage:" in done.out


@pytest.mark.parametrize("words", [["bench"], ["bench", "routr"], ["bench", "router", "--model", "dsv4"]])
def test_wrong_words_are_one_line_and_status_2(words: list[str]) -> None:
    done = evenroute(*words)
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert done.err.startswith("evenroute: error: ")


def test_router_bench_measures_on_a_cpu() -> None:
    done = evenroute("bench", "router", "--model", "qwen3", "--rows", "1,32", "--json")
    assert done.status == 0, done.err
    assert "qwen3" in json.dumps(json.loads(done.out))
