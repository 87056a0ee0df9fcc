"""Files of TensorRT-LLM, vLLM-Ascend and Megatron, and log lines: same counts as were written, strict otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenroute.eplb.files.open import open_source
from support.foreign_files import (
    ascend_map,
    megatron_trace,
    random_counts,
    random_map,
    safetensors,
    trtllm_statistics,
    trtllm_yaml,
)
from support.opened import refused, windows


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
