"""A file is read as what it says it is: a stated layout is honoured, a doubtful one refused with its question."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evenroute import open_loads
from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.files.open import open_source, open_sources
from evenroute.eplb.loads.source import LoadWindow
from support.command import assert_one_line_error, evenroute

RNG = np.random.default_rng(7)


def routed(windows: int, layers: int, experts: int, tokens: int = 500, top_k: int = 2) -> np.ndarray:
    """Counts [W, L, E] of tokens that each pick ``top_k`` experts in every layer; windows differ in size."""
    weights = RNG.dirichlet(np.ones(experts), layers)
    sizes = [(tokens + 37 * number) * top_k for number in range(windows)]
    return np.array([[RNG.multinomial(size, row) for row in weights] for size in sizes])


def read(path: Path, **given: str | int | None) -> np.ndarray:
    [source] = open_loads([path], **given)  # type: ignore[arg-type]
    return np.array([window.counts for window in source.windows()])


def save(path: Path, array: np.ndarray) -> Path:
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez(path, loads=array)
    else:
        path.write_text(json.dumps(array.tolist()))
    return path


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.json"])
class TestLayouts:
    def test_windows_first_is_read_as_it_is(self, tmp_path: Path, name: str) -> None:
        counts = routed(5, 3, 16)
        assert np.array_equal(read(save(tmp_path / name, counts)), counts)

    def test_layers_first_is_doubtful_until_said(self, tmp_path: Path, name: str) -> None:
        counts = routed(5, 3, 16)
        path = save(tmp_path / name, counts.transpose(1, 0, 2))
        with pytest.raises(ValueError, match=r"looks like \[layers, windows, experts\].*--layout"):
            read(path)
        assert np.array_equal(read(path, layout="layers,windows,experts"), counts)

    def test_ranks_first_is_doubtful_until_said(self, tmp_path: Path, name: str) -> None:
        """[ranks, layers, slots] of slots that each rank holds: totals differ by rank and layer, their sums do not."""
        whole = routed(1, 3, 16)[0]
        parts = np.zeros((4, 3, 16), dtype=np.int64)
        for rank in range(4):
            parts[rank, :, 4 * rank : 4 * rank + 4] = whole[:, 4 * rank : 4 * rank + 4]
        path = save(tmp_path / name, parts)
        with pytest.raises(ValueError, match=r"looks like \[ranks, layers, experts\]"):
            read(path)
        assert np.array_equal(read(path, layout="ranks,layers,experts")[0], whole)

    def test_a_mask_is_no_load(self, tmp_path: Path, name: str) -> None:
        for mask in (np.eye(8, dtype=np.int64), np.stack([np.eye(8, dtype=np.int64)] * 3)):
            with pytest.raises(ValueError, match="only 0 and 1"):
                read(save(tmp_path / name, mask))


def test_an_unknown_layout_is_named(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", routed(2, 2, 8))
    assert_one_line_error(evenroute("inspect", path, "--layout", "experts"), "windows,layers,experts")


def test_arrays_that_say_what_lies_beside_are_doubtful(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    np.savez(path, loads=np.ones((3, 4, 8)), layer_numbers=np.arange(3), ep_rank=np.array(0))
    with pytest.raises(ValueError, match=r"beside ep_rank, layer_numbers.*--layout"):
        read(path)
    assert read(path, layout="layers,windows,experts").shape == (4, 3, 8)


def test_sglang_states_its_layout(tmp_path: Path) -> None:
    counts = routed(4, 3, 8)
    path = tmp_path / "l.json"
    for layout, expected in (("rank_layer_expert", counts.sum(axis=0)[None]), ("step_layer_expert", counts)):
        path.write_text(json.dumps({"logical_count": counts.tolist(), "logical_count_layout": layout}))
        assert np.array_equal(read(path), expected)
    path.write_text(json.dumps({"logical_count": counts.tolist(), "logical_count_layout": "expert_layer"}))
    with pytest.raises(ValueError, match="expected layer_expert, step_layer_expert or rank_layer_expert"):
        read(path)


WIDE = [[1.0, 5.0, 2.0], [4.0, 0.0, 3.0]]


@pytest.mark.parametrize(
    "text",
    [
        "1,5,2\n4,0,3\n",
        "1;5;2\n4;0;3\n",
        "1 5  2\n4 0 3\n",
        "1,5,2,\n4,0,3,\n",
        "e0,e1,e2\n1,5,2\n4,0,3\n",
        ",ep_0,ep_1,ep_2\nlayer_0,1,5,2\nlayer_1,4,0,3\n",
        ",0,1,2\n0,1,5,2\n1,4,0,3\n",
        "0,1,2\n1,5,2\n4,0,3\n",
        "layer,e0,e1,e2\n0,1,5,2\n1,4,0,3\n",
        "layer_0,1,5,2\nlayer_1,4,0,3\n",
        "layer_id,expert_id,count\n0,0,1\n0,1,5\n1,2,3\n1,0,4\n0,2,2\n",
        "expert\tlayer\ttokens\n0\t0\t1\n1\t0\t5\n2\t1\t3\n0\t1\t4\n2\t0\t2\n",
        "\ufeff1,5,2\n4,0,3\n",
    ],
)
def test_csv(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text, encoding="utf-8")
    assert read(path)[0].tolist() == WIDE


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("1,5;2,5\n2,5;3,5\n", "separators ',' and ';'"),
        ("0,5,2\n1,4,0\n2,3,3\n", "is it an index"),
        ("layer,expert,count\n0,0,1\n0,0,2\n", "again"),
        ("layer,expert,count\n0,0.5,1\n", "row 1"),
        ("layer,expert,count\n", "a header and no counts"),
        ("1,2\n3\n", "row lengths"),
        ("1,2\n3,x\n", "row 1 is not numbers"),
    ],
)
def test_csv_that_leaves_a_question(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=part) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


def part_of_rank(rank: int, ep_size: int = 4) -> np.ndarray:
    counts = np.zeros((6, 32), dtype=np.int64)
    each = 32 // ep_size
    counts[:, rank * each : (rank + 1) * each] = RNG.integers(1, 100, (6, each))
    return counts


@pytest.mark.parametrize(
    "words",
    [
        ("advise", "--ep-size", 4),
        ("plan", "--ep-size", 4, "--num-slots", 36),
        ("replay", "--ep-size", 4, "--redundant", 4),
    ],
)
def test_one_ranks_part_is_not_the_job(tmp_path: Path, words: tuple[str, ...]) -> None:
    paths = []
    for rank in range(4):
        paths.append(tmp_path / f"r{rank}.json")
        paths[-1].write_text(json.dumps({"logical_count": part_of_rank(rank).tolist()}))
    command, *flags = words
    for given in ([paths[0]], paths):
        assert_one_line_error(evenroute(command, *given, *flags), "part of rank 0 of 4", "--layout ranks")


def dump_of_layers(path: Path, layers: list[int], windows: np.ndarray) -> Path:
    header = DumpHeader(num_layers=len(layers), num_logical_experts=8, layer_ids=layers)
    with DumpWriter(path, header) as writer:
        for step, counts in enumerate(windows):
            writer.add_window(LoadWindow(counts[layers], first_step=step, last_step=step))
    return path


def test_files_of_other_layers_become_one(tmp_path: Path) -> None:
    counts = routed(3, 4, 8)
    paths = [dump_of_layers(tmp_path / f"{layers[0]}.evd", layers, counts) for layers in ([2, 3], [0, 1])]
    [source] = open_loads(paths)
    assert source.layer_ids == (0, 1, 2, 3)
    assert np.array_equal([window.counts for window in source.windows()], counts)
    dump_of_layers(tmp_path / "o.evd", [1, 2], counts)
    with pytest.raises(ValueError, match="overlap"):
        open_loads([*paths, tmp_path / "o.evd"])
    dump_of_layers(tmp_path / "2.evd", [2, 3], counts[:2])
    [source] = open_loads(paths)
    with pytest.raises(ValueError, match="numbers of windows differ"):
        list(source.windows())


def test_log_lines_of_two_models_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    line = "EPLB step: {step} for model {model}: avg_tokens={avg}, max_tokens=20, balancedness={bal}\n"
    path.write_text(
        "".join(
            line.format(step=step, model=model, avg=avg, bal=avg / 20)
            for step in range(3)
            for model, avg in (("target", 15.0), ("draft", 5.0))
        )
    )
    found = {source.key: source for source in open_sources([path]).sources}
    assert set(found) == {"target", "draft"}
    assert [entry["balancedness"] for entry in found["target"].time_line] == [0.75] * 3
    assert [entry["balancedness"] for entry in found["draft"].time_line] == [0.25] * 3


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    counts = routed(1, 2, 8)[0]
    path = tmp_path / "l.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"logical_count": counts.tolist()}).encode())
    assert np.array_equal(read(path)[0], counts)
    record = {"step": 0, "layer": 0, "top_indices": [[0, 1]]}
    trace = tmp_path / "t.jsonl"
    trace.write_bytes(b"\xef\xbb\xbf" + json.dumps(record).encode() + b"\n")
    assert read(trace, num_experts=2)[0].tolist() == [[1, 1]]


def test_an_expert_map_may_leave_out_its_number_of_devices(tmp_path: Path) -> None:
    layer = {
        "layer_id": 0,
        "device_list": [{"device_id": r, "device_expert": [2 * r, 2 * r + 1]} for r in (0, 1)],
    }
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"moe_layer_count": 1, "layer_list": [layer]}))
    assert open_source(path).ep_size == 2
    path.write_text(json.dumps({"layer_list": [layer]}))
    with pytest.raises(ValueError, match="no moe_layer_count"):
        open_source(path)


def test_a_trace_counts_its_tokens_only(tmp_path: Path) -> None:
    """Padding is -1, or rows after num_tokens; a token that names an expert twice is no token."""
    path = tmp_path / "t.jsonl"
    record = {"step": 0, "layer": 0, "num_tokens": 2, "top_indices": [[0, 1], [2, -1], [0, 0], [-1, -1]]}
    path.write_text(json.dumps(record) + "\n")
    [source] = open_loads([path], num_experts=4)
    [window] = source.windows()
    assert window.counts.tolist() == [[1, 1, 1, 0]]
    assert window.tokens == 2
    path.write_text(json.dumps({**record, "num_tokens": 3}) + "\n")
    with pytest.raises(ValueError, match="an expert twice"):
        open_loads([path], num_experts=4)


def test_an_sglang_map_has_the_experts_that_are_said(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 2, 2, 0, 1]]}))
    assert open_source(path).num_logical_experts == 3
    with pytest.raises(ValueError, match="no slot for expert 3"):
        open_source(path, num_logical_experts=4)


def test_a_contradicting_inverse_map_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    rows, inverse = [[0, 1, 1, 0]], [[[0, 3], [1, 2]]]
    path.write_text(json.dumps({"physical_to_logical_map": rows, "logical_to_physical_map": inverse}))
    assert open_source(path).num_slots == 4
    inverse[0][1] = [1, -1]
    path.write_text(json.dumps({"physical_to_logical_map": rows, "logical_to_physical_map": inverse}))
    with pytest.raises(ValueError, match=r"expert 1 has slots \[1\].*says \[1, 2\]"):
        open_source(path)
