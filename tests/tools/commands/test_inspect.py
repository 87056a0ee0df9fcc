"""`evenroute inspect`: exact figures, every unreadable input, no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import LoadWindow, PlacementEvent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.foreign_files import random_counts

B21 = [[10, 10, 10, 30], [20, 20, 20, 0]]


def loads_file(path: Path, rows: object) -> Path:
    path.write_text(json.dumps({"logical_count": rows}))
    return path


def dump_file(path: Path, windows: np.ndarray, *, mode: str = "stat") -> Path:
    header = DumpHeader(
        num_layers=windows.shape[1], num_logical_experts=windows.shape[2], mode=mode, ep_size=4
    )
    with DumpWriter(path, header) as writer:
        for index, counts in enumerate(windows):
            writer.add_window(LoadWindow(counts, float(index), index, index, tokens=7))
    return path


def in_json(tmp_path: Path, rows: list[list[int]]) -> Path:
    return loads_file(tmp_path / "loads.json", rows)


def in_dump(tmp_path: Path, rows: list[list[int]]) -> Path:
    return dump_file(tmp_path / "loads.evd", np.array([rows, rows]))


def in_npy(tmp_path: Path, rows: list[list[int]]) -> Path:
    np.save(tmp_path / "loads.npy", np.array(rows))
    return tmp_path / "loads.npy"


def in_csv(tmp_path: Path, rows: list[list[int]]) -> Path:
    path = tmp_path / "loads.csv"
    path.write_text("\n".join(",".join(map(str, row)) for row in rows))
    return path


@pytest.mark.parametrize("write", [in_json, in_dump, in_npy, in_csv])
class TestBalancednessRunsOverRanks:
    """B21: mean and max over ranks, per layer; layers without load are "no data"."""

    def test_exact_values(self, write: object, tmp_path: Path) -> None:
        path = write(tmp_path, B21)  # type: ignore[operator]
        balance = evenroute("inspect", path, "--ep-size", 4, "--json").json["sources"][0]["balancedness"]
        assert balance["per_layer"] == [0.5, 0.75]
        assert balance["total"] == pytest.approx(0.6)
        assert balance["mean"] == pytest.approx(0.625)
        assert (balance["worst"], balance["worst_layer"]) == (0.5, 0)

    def test_a_layer_of_zeros_is_no_data(self, write: object, tmp_path: Path) -> None:
        path = write(tmp_path, [*B21, [0, 0, 0, 0]])  # type: ignore[operator]
        outcome = evenroute("inspect", path, "--ep-size", 4, "--json")
        facts = outcome.json["sources"][0]
        assert facts["balancedness"]["per_layer"] == [0.5, 0.75, None]
        assert facts["balancedness"]["total"] == pytest.approx(0.6)
        assert facts["layers_without_load"] == [2]
        assert "NaN" not in outcome.out
        assert "2 no data" in evenroute("inspect", path, "--ep-size", 4).out

    def test_nothing_but_zeros_is_no_data_everywhere(self, write: object, tmp_path: Path) -> None:
        path = write(tmp_path, [[0, 0, 0, 0]] * 2)  # type: ignore[operator]
        balance = evenroute("inspect", path, "--ep-size", 4, "--json").json["sources"][0]["balancedness"]
        assert balance["per_layer"] == [None, None]
        assert balance["mean"] is balance["total"] is balance["worst"] is None
        assert "no data" in evenroute("inspect", path).out


@pytest.mark.parametrize(("layers", "ranks"), [(3, 3), (7, 2), (2, 7), (1, 1), (5, 1), (1, 5)])
def test_balancedness_for_any_number_of_layers_and_ranks(tmp_path: Path, layers: int, ranks: int) -> None:
    """The wrong axis is right by luck when L = R, so other shapes are compared with the plain definition."""
    loads = random_counts(1, layers, ranks, seed=layers * 10 + ranks)[0]
    path = loads_file(tmp_path / "l.json", loads.tolist())
    balance = evenroute("inspect", path, "--ep-size", ranks, "--json").json["sources"][0]["balancedness"]
    expected = [row.mean() / row.max() for row in loads]
    assert balance["per_layer"] == pytest.approx(expected)
    assert balance["total"] == pytest.approx(sum(r.mean() for r in loads) / sum(r.max() for r in loads))


def test_loads_on_a_given_placement(tmp_path: Path) -> None:
    """Replicas divide an expert's load; the same loads, other ranks."""
    path = loads_file(tmp_path / "l.json", [[30, 10, 10, 10]])
    plan = tmp_path / "map.json"
    plan.write_text(json.dumps({"physical_to_logical_map": [[0, 1, 0, 2, 0, 3]]}))
    facts = evenroute("inspect", path, "--placement", plan, "--ep-size", 3, "--json").json["sources"][0]
    assert facts["balancedness"]["mean"] == 1.0
    assert facts["num_slots"] == 6


def test_time_line_and_effect_of_placements(tmp_path: Path) -> None:
    """Windows count for the placement in use at their time: before, predicted, achieved."""
    better = Placement(np.array([[0, 3, 0, 1, 2, 3]]), 4, Topology(3))
    header = DumpHeader(num_layers=1, num_logical_experts=4, ep_size=3, num_slots=6)
    hot = np.array([[30, 10, 10, 20]])
    with DumpWriter(tmp_path / "d.evd", header) as writer:
        for step in range(4):
            writer.add_window(LoadWindow(hot, float(step), step, step))
        writer.add_placement(
            PlacementEvent(better, 3.5, 4, 5 << 20, 1, 0.6, 0.99, 2, "global", "hot expert 0")
        )
        for step in range(4, 8):
            writer.add_window(LoadWindow(hot, float(step), step, step))
    facts = evenroute("inspect", tmp_path / "d.evd", "--json").json["sources"][0]
    means = [point["mean"] for point in facts["balancedness_over_time"]]
    # The start holds experts 0 1 | 2 3 | 0 1: ranks carry 20, 30, 20. The new one: 25, 25, 20.
    assert means[:4] == pytest.approx([70 / 3 / 30] * 4)
    assert means[4:] == pytest.approx([70 / 3 / 25] * 4)
    (placement,) = facts["placements"]
    assert placement["achieved"] == pytest.approx(70 / 3 / 25)
    assert placement["num_windows"] == 4
    assert (placement["before"], placement["predicted"], placement["moves"]) == (0.6, 0.99, 2)
    text = evenroute("inspect", tmp_path / "d.evd").out
    assert "Placements and their effect" in text
    assert f"{5 << 20:x}/1" in text


def test_the_window_of_a_switch_does_not_count_as_achieved(tmp_path: Path) -> None:
    """A placement is published in the middle of a window: that window is mixed, the later ones tell."""
    header = DumpHeader(num_layers=1, num_logical_experts=4, ep_size=2, num_slots=4)
    same = Placement(np.array([[0, 1, 2, 3]]), 4, Topology(2))
    with DumpWriter(tmp_path / "d.evd", header) as writer:
        for step, counts in enumerate([[1, 1, 1, 1], [9, 1, 1, 1], [2, 2, 2, 2], [2, 2, 2, 2]]):
            if step == 1:
                writer.add_placement(PlacementEvent(same, 0.5, 1, 1, 1))
            writer.add_window(LoadWindow(np.array([counts]), float(step), step, step))
    (placement,) = evenroute("inspect", tmp_path / "d.evd", "--json").json["sources"][0]["placements"]
    assert placement["num_windows"] == 3
    assert placement["achieved"] == 1.0


def test_hot_since_names_the_first_window(tmp_path: Path) -> None:
    windows = np.full((10, 1, 8), 10)
    windows[6:, 0, 3] = 200
    facts = evenroute("inspect", dump_file(tmp_path / "d.evd", windows), "--json").json["sources"][0]
    hottest = facts["hottest_experts"][0]
    assert (hottest["layer"], hottest["expert"]) == (0, 3)
    assert hottest["hot_since"]["window"] == 6
    assert facts["hottest_ranks"][0]["rank"] == 1  # experts 2 and 3 of 8 on 4 ranks


def test_layer_detail(tmp_path: Path) -> None:
    path = loads_file(tmp_path / "l.json", B21)
    facts = evenroute("inspect", path, "--layer", 1, "--json").json["sources"][0]["layer"]
    assert facts["rank_loads"] == [20, 20, 20, 0]
    assert facts["balancedness"] == 0.75
    assert [found["expert"] for found in facts["experts"]] == [0, 1, 2, 3]
    assert "layer 1" in evenroute("inspect", path, "--layer", 1).out
    assert_one_line_error(evenroute("inspect", path, "--layer", 9), "layer 9", "0 .. 1")


def test_diff_of_two_files(tmp_path: Path) -> None:
    first = loads_file(tmp_path / "a.json", [[50, 50, 0, 0], [1, 1, 1, 1]])
    second = loads_file(tmp_path / "b.json", [[50, 0, 50, 0], [2, 2, 2, 2]])
    facts = evenroute("inspect", first, second, "--diff", "--json").json["diff"]
    assert facts["shift"]["per_layer"] == [0.5, 0.0]
    assert {found["expert"] for found in facts["moved_experts"]} == {1, 2}
    assert "popularity moved" in evenroute("inspect", first, second, "--diff").out


def test_diff_of_two_ranges_of_windows(tmp_path: Path) -> None:
    windows = np.zeros((10, 1, 4), np.int64)
    windows[:5, 0, 0] = 10
    windows[5:, 0, 3] = 10
    path = dump_file(tmp_path / "d.evd", windows)
    facts = evenroute("inspect", path, "--diff", "--windows", "0:5", "--windows", "5:", "--json").json["diff"]
    assert facts["shift"]["mean"] == 1.0
    assert_one_line_error(evenroute("inspect", path, "--diff"), "expected two sources")
    assert_one_line_error(evenroute("inspect", path, "--windows", "5"), "FIRST:END")


def test_diff_of_two_placements(tmp_path: Path) -> None:
    for name, row in (("a", [0, 1, 2, 3]), ("b", [0, 2, 1, 3])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"physical_to_logical_map": [row]}))
    paths = (tmp_path / "a.json", tmp_path / "b.json")
    facts = evenroute("inspect", *paths, "--diff", "--ep-size", 2, "--json").json["diff"]
    assert facts["moves"] == 2
    assert "moved slots" in evenroute("inspect", *paths, "--diff", "--ep-size", 2).out


def test_all_shared_files_at_once(shared_data: Path) -> None:
    outcome = evenroute("inspect", shared_data, "--json")
    assert outcome.status == 0
    sources = outcome.json["sources"]
    assert len(sources) == 12
    for facts in sources:
        assert (facts["num_layers"], facts["num_logical_experts"]) == (61, 256)
        assert facts["layers_without_load"] == [0, 1, 2]
        assert facts["phase"] in ("prefill", "decode")
        skew = facts["skew"]["max_over_mean"]
        assert 5.5 < skew["mean"] < 8.2
    text = evenroute("inspect", shared_data)
    assert text.status == 0
    assert "prefill_in4096.json" in text.out


def test_runs_without_torch(shared_data: Path) -> None:
    outcome = evenroute_without("torch", "inspect", shared_data / "prefill_in512.json")
    assert outcome.status == 0, outcome.err
    assert "61 layers x 256 experts" in outcome.out


class TestUnreadable:
    """One line, exit status 2, no traceback."""

    @pytest.mark.parametrize(
        ("content", "parts"),
        [
            ("", ["empty"]),
            ('{"logical_count": [[1, 2], [3', ["truncated or damaged"]),
            ('{"logical_count": [[1, 2], [3]]}', ["row lengths [1, 2]"]),
            ('{"logical_count": [[1, -2]]}', ["layer 0 expert 1", "-2"]),
            ('{"logical_count": [[1, NaN]]}', ["logical_count[0][1] is nan"]),
            ('{"logical_count": [[1, "x"]]}', ["numbers"]),
            ('{"logical_count": []}', ["rows"]),
            ('{"logical_count": 3}', ["logical_count must be"]),
            ('{"something": [[1]]}', ["something", "logical_count"]),
            ('{"physical_to_logical_map": [[0, 2]]}', ["no slot for expert 1"]),
            ('{"physical_to_logical_map": [[0, -1]]}', ["expert -1"]),
            ('{"format": "evenroute-placement", "format_version": 9}', ["not a placement file"]),
            ("3", ["loads.json"]),
            ("[[[[1]]]]", ["shape"]),
        ],
    )
    def test_bad_json(self, tmp_path: Path, content: str, parts: list[str]) -> None:
        path = tmp_path / "loads.json"
        path.write_text(content)
        assert_one_line_error(evenroute("inspect", path), str(path), *parts)

    def test_absent_unreadable_and_empty(self, tmp_path: Path) -> None:
        assert_one_line_error(evenroute("inspect", tmp_path / "absent"), "absent", "No such file")
        assert_one_line_error(evenroute("inspect", tmp_path), str(tmp_path), "holds no load file")
        path = tmp_path / "x.bin"
        path.write_bytes(b"\x00\x01\x02")
        assert_one_line_error(evenroute("inspect", path), "not a file of a known form")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_permission(self, tmp_path: Path) -> None:
        path = loads_file(tmp_path / "l.json", B21)
        path.chmod(0)
        assert_one_line_error(evenroute("inspect", path), "Permission denied")

    def test_permission_as_any_user(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = loads_file(tmp_path / "l.json", B21)
        real = os.open

        def deny(name: object, *arguments: object, **options: object) -> int:
            if name == path:
                raise PermissionError(13, "Permission denied", str(name))
            return real(name, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", deny)
        assert_one_line_error(evenroute("inspect", path), str(path), "Permission denied")

    def test_ranks_that_do_not_fit(self, tmp_path: Path) -> None:
        path = loads_file(tmp_path / "l.json", B21)
        assert_one_line_error(evenroute("inspect", path, "--num-slots", 5, "--ep-size", 2), "num_slots=5")
        assert_one_line_error(evenroute("inspect", path, "--ep-size", 3, "--num-nodes", 2), "num_nodes=2")


@pytest.mark.parametrize("cut", ["0", "1", "100", "half", "minus one"])
def test_a_dump_cut_off(tmp_path: Path, cut: str) -> None:
    """B30: the name and "truncated or damaged", status 2."""
    path = dump_file(tmp_path / "d.evd", random_counts(20, 3, 8))
    data = path.read_bytes()
    size = {"0": 0, "1": 1, "100": 100, "half": len(data) // 2, "minus one": len(data) - 1}[cut]
    path.write_bytes(data[:size])
    for arguments in ((), ("--json",), ("--layer", 1)):
        outcome = evenroute("inspect", path, *arguments)
        assert_one_line_error(outcome, str(path), "truncated or damaged")
        assert not outcome.out


def test_overwritten_bytes_are_found(tmp_path: Path) -> None:
    """B30: anywhere in the file, never shown as counts."""
    path = dump_file(tmp_path / "d.evd", random_counts(20, 3, 8))
    data = path.read_bytes()
    for place in range(0, len(data) - 8, 37):
        damaged = bytearray(data)
        damaged[place : place + 8] = bytes(byte ^ 0xFF for byte in data[place : place + 8])
        path.write_bytes(bytes(damaged))
        outcome = evenroute("inspect", path)
        assert outcome.status == 2, place
        assert str(path) in outcome.err
        assert not outcome.out


def test_a_folder_with_one_bad_file_reports_the_good_ones(tmp_path: Path) -> None:
    """B30, folder mode."""
    for name in ("a", "b", "c"):
        dump_file(tmp_path / f"{name}.evd", random_counts(4, 3, 8))
    bad = tmp_path / "b.evd"
    bad.write_bytes(bad.read_bytes()[:300])
    outcome = evenroute("inspect", tmp_path, "--json")
    assert outcome.status == 2
    assert [Path(facts["path"]).name for facts in outcome.json["sources"]] == ["a.evd", "c.evd"]
    assert len(outcome.json["errors"]) == 1
    assert outcome.err.count("\n") == 1
    assert "b.evd" in outcome.err
    assert "truncated or damaged" in outcome.err
