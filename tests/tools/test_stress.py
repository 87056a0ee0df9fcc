"""The main job, as a user starts it: real processes, a real rebalancer, the run's own report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.torchrun import finish, start_torchrun

SMALL = [
    "--policy",
    "global",
    "--layers",
    "3",
    "--tokens",
    "64",
    "--interval-steps",
    "20",
    "--step-delay",
    "0.04",
]


def run_stress(
    tmp_path: Path, ranks: int, *words: str, status: int = 0, limit_s: float = 200
) -> dict[str, Any]:
    report = tmp_path / "report.json"
    process = start_torchrun(ranks, *words, "--report", str(report))
    found, out, err = finish(process, limit_s)
    assert found == status, f"stdout: {out[-3000:]}\nstderr: {err[-3000:]}"
    loaded: dict[str, Any] = json.loads(report.read_text())
    loaded["stdout"] = out
    return loaded


def broken(report: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in report["invariants"] if not finding["held"]]


def test_the_loop_closes_on_two_ranks(tmp_path: Path) -> None:
    report = run_stress(tmp_path, 2, "--routing", "zipf", "--steps", "240", *SMALL)
    assert broken(report) == []
    assert report["switches"] >= 2, report["segments"]
    assert report["moved_slots"] > 0
    assert report["balancedness_achieved"] > report["balancedness_before"]
    assert abs(report["balancedness_achieved"] - report["balancedness_predicted"]) < 0.01
    names = {finding["name"] for finding in report["invariants"]}
    assert names == {"same placement", "count sums", "ids map back", "counts stored"}
    for words in ("balancedness before", "switches", "moved slots", "steps per second", "forward thread"):
        assert words in report["stdout"]


@pytest.mark.parametrize("ranks", [2, 8])
def test_real_loads_reach_the_balance_that_was_predicted(
    tmp_path: Path, shared_data: Path, ranks: int
) -> None:
    loads = str(shared_data / "prefill_in4096.json")
    words = [
        "--policy",
        "global",
        "--routing",
        "trace",
        "--loads",
        loads,
        "--tokens",
        "256",
        "--interval-steps",
        "12",
    ]
    report = run_stress(tmp_path, ranks, *words, "--layers", "3", "--steps", "120", "--step-delay", "0.05")
    assert broken(report) == []
    assert report["switches"] >= 1
    assert report["balancedness_achieved"] > 0.95
    assert abs(report["balancedness_achieved"] - report["balancedness_predicted"]) < 0.01
    assert report["balancedness_before"] < report["balancedness_achieved"]


def test_shared_tokens_get_the_same_ids_on_all_ranks(tmp_path: Path) -> None:
    report = run_stress(tmp_path, 2, "--token-mode", "shared", "--steps", "60", *SMALL)
    assert broken(report) == []
    assert "same ids" in {finding["name"] for finding in report["invariants"]}
    assert report["dispatch"] == "rank_invariant"


@pytest.mark.parametrize("routing", ["fake", "uniform", "round-robin"])
def test_every_input_runs_without_a_rebalancer(tmp_path: Path, routing: str) -> None:
    words = ["--routing", routing, "--rebalancer", "off", "--steps", "8", "--layers", "2", "--tokens", "32"]
    report = run_stress(tmp_path, 2, *words)
    assert broken(report) == []
    assert report["switches"] == 0


def test_a_broken_invariant_makes_the_exit_status_1(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "from evenroute.routing.router import Router\n"
        "from evenroute.tools.stress import main\n"
        "call = Router.__call__\n"
        "def shifted(self, *args, **kwargs):\n"
        "    output = call(self, *args, **kwargs)\n"
        "    output.physical_ids[0, 0] ^= 1\n"
        "    return output\n"
        "Router.__call__ = shifted\n"
        "main()\n"
    )
    words = ["--rebalancer", "off", "--steps", "4", "--layers", "2", "--tokens", "16"]
    process = start_torchrun(2, *words, "--report", str(tmp_path / "r.json"), script=script)
    status, out, _ = finish(process, 120)
    assert status == 1
    assert "BROKEN ids map back" in " ".join(out.split())
    assert "ids map back" in broken(json.loads((tmp_path / "r.json").read_text()))
