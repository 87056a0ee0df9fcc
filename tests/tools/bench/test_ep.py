"""`evenroute bench ep` at toy size over gloo: real agents and rebalancers, one rebalance a cell, outputs checked."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from evenroute.tools.bench.ep.run import outputs_hold
from evenroute.tools.bench.ep.table import print_report
from support.command import assert_one_line_error, evenroute

EXPERTS = 32


def bench(ranks: int, *flags: str, limit_s: float) -> dict[str, Any]:
    """The JSON object on stdout, the only thing there."""
    command = [
        sys.executable,
        "-m",
        "evenroute.tools",
        "bench",
        "ep",
        "--nproc-per-node",
        str(ranks),
        "--json",
    ]
    command += ["--experts", str(EXPERTS), "--top-k", "4", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def write_loads(path: Path, experts: int = EXPERTS) -> Path:
    rows = np.random.default_rng(4).zipf(1.6, (3, experts)).clip(max=400) * 100
    path.write_text(json.dumps({"logical_count": rows.tolist()}))
    return path


def check_cells(report: dict[str, Any]) -> None:
    assert not report["not_run"]
    for cell in report["cells"]:
        assert cell["ended"] == "done", cell
        assert cell["switches"] >= 1
        assert cell["moved_slots"] > 0
        before, after = cell["before"], cell["after"]
        # Even shares dealt by tickets, or planned shares: what was planned is what came.
        assert abs(after["balancedness"]["mean"] - after["predicted"]["mean"]) < 0.03, cell
        assert after["balancedness"]["mean"] > before["balancedness"]["mean"] + 0.05, cell
        for phase in ("before", "during", "after"):
            assert cell[phase]["tokens_s"] > 0
        assert cell["bandwidth"]["moved_mib"] > 0
        assert cell["outputs"]["steps_a_rank"] >= 20
    outputs = report["outputs"]
    assert outputs["worst_relative_error"] < 1e-5
    assert (outputs["wrong_ids"], outputs["wrong_slots"]) == (0, 0)
    costs = report["agent_step"]
    assert costs["vote and commit"]["count"] >= len(report["cells"])
    assert costs["no vote"]["count"] > costs["vote"]["count"] > 0
    assert outputs_hold(report)


def test_two_ranks_on_skewed_and_on_given_traffic(tmp_path: Path) -> None:
    loads, report = write_loads(tmp_path / "day.json"), tmp_path / "out.json"
    flags = ["--loads", str(loads), "--redundant", "8", "--dispatch", "weighted", "--tokens", "64"]
    found = bench(2, *flags, "--report", str(report), limit_s=280)
    assert json.loads(report.read_text()) == found
    assert [(cell["source"], cell["redundant"], cell["dispatch"]) for cell in found["cells"]] == [
        ("zipf", 8, "weighted"),
        ("day", 8, "weighted"),
    ]
    check_cells(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_ranks_with_each_dispatch() -> None:
    found = bench(8, "--redundant", "0,32", "--dispatch", "dynamic,weighted", "--layers", "1", limit_s=580)
    assert found["ranks"] == 8
    assert len(found["cells"]) == 4
    check_cells(found)


def phase(value: float) -> dict[str, Any]:
    both = {"mean": value, "worst": value}
    return {"steps": 9, "median": 2.5, "tokens_s": 123_456, "balancedness": both, "predicted": both}


def test_the_table_says_what_is_missing_and_why() -> None:
    cell = {"source": "day", "redundant": 0, "dispatch": "static", "policy": "global", "moved_slots": 0}
    none = {
        **cell,
        "ended": "no plan",
        "before": phase(0.991),
        "during": None,
        "after": None,
        "bandwidth": {},
    }
    found = {"migration_gb_s": 250.0, "of_plain": 0.8, "chunks": 40}
    done = {**cell, "ended": "done", "before": phase(0.5), "during": phase(0.7), "after": phase(0.9)}
    outputs = {
        "steps_a_rank": 9,
        "worst_relative_error": 1e-3,
        "allowed": 0.02,
        "wrong_ids": 0,
        "wrong_slots": 1,
    }
    names = ("layers", "experts", "top_k", "hidden", "tokens", "expert_mib")
    report = {
        "device": "a GPU",
        "ranks": 8,
        "sizes": dict.fromkeys(names, 8),
        "cells": [none, {**done, "bandwidth": found}, {**done, "bandwidth": {**found, "chunks": 2}}],
        "agent_step": {"vote": {"count": 5, "median_us": 100.0, "p99_us": 250.0}},
        "outputs": outputs,
        "not_run": ["zipf, 8 redundant, static"],
    }
    text = io.StringIO()
    print_report(report, Console(file=text, width=160))
    shown = text.getvalue()
    assert "no plan gained 0.01" in shown
    assert "0.500 / 0.700 / 0.900" in shown
    assert "250 (80%)" in shown
    assert shown.count("(80%)") == 1, "two chunks say nothing about bandwidth"
    assert "not run (--limit-s): zipf, 8 redundant, static" in shown
    assert not outputs_hold(report), "a slot with wrong weights ends the bench with 1"
    assert not outputs_hold({**report, "cells": [], "outputs": {**outputs, "wrong_slots": 0}}), (
        "nothing was run"
    )


def test_wrong_words_are_told_before_anything_starts(tmp_path: Path) -> None:
    loads = write_loads(tmp_path / "few.json", experts=16)
    assert_one_line_error(
        evenroute("bench", "ep", "--loads", loads), "few.json has 16 experts", "expected 256"
    )
    assert_one_line_error(evenroute("bench", "ep", "--redundant", "8,x"), "--redundant", "'8,x'")
    assert_one_line_error(
        evenroute("bench", "ep", "--dispatch", "random"), "--dispatch", "static, dynamic, weighted"
    )
    assert_one_line_error(evenroute("bench", "ep", "--nproc-per-node", 3), "multiple of ep_size")
    assert_one_line_error(evenroute("bench", "ep", "--nproc-per-node", 0), "--nproc-per-node", "at least 1")
    assert_one_line_error(evenroute("bench", "ep", "--report", tmp_path), "--report", "is a folder")
    assert_one_line_error(evenroute("bench", "ep", "--report", tmp_path / "no" / "r.json"), "does not exist")
    assert_one_line_error(evenroute("bench", "ep", "--no-zipf"), "--no-zipf", "--loads")
