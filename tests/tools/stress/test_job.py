"""The main job, as a user starts it: real processes, a real rebalancer, the run's own report."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from evenroute.eplb.store.writer import StoreReader
from support.control_plane import wait_for
from support.torchrun import end_group, finish, start_torchrun

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
    tmp_path: Path, ranks: int, *words: str, status: int = 0, limit_s: float = 280
) -> dict[str, Any]:
    report = tmp_path / "report.json"
    process = start_torchrun(ranks, *words, "--report", str(report))
    found, out, err = finish(process, limit_s)
    assert found == status, f"stdout: {out[-3000:]}\nstderr: {err[-3000:]}"
    loaded: dict[str, Any] = json.loads(report.read_text())
    loaded["stdout"] = out
    return loaded


def broken(report: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in report["invariants"] if finding["held"] is not True]


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


@pytest.mark.parametrize(
    "routing", ["round-robin", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("fake", "uniform"))]
)
def test_every_input_runs_without_a_rebalancer(tmp_path: Path, routing: str) -> None:
    words = ["--routing", routing, "--rebalancer", "off", "--steps", "8", "--layers", "2", "--tokens", "32"]
    report = run_stress(tmp_path, 2, *words)
    assert broken(report) == []
    assert report["switches"] == 0


def test_real_weights_follow_the_placements(tmp_path: Path) -> None:
    report = run_stress(tmp_path, 2, "--moe", "--steps", "150", *SMALL)
    assert broken(report) == []
    assert report["switches"] >= 1
    assert {"moe outputs", "moe weights"} <= {finding["name"] for finding in report["invariants"]}


def start_rebalancer(folder: Path) -> subprocess.Popen[bytes]:
    """A rebalancer of the test's own on `folder`'s socket and store; waits until it serves."""
    config = folder / "rebalancer.toml"
    config.write_text(
        f'[rebalancer]\nbind = "ipc://{folder}/r.sock"\nstore = "{folder}/run.db"\n'
        f'ready_file = "{folder}/ready.json"\n'
        '[planner]\ninterval = 3\ninterval_unit = "windows"\npolicy = "global"\n'
    )
    (folder / "ready.json").unlink(missing_ok=True)
    command = [sys.executable, "-m", "evenroute.tools", "rebalancer", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(
        lambda: (folder / "ready.json").exists() or process.poll() is not None, 90, "the rebalancer serves"
    )
    assert process.poll() is None, "the rebalancer ended"
    return process


def wait_for_placements(folder: Path, least: int, limit_s: float) -> list[int]:
    """Epoch counters of the placements in the store, once there are `least` of them."""
    deadline = time.monotonic() + limit_s
    while True:
        reader = StoreReader(folder / "run.db")
        counters = [row.epoch >> 20 for row in reader.placements()]
        reader.close()
        if len(counters) >= least:
            return counters
        assert time.monotonic() < deadline, f"placements so far: {counters}"
        time.sleep(0.1)


def test_kill_9_of_the_rebalancer_leaves_no_gap_and_it_is_taken_up_again(tmp_path: Path) -> None:
    rebalancer = start_rebalancer(tmp_path)
    words = ["--rebalancer", f"ipc://{tmp_path}/r.sock", "--steps", "600", "--no-reshuffle", *SMALL]
    job = start_torchrun(2, *words, "--report", str(tmp_path / "report.json"))
    try:
        assert set(wait_for_placements(tmp_path, 2, 90)) == {1}
        rebalancer.kill()
        rebalancer.wait(60)
        time.sleep(2)
        rebalancer = start_rebalancer(tmp_path)
        placements = len(wait_for_placements(tmp_path, 1, 90))
        assert 2 in wait_for_placements(tmp_path, placements + 1, 90)
        status, out, err = finish(job, 240)
    finally:
        end_group(job)
        rebalancer.terminate()
        rebalancer.wait(60)
    assert status == 0, f"stdout: {out[-3000:]}\nstderr: {err[-3000:]}"
    report = json.loads((tmp_path / "report.json").read_text())
    assert broken(report) == []
    assert report["key"][0] >> 20 == 2, "the second life's placement is in use"
    # No step waited for the dead rebalancer: it was gone for more than two seconds.
    assert report["forward_thread"]["agent_step_max_us"] < 2e6


def test_a_broken_invariant_makes_the_exit_status_1(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "from evenroute.routing.router import Router\n"
        "from evenroute.tools.stress.__main__ import main\n"
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
    status, out, _ = finish(process, 280)
    assert status == 1
    assert "BROKEN ids map back" in " ".join(out.split())
    assert "ids map back" in broken(json.loads((tmp_path / "r.json").read_text()))
