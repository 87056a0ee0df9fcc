"""Readers of other engines' files: same counts as were written, strict about everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenroute.eplb.files.open import open_source, open_sources
from evenroute.eplb.files.safetensors import SafetensorsFile, write_safetensors
from evenroute.eplb.loads.source import LoadSource
from support.foreign_files import (
    ascend_map,
    megatron_trace,
    random_counts,
    random_map,
    safetensors,
    trtllm_statistics,
    trtllm_yaml,
)


def windows(source: LoadSource) -> np.ndarray:
    """All windows stacked; reading twice must give the same."""
    first = np.stack([window.counts for window in source.windows()])
    assert np.array_equal(first, np.stack([window.counts for window in source.windows()]))
    return first


def refused(path: Path, *parts: str, **options: Any) -> None:
    """The path cannot be opened and read, and one line says why."""
    with pytest.raises((ValueError, OSError)) as caught:
        for _ in open_source(path, **options).windows():
            pass
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


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


class TestTensorrtLlm:
    layers = (3, 4, 7)
    parts = np.stack([random_counts(5, 3, 8, seed=rank) for rank in range(4)])

    def test_ranks_are_parts_and_layers_keep_their_index(self, tmp_path: Path) -> None:
        source = open_source(trtllm_statistics(tmp_path / "s", self.parts, layers=list(self.layers)))
        assert np.array_equal(windows(source), self.parts.sum(axis=0))
        assert source.layer_ids == self.layers
        assert source.ranks == (0, 1, 2, 3)
        assert source.top_k == 8
        assert [window.first_step for window in source.windows()] == [100, 101, 102, 103, 104]
        assert all(window.complete for window in source.windows())

    def test_a_missing_rank_is_told(self, tmp_path: Path) -> None:
        folder = trtllm_statistics(tmp_path / "s", self.parts, layers=list(self.layers))
        (folder / "rank1.safetensors").unlink()
        source = open_source(folder)
        assert any("rank 1" in note for note in source.notes)
        assert np.array_equal(windows(source), self.parts[[0, 2, 3]].sum(axis=0))

    def test_a_missing_iteration_makes_the_window_incomplete(self, tmp_path: Path) -> None:
        folder = trtllm_statistics(tmp_path / "s", self.parts, layers=list(self.layers))
        keys = {
            f"{100 + i}_{layer}": self.parts[3, i, row]
            for i in range(4)
            for row, layer in enumerate(self.layers)
        }
        safetensors(folder / "rank3.safetensors", keys)
        assert [w.complete for w in open_source(folder).windows()] == [True] * 4 + [False]

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            (lambda f: (f / "meta_info.json").write_text("{"), "truncated or damaged"),
            (lambda f: (f / "meta_info.json").write_text("{}"), "num_experts"),
            (
                lambda f: (f / "meta_info.json").write_text('{"num_experts": 9, "num_experts_per_token": 8}'),
                "[9]",
            ),
            (
                lambda f: safetensors(f / "rank0.safetensors", {"x": np.zeros(8, np.int64)}),
                "<iteration>_<layer>",
            ),
            (lambda f: safetensors(f / "rank0.safetensors", {"1_1": np.full(8, -1)}), "-1"),
            (lambda f: (f / "rank0.safetensors").write_bytes(b"12"), "truncated or damaged"),
            (lambda f: [p.unlink() for p in f.glob("rank*")], "no rank<r>.safetensors"),
        ],
    )
    def test_bad_folders(self, tmp_path: Path, change: Any, part: str) -> None:
        folder = trtllm_statistics(tmp_path / "s", self.parts, layers=list(self.layers))
        change(folder)
        refused(folder, part)

    def test_load_balancer_yaml(self, tmp_path: Path) -> None:
        rows = random_map(3, 8, 12, 4)
        source = open_source(trtllm_yaml(tmp_path / "m.yaml", rows, [3, 4, 7]))
        assert source.placement_map is not None
        assert np.array_equal(source.placement_map.physical_to_logical, rows)
        assert source.placement_map.layer_ids == (3, 4, 7)
        with pytest.raises(ValueError, match="--ep-size"):
            source.placement_map.to_placement()
        assert source.placement_map.to_placement(4).num_local_slots == 3

    @pytest.mark.parametrize(
        ("text", "part"),
        [
            ("num_slots: 3\ninitial_global_assignments: {0: [0, 1, 1], 1: [0, 1]}\n", "num_slots=3"),
            ("num_slots: 2\ninitial_global_assignments: {0: [0, 2]}\n", "expert 1"),
            ("num_slots: 2\ninitial_global_assignments: {a: [0, 1]}\n", "layer indices"),
            ("num_slots: 2\ninitial_global_assignments: {0: [0, x]}\n", "integers"),
            ("num_slots: 2\n", "initial_global_assignments"),
            ("a: [1\n", "truncated or damaged"),
            ("!!python/object/apply:os.system ['echo ran']\n", "truncated or damaged"),
        ],
    )
    def test_bad_yaml(self, tmp_path: Path, text: str, part: str) -> None:
        (tmp_path / "m.yaml").write_text(text)
        refused(tmp_path / "m.yaml", part)


class TestAscend:
    rows = random_map(3, 8, 12, 4)

    def test_expert_map(self, tmp_path: Path) -> None:
        source = open_source(ascend_map(tmp_path / "m.json", self.rows, 4))
        assert source.placement_map is not None
        placement = source.placement_map.to_placement()
        assert np.array_equal(placement.physical_to_logical, self.rows)
        assert placement.topology.ep_size == 4

    @pytest.mark.parametrize(
        ("change", "part"),
        [
            (lambda d: d.update(moe_layer_count=4), "moe_layer_count=4"),
            (lambda d: d["layer_list"][1].update(device_count=5), "device_count=5"),
            (lambda d: d["layer_list"][1].update(layer_id=7), "layer_id 7"),
            (lambda d: d["layer_list"][1]["device_list"].pop(), "device_count=4"),
            (lambda d: d["layer_list"][0]["device_list"][0]["device_expert"].pop(), "experts"),
            (lambda d: d["layer_list"][0]["device_list"][0]["device_expert"].__setitem__(0, 99), "no slot"),
            (lambda d: d["layer_list"][0]["device_list"][0].update(device_expert=None), "damaged"),
            (lambda d: d.pop("layer_list"), "layer_list"),
            (lambda d: d["layer_list"][2]["device_list"][0].update(device_id=3), "device_id"),
        ],
    )
    def test_bad_maps(self, tmp_path: Path, change: Any, part: str) -> None:
        path = ascend_map(tmp_path / "m.json", self.rows, 4)
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))
        refused(path, part)


class TestMegatron:
    def steps(self, seed: int) -> list[dict[int, np.ndarray]]:
        rng = np.random.default_rng(seed)
        return [
            {layer: np.array([rng.permutation(8)[:2] for _ in range(5)]) for layer in (1, 2, 3)}
            for _ in range(4)
        ]

    def expected(self, *ranks: list[dict[int, np.ndarray]]) -> np.ndarray:
        result = np.zeros((4, 3, 8), np.int64)
        for steps in ranks:
            for index, layers in enumerate(steps):
                for row, ids in enumerate(layers.values()):
                    result[index, row] += np.bincount(ids.ravel(), minlength=8)
        return result

    def test_parts_are_summed(self, tmp_path: Path) -> None:
        ranks = [self.steps(seed) for seed in range(3)]
        for rank, steps in enumerate(ranks):
            megatron_trace(tmp_path / "t", rank, steps)
        source = open_source(tmp_path / "t", num_logical_experts=8)
        assert np.array_equal(windows(source), self.expected(*ranks))
        assert source.layer_ids == (1, 2, 3)
        assert source.top_k == 2
        assert any("parts" in note for note in source.notes)

    def test_copies_are_counted_once(self, tmp_path: Path) -> None:
        for rank in range(3):
            megatron_trace(tmp_path / "t", rank, self.steps(0))
        source = open_source(tmp_path / "t", num_logical_experts=8)
        assert np.array_equal(windows(source), self.expected(self.steps(0)))
        assert any("copies" in note for note in source.notes)

    def test_experts_are_guessed_only_aloud(self, tmp_path: Path) -> None:
        path = megatron_trace(tmp_path, 0, [{1: np.array([[0, 5]])}])
        source = open_source(path)
        assert source.num_logical_experts == 6
        assert any("--num-experts" in note for note in source.notes)
        refused(path, "expert 5", num_logical_experts=4)

    @pytest.mark.parametrize(
        ("line", "part"),
        [
            ('{"step": 0, "layer": 1', "line 2"),
            ('{"step": 0, "layer": 1, "top_indices": [[-2]]}', "expert -2"),
            ('{"step": 0, "layer": 1, "top_indices": [[3, 3]]}', "an expert twice"),
            ('{"step": 0, "layer": 1, "top_indices": [["a"]]}', "line 2"),
            ('{"step": 0, "layer": 1}', "top_indices"),
            ('{"step": 3, "layer": 1, "rank": 5, "top_indices": [[1]]}', "ranks 0 and 5"),
        ],
    )
    def test_bad_lines(self, tmp_path: Path, line: str, part: str) -> None:
        path = megatron_trace(tmp_path, 0, [{1: np.array([[0, 1]])}])
        path.write_text(path.read_text() + line + "\n")
        refused(path, part)


class TestLogLines:
    def test_vllm_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "vllm.log"
        path.write_text(
            "INFO 11-29 22:23:11 [eplb_state.py:512] EPLB step: 12 for model deepseek: avg_tokens=10.50, "
            "max_tokens=21, balancedness=0.5000, steps until the next rearrangement: 88\n"
            "some other line\n"
            "INFO EPLB step: 13 avg_tokens=0.00, max_tokens=0, balancedness=0.0000\n"
            "INFO EPLB step: 14 for model deepseek: avg_tokens=9.00, max_tok"
        )
        source = open_source(path)
        assert not source.has_loads
        assert [entry["balancedness"] for entry in source.time_line] == [0.5, None]
        assert source.time_line[0]["step"] == 12
        assert source.time_line[0]["stamp"] == "11-29 22:23:11"
        assert any("1 damaged" in note for note in source.notes)

    def test_nonsense_is_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "vllm.log"
        path.write_text("EPLB step: 1 avg_tokens=30, max_tokens=20, balancedness=1.5\n")
        refused(path, "no line")


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
