"""Readers of other engines' files: same counts as were written, strict about everything else."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.files.open import open_source, open_sources
from evenroute.eplb.files.safetensors import SafetensorsFile, write_safetensors
from support.foreign_files import (
    random_counts,
    safetensors,
)
from support.opened import refused, windows


class TestArrays:
    counts = random_counts(3, 4, 6)

    def test_npy_stack_and_single(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", self.counts)
        source = open_source(tmp_path / "a.npy")
        assert np.array_equal(windows(source), self.counts)
        assert source.num_windows == 3
        np.save(tmp_path / "b.npy", self.counts[0].astype(np.float32))
        assert np.array_equal(windows(open_source(tmp_path / "b.npy"))[0], self.counts[0])

    def test_npz_one_array_per_window_in_natural_order(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", **{f"w{i}": self.counts[0] * i for i in (10, 2, 1)})
        source = open_source(tmp_path / "a.npz")
        assert [int(w.counts[0, 0] // self.counts[0, 0, 0]) for w in source.windows()] == [1, 2, 10]
        np.savez(tmp_path / "b.npz", logical_count=self.counts, other=np.zeros(3))
        assert np.array_equal(windows(open_source(tmp_path / "b.npz")), self.counts)

    @pytest.mark.parametrize("separator", [",", ";", "\t", "  "])
    def test_csv(self, tmp_path: Path, separator: str) -> None:
        path = tmp_path / "a.csv"
        lines = [separator.join(f"e{i}" for i in range(6))]
        lines += [separator.join(map(str, row)) for row in self.counts[0].tolist()]
        path.write_text("# made by hand\n" + "\n".join(lines) + "\n")
        assert np.array_equal(windows(open_source(path))[0], self.counts[0])

    def test_safetensors(self, tmp_path: Path) -> None:
        safetensors(tmp_path / "a.safetensors", {"logical_count": self.counts})
        assert np.array_equal(windows(open_source(tmp_path / "a.safetensors")), self.counts)

    def test_json_lists(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(json.dumps(self.counts.tolist()))
        assert np.array_equal(windows(open_source(tmp_path / "a.json")), self.counts)
        (tmp_path / "b.json").write_text(json.dumps({"logical_count": self.counts.tolist()}))
        assert np.array_equal(windows(open_source(tmp_path / "b.json")), self.counts)

    def test_content_beats_the_name(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", self.counts)
        (tmp_path / "a.npy").rename(tmp_path / "a.json")
        assert np.array_equal(windows(open_source(tmp_path / "a.json")), self.counts)

    def test_pickled_numpy_is_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([[Path("x")]], dtype=object), allow_pickle=True)
        refused(tmp_path / "a.npy", "never executed")
        np.savez(tmp_path / "b.npz", a=np.array([[Path("x")]], dtype=object))
        refused(tmp_path / "b.npz", "never executed")
        (tmp_path / "c.pkl").write_bytes(b"\x80\x04N.")
        refused(tmp_path / "c.pkl", "never executed")

    @pytest.mark.parametrize(
        ("array", "part"),
        [
            (np.zeros(3), "shape [3]"),
            (np.zeros((2, 0)), "shape [2, 0]"),
            (np.array([["a"]]), "dtype"),
            (np.array([[1.0, np.nan]]), "layer 0 expert 1 is nan"),
            (np.array([[1.0], [np.inf]]), "layer 1 expert 0 is inf"),
            (np.array([[[1, 2]], [[3, -4]]]), "window 1: layer 0 expert 1 is -4"),
            (np.array([[2**63]], dtype=np.uint64), "2**63"),
            (np.array([[True]]), "dtype bool"),
        ],
    )
    def test_bad_arrays(self, tmp_path: Path, array: np.ndarray, part: str) -> None:
        np.save(tmp_path / "a.npy", array)
        refused(tmp_path / "a.npy", str(tmp_path / "a.npy"), part)

    @pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors", "a.json"])
    def test_cut_off_anywhere(self, tmp_path: Path, name: str) -> None:
        """Any cut is one line; never counts of another shape."""
        path = tmp_path / name
        if name == "a.npy":
            np.save(path, self.counts)
        elif name == "a.npz":
            np.savez(path, a=self.counts[0], b=self.counts[1])
        elif name == "a.safetensors":
            safetensors(path, {"a": self.counts[0], "b": self.counts[1]})
        else:
            path.write_text(json.dumps({"logical_count": self.counts.tolist()}))
        data = path.read_bytes()
        for size in [0, 1, 7, 8, 9, 100, *range(0, len(data) - 1, 53), len(data) - 1]:
            path.write_bytes(data[:size])
            refused(path, str(path))


class TestSafetensors:
    def test_agrees_with_the_library(self, tmp_path: Path) -> None:
        library = pytest.importorskip("safetensors.numpy")
        tensors = {"a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.ones(4, np.float32)}
        write_safetensors(tmp_path / "ours.safetensors", tensors)
        for name, array in library.load_file(tmp_path / "ours.safetensors").items():
            assert np.array_equal(array, tensors[name])
        library.save_file(tensors, tmp_path / "theirs.safetensors")
        ours = SafetensorsFile(tmp_path / "theirs.safetensors")
        for name, array in tensors.items():
            assert np.array_equal(ours.read(name), array)
            assert ours.read(name).dtype == array.dtype

    @pytest.mark.parametrize(
        ("entry", "part"),
        [
            ({"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}, "BF16"),
            ({"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}, "damaged"),
            ({"dtype": "I64", "shape": [1], "data_offsets": [8, 16]}, "damaged"),
            ({"dtype": "I64", "shape": [-1], "data_offsets": [0, 8]}, "damaged"),
            ({"dtype": "I64", "shape": "x", "data_offsets": [0, 8]}, "damaged"),
            ({}, "damaged"),
            (3, "damaged"),
        ],
    )
    def test_bad_headers(self, tmp_path: Path, entry: object, part: str) -> None:
        path = safetensors(tmp_path / "a.safetensors", {"x": np.zeros(1, np.int64)}, header={"x": entry})
        refused(path, part)


class TestParts:
    """U04: is a file one rank's part, or a copy of the whole?"""

    def test_parts_sum(self, tmp_path: Path) -> None:
        """Layer 3, expert 18: 39249 on rank 0 and 33056 on rank 1 are 72305 together."""
        for rank, count in ((0, 39249), (1, 33056)):
            counts = np.zeros((4, 32), np.int64)
            counts[3, 18] = count
            rank_dump(tmp_path / f"r{rank}.evd", rank, [counts])
        (source,) = open_sources([tmp_path]).sources
        assert windows(source)[0, 3, 18] == 72305
        assert source.scope == "job"
        assert any("parts" in note for note in source.notes)

    def test_one_part_says_so(self, tmp_path: Path) -> None:
        rank_dump(tmp_path / "r.evd", 1, [np.ones((4, 32), np.int64)])
        source = open_source(tmp_path / "r.evd")
        assert (source.scope, source.rank) == ("rank", 1)
        assert any("rank 1's part" in note for note in source.notes)

    def test_four_ranks(self, tmp_path: Path) -> None:
        """U03's kind: 10 + 20 + 30 + 40 is 100, not the last one."""
        for rank in range(4):
            rank_dump(tmp_path / f"r{rank}.evd", rank, [np.full((1, 1), 10 * (rank + 1))])
        (source,) = open_sources([tmp_path]).sources
        assert windows(source)[0, 0, 0] == 100

    def test_mixing_a_part_and_a_whole_is_refused(self, tmp_path: Path) -> None:
        rank_dump(tmp_path / "a.evd", 0, [np.ones((4, 32), np.int64)])
        rank_dump(tmp_path / "b.evd", None, [np.ones((4, 32), np.int64)])
        opened = open_sources([tmp_path])
        assert not opened.sources
        assert "b.evd holds the whole job" in opened.errors[0]

    def test_the_same_rank_twice_is_refused(self, tmp_path: Path) -> None:
        for name in "ab":
            rank_dump(tmp_path / f"{name}.evd", 1, [np.ones((4, 32), np.int64)])
        assert "rank 1" in open_sources([tmp_path]).errors[0]

    def test_passes_that_a_rank_lacks_are_incomplete(self, tmp_path: Path) -> None:
        rank_dump(tmp_path / "a.evd", 0, [np.full((1, 2), 1), np.full((1, 2), 2)])
        rank_dump(tmp_path / "b.evd", 1, [np.full((1, 2), 5)])
        (source,) = open_sources([tmp_path]).sources
        found = list(source.windows())
        assert [int(window.counts[0, 0]) for window in found] == [6, 2]
        assert [window.complete for window in found] == [True, False]


def rank_dump(path: Path, rank: int | None, counts: list[np.ndarray]) -> None:
    from evenroute.eplb.dump.format import DumpHeader
    from evenroute.eplb.dump.writer import DumpWriter
    from evenroute.eplb.loads.source import LoadWindow

    layers, experts = counts[0].shape
    header = DumpHeader(
        num_layers=layers,
        num_logical_experts=experts,
        scope="job" if rank is None else "rank",
        rank=rank,
        mode="per_pass",
    )
    with DumpWriter(path, header) as writer:
        for step, window in enumerate(counts):
            writer.add_window(LoadWindow(window, None, step, step))
