"""A count is shown and written as it was read, also above 2**53, where float64 has no odd integer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.analysis.facts import history_facts, layer_facts
from evenroute.eplb.analysis.history import choose_placement, read_history
from evenroute.eplb.files.open import open_source
from evenroute.eplb.files.sglang import to_logical
from evenroute.eplb.files.write import write_loads
from evenroute.tools.report.text import count

LARGE = 2**53 + 7
COUNTS = np.array([[LARGE, 1, 2, 3], [4, LARGE, 6, 8]], np.int64)
ROWS = np.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 2, 3]], np.int32)


def write(folder: Path, form: str) -> Path:
    path = folder / f"loads.{form.partition(' ')[0]}"
    match form:
        case "json":
            path.write_text(json.dumps({"logical_count": COUNTS.tolist()}))
        case "npy":
            np.save(path, COUNTS)
        case "npz":
            np.savez(path, loads=COUNTS)
        case "csv":
            path.write_text("".join(",".join(map(str, row)) + "\n" for row in COUNTS.tolist()))
        case "csv long":
            rows = [f"{row},{expert},{COUNTS[row, expert]}\n" for row in range(2) for expert in range(4)]
            path.write_text("layer_id,expert_id,count\n" + "".join(rows))
    return path


def shown(path: Path) -> np.ndarray:
    source = open_source(path)
    history = read_history(source, choose_placement(source, ep_size=2))
    facts = history_facts(history)
    assert facts["routed"] == int(COUNTS.sum()) == 2 * LARGE + 24
    assert count(facts["routed"]) == f"{2 * LARGE + 24:,}"
    assert [found["load"] for found in facts["hottest_experts"][:2]] == [LARGE, LARGE]
    rows = []
    for layer in range(2):
        found = layer_facts(history, layer)
        assert found["load"] == int(COUNTS[layer].sum())
        assert found["experts"][0]["load"] == LARGE
        rows.append(found["expert_loads"])
    return np.array(rows)


@pytest.mark.parametrize("form", ["json", "npy", "npz", "csv", "csv long"])
def test_a_file_of_large_counts(tmp_path: Path, form: str) -> None:
    path = write(tmp_path, form)
    assert shown(path).tolist() == COUNTS.tolist()
    source = open_source(path)
    for target in ("evenroute", "sglang"):
        made = tmp_path / f"made-{target}{'.dump' if target == 'evenroute' else '.json'}"
        write_loads(made, source, target)
        assert shown(made).tolist() == COUNTS.tolist(), target


def test_large_counts_of_slots_are_summed_over_replicas() -> None:
    physical = np.zeros((2, 6), np.int64)
    physical[0, [0, 4]] = LARGE, 2  # expert 0 has slots 0 and 4
    assert to_logical(physical, ROWS, 4)[0].tolist() == [LARGE + 2, 0, 0, 0]


def test_trtllm_keeps_large_counts(tmp_path: Path) -> None:
    source = open_source(write(tmp_path, "npy"))
    write_loads(tmp_path / "trtllm", source, "trtllm", top_k=1)
    source = open_source(tmp_path / "trtllm")
    (window,) = source.windows()
    assert window.counts.tolist() == COUNTS.tolist()


def test_fractions_and_sums_past_int64_stay_floats(tmp_path: Path) -> None:
    np.save(tmp_path / "half.npy", np.array([[0.5, 1.0]]))
    np.save(tmp_path / "many.npy", np.full((4, 1, 2), 2**60 + 1, np.int64))
    for name, total in (("half", 1.5), ("many", 2.0**63)):
        source = open_source(tmp_path / f"{name}.npy")
        assert history_facts(read_history(source, choose_placement(source, ep_size=2)))["routed"] == total
