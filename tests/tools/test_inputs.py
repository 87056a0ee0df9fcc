"""SGLang's `.pt` dumps: read without executing a pickle, in all modes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.files.open import open_source
from evenroute.tools.inputs import read_pt
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.foreign_files import (
    random_counts,
    random_map,
    sglang_per_pass,
    sglang_per_token,
    sglang_stat,
)

torch = pytest.importorskip("torch")


def stacked(path: Path) -> np.ndarray:
    return np.stack([window.counts for window in open_source(path, read_pt=read_pt).windows()])


def logical(physical: np.ndarray, rows: np.ndarray, experts: int) -> np.ndarray:
    result = np.zeros((*physical.shape[:2], experts), np.int64)
    for layer, row in enumerate(rows):
        for slot, expert in enumerate(row):
            result[:, layer, expert] += physical[:, layer, slot]
    return result


def test_stat(tmp_path: Path) -> None:
    counts = random_counts(5, 4, 8)
    path = sglang_stat(tmp_path / "expert_distribution_recorder_1.pt", counts, unused_steps=3)
    assert np.array_equal(stacked(path), counts)
    source = open_source(path, read_pt=read_pt)
    assert source.scope == "job"
    assert any("3 of 8 steps" in note for note in source.notes)
    assert evenroute("inspect", path).status == 0


def test_per_pass_of_two_ranks(tmp_path: Path) -> None:
    rows = random_map(3, 8, 12, 4)
    parts = [random_counts(4, 3, 12, seed=rank) for rank in range(2)]
    for rank, part in enumerate(parts):
        sglang_per_pass(tmp_path / f"expert_distribution_recorder_1_{rank}.pt", rank, part, rows)
    source = open_source(tmp_path, read_pt=read_pt)
    found = np.stack([window.counts for window in source.windows()])
    assert np.array_equal(found, logical(parts[0] + parts[1], rows, 8))
    assert source.ranks == (0, 1)
    facts = evenroute("inspect", tmp_path, "--ep-size", 4, "--json").json["sources"][0]
    assert facts["num_slots"] == 12
    assert facts["placement"] == "the file's placement"


def test_per_token(tmp_path: Path) -> None:
    rows = random_map(3, 8, 12, 4)
    rng = np.random.default_rng(0)
    ids = [rng.integers(-1, 12, (3, tokens, 2)) for tokens in (5, 1, 7)]
    path = sglang_per_token(tmp_path / "d.pt", 0, ids, rows)
    physical = np.stack(
        [np.stack([np.bincount(row[row >= 0].ravel(), minlength=12) for row in one]) for one in ids]
    )
    assert np.array_equal(stacked(path), logical(physical, rows, 8))
    source = open_source(path, read_pt=read_pt)
    assert [window.tokens for window in source.windows()] == [5, 1, 7]
    assert source.top_k == 2


def test_init_expert_location_pt(tmp_path: Path) -> None:
    rows = random_map(3, 8, 12, 4)
    torch.save({"physical_to_logical_map": torch.from_numpy(rows)}, tmp_path / "m.pt")
    source = open_source(tmp_path / "m.pt", read_pt=read_pt)
    assert source.placement_map is not None
    assert np.array_equal(source.placement_map.physical_to_logical, rows)
    torch.save({"physical_to_logical_map": torch.from_numpy(rows), "note": 1}, tmp_path / "n.pt")
    notes = open_source(tmp_path / "n.pt", read_pt=read_pt).notes
    assert any("refuses" in note and "note" in note for note in notes)


def test_saved_from_cuda_is_read_on_a_cpu(tmp_path: Path) -> None:
    """A CUDA storage's location tag is the only difference in the file: "cuda:0" in place of "cpu"."""
    import zipfile

    path = sglang_stat(tmp_path / "d.pt", random_counts(2, 3, 4))
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    moved = tmp_path / "cuda.pt"
    with zipfile.ZipFile(moved, "w", zipfile.ZIP_STORED) as archive:
        for name, data in parts.items():
            if name.endswith("data.pkl"):
                assert b"X\x03\x00\x00\x00cpu" in data
                data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
            archive.writestr(name, data)
    assert np.array_equal(stacked(moved), random_counts(2, 3, 4))


class Evil:
    """Would make a file when unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.target}",)


def test_a_foreign_class_is_never_executed(tmp_path: Path) -> None:
    torch.save({"rank": 0, "logical_count": Evil(tmp_path / "ran")}, tmp_path / "evil.pt")
    outcome = evenroute("inspect", tmp_path / "evil.pt")
    assert_one_line_error(outcome, "evil.pt", "never executed")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("legacy", [False, True])
def test_cut_off(tmp_path: Path, legacy: bool) -> None:
    """Both of torch's file forms, cut anywhere: one line, exit status 2."""
    path = tmp_path / "d.pt"
    data = {"rank": 0, "logical_count": torch.arange(24).reshape(2, 3, 4)}
    torch.save(data, path, _use_new_zipfile_serialization=not legacy)
    whole = path.read_bytes()
    for size in {0, 1, 2, 50, 100, len(whole) // 2, len(whole) - 1}:
        path.write_bytes(whole[:size])
        assert_one_line_error(evenroute("inspect", path), str(path))


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ({"rank": 0, "logical_count": 3}, "logical_count"),
        ({"other": 1}, "expected the key"),
        ([1, 2], "expected the key"),
        ({"records": []}, "last_physical_to_logical_map"),
        ({"records": [], "last_physical_to_logical_map": [[0, 1]]}, "records is empty"),
        ({"records": [{"rank": 0}], "last_physical_to_logical_map": [[0, 1]]}, "forward_pass_id"),
        ({"records": [3], "last_physical_to_logical_map": [[0, 1]]}, "objects"),
        (
            {
                "records": [{"rank": 0, "forward_pass_id": 0, "global_physical_count": [[1, 2, 3]]}],
                "last_physical_to_logical_map": [[0, 1]],
            },
            "[1, 3]",
        ),
        (
            {
                "records": [{"rank": 0, "forward_pass_id": 0, "topk_ids_of_layer": [[[5]]]}],
                "last_physical_to_logical_map": [[0, 1]],
            },
            "[-1, 2)",
        ),
    ],
)
def test_wrong_content(tmp_path: Path, content: object, part: str) -> None:
    torch.save(content, tmp_path / "d.pt")
    assert_one_line_error(evenroute("inspect", tmp_path / "d.pt"), str(tmp_path / "d.pt"), part)


def test_without_torch_the_remedy_is_named(tmp_path: Path) -> None:
    path = sglang_stat(tmp_path / "d.pt", random_counts(2, 3, 4))
    assert_one_line_error(evenroute_without("torch", "inspect", path), "evenroute[rank]")
