"""B33: a dump larger than memory is summarised, looked at by layer and compared under 400 MB. Slow."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import LoadWindow

WINDOWS, LAYERS, EXPERTS = 20_000, 58, 256
LIMIT_BYTES = 400 << 20
WATCH = """
import resource, sys
from evenroute.tools.cli import main
try:
    main(sys.argv[1:])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""

pytestmark = pytest.mark.slow


def write_large(path: Path, seed: int) -> np.ndarray:
    """20,000 windows of int32 (1.19 GB) in chunks of one; the exact totals."""
    rng = np.random.default_rng(seed)
    total = np.zeros((LAYERS, EXPERTS), np.int64)
    base = rng.integers(1 << 16, 1 << 20, (64, LAYERS, EXPERTS))  # too large for 16 bits
    header = DumpHeader(num_layers=LAYERS, num_logical_experts=EXPERTS, ep_size=32, num_slots=288)
    with DumpWriter(path, header) as writer:
        for step in range(WINDOWS):
            counts = base[(step * 7 + seed) % 64]
            writer.add_window(LoadWindow(counts, float(step), step, step, tokens=1000))
            total += counts
    return total


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tuple[Path, np.ndarray]]]:
    folder = tmp_path_factory.mktemp("large")
    paths = [folder / "a.evd", folder / "b.evd"]
    found = [(path, write_large(path, seed)) for seed, path in enumerate(paths)]
    assert paths[0].stat().st_size > 1_180_000_000
    yield found
    for path in paths:  # pytest keeps its folders; nobody needs 2.4 GB of them
        path.unlink()


def watched(*arguments: object) -> tuple[str, float, int]:
    """stdout, seconds and peak memory in bytes of `evenroute ARGUMENTS` in a process of its own."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", WATCH, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    spent = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    return done.stdout, spent, int(done.stderr.strip().splitlines()[-1]) * 1024


@pytest.mark.timeout(900)
def test_summary_in_a_minute_and_400_mb(large: list[tuple[Path, np.ndarray]]) -> None:
    import json

    path, total = large[0]
    out, spent, peak = watched("inspect", path, "--json")
    facts = json.loads(out)["sources"][0]
    assert facts["routed"] == int(total.sum())
    assert facts["num_windows"] == WINDOWS
    assert facts["tokens"] == 1000 * WINDOWS
    assert len(facts["balancedness_over_time"]) <= 2048
    assert sum(point["num_windows"] for point in facts["balancedness_over_time"]) == WINDOWS
    print(f"summary: {spent:.1f} s, {peak / 1e6:.0f} MB")
    assert spent < 60
    assert peak < LIMIT_BYTES


@pytest.mark.timeout(900)
def test_layer_and_diff_in_400_mb(large: list[tuple[Path, np.ndarray]]) -> None:
    import json

    (first, total), (second, _) = large
    out, spent, peak = watched("inspect", first, "--layer", 3, "--json")
    assert json.loads(out)["sources"][0]["layer"]["expert_loads"] == total[3].tolist()
    print(f"layer: {spent:.1f} s, {peak / 1e6:.0f} MB")
    assert peak < LIMIT_BYTES
    out, spent, peak = watched("inspect", first, second, "--diff", "--json")
    print(f"diff: {spent:.1f} s, {peak / 1e6:.0f} MB")
    assert peak < LIMIT_BYTES
    assert 0 < json.loads(out)["diff"]["shift"]["mean"] < 0.1


@pytest.mark.timeout(900)
def test_replay_and_advise_in_400_mb(large: list[tuple[Path, np.ndarray]]) -> None:
    path = large[0][0]
    for command in (("replay", path, "--interval", 2000, "--json"), ("advise", path, "--json")):
        _, spent, peak = watched(*command)
        print(f"{command[0]}: {spent:.1f} s, {peak / 1e6:.0f} MB")
        assert peak < LIMIT_BYTES
