"""`evenroute replay` and `evenroute advise` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.store.writer import HistoryStore, JobRow, RankWindowRow
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.foreign_files import random_counts, trtllm_statistics

SMALL = {"logical_count": random_counts(1, 3, 16)[0].tolist()}


@pytest.fixture
def loads(tmp_path: Path) -> Path:
    np.save(tmp_path / "loads.npy", random_counts(8, 3, 16))
    return tmp_path / "loads.npy"


class TestReplay:
    def test_sweep(self, loads: Path) -> None:
        outcome = evenroute(
            "replay", loads, "--ep-size", "4,8", "--redundant", "8,16", "--interval", "1,2", "--json"
        )
        facts = outcome.json
        # none once per (ranks, redundancy), global and rebalancer for both intervals
        assert len(facts["runs"]) == 2 * 2 * 5
        assert facts["num_windows"] == 8
        assert all(len(run["points"]) == 8 for run in facts["runs"])
        assert {worth["ep_size"] for worth in facts["worthwhile_redundancy"]} == {4, 8}
        text = evenroute("replay", loads, "--ep-size", "4", "--redundant", "0,8").out
        assert "Worth it:" in text
        assert "8 windows" in text

    def test_a_store_of_a_job_whose_ranks_came_and_went(self, tmp_path: Path) -> None:
        path, counts = tmp_path / "run.db", random_counts(16, 3, 16)
        with HistoryStore(path) as store:
            store.begin_epoch(5, pid=1, now=0.0)
            for run, ranks in enumerate((4, 3, 5, 4), start=1):  # a run for each membership
                store.set_job(
                    run, JobRow("", "", 3, 16, 6 * ranks, ranks, 1, 2, False), epoch=5, now=float(run)
                )
                for seq in range(1, 5):
                    window = counts[4 * run + seq - 5].astype(np.int64)
                    row = RankWindowRow(run, 0, seq, 10 * seq, 10 * seq + 9, 40, window)
                    store.add_windows([row], epoch=5, now=run + seq / 10)
        facts = evenroute("replay", path, "--ep-size", 4, "--policy", "rebalancer", "--json").json
        assert facts["num_windows"] == 16, "the windows of every membership"
        assert facts["runs"][0]["moves"] > 0

    def test_repeats_byte_for_byte(self, loads: Path) -> None:
        call = ("replay", loads, "--ep-size", "4", "--json")
        assert evenroute(*call).out == evenroute(*call).out

    def test_files_are_a_series_in_the_order_given(self, tmp_path: Path) -> None:
        paths = []
        for index in range(3):
            path = tmp_path / f"{index}.json"
            path.write_text(json.dumps({"logical_count": random_counts(1, 3, 16, seed=index)[0].tolist()}))
            paths.append(path)
        call = ("--ep-size", 4, "--policy", "none", "--json")
        forth = evenroute("replay", *paths, *call).json["runs"][0]["points"]
        back = evenroute("replay", *reversed(paths), *call).json["runs"][0]["points"]
        assert [point["mean"] for point in forth] == [point["mean"] for point in back][::-1]

    def test_all_shared_files(self, shared_data: Path) -> None:
        """A plan from the last file, on twelve different workloads: far better than none, not perfect."""
        outcome = evenroute("replay", shared_data, "--ep-size", 32, "--num-slots", 288, "--json")
        none, planned, rebalancer = outcome.json["runs"]
        assert rebalancer["moves"] < 0.3 * planned["moves"]
        assert rebalancer["balancedness_mean"] > none["balancedness_mean"] + 0.3
        assert none["balancedness_mean"] < 0.55
        assert 0.85 < planned["balancedness_mean"] < 0.95
        assert planned["step_time_gain"] > none["step_time_gain"]
        assert outcome.json["expert_bytes"] == 3 * 7168 * 2048

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (("--policy", "best"), "policy='best'"),
            (("--interval", "0"), "interval=0"),
            (("--interval", "x"), "--interval 'x'"),
            (("--redundant", "3", "--ep-size", "4"), "num_slots=19"),
            (("--redundant", "8", "--num-slots", "24"), "give one of them"),
            (("--ep-size", "0"), "ep_size"),
            (("--model", "gpt"), "--model 'gpt'"),
            (("--dead-band", "2"), "dead_band"),
        ],
    )
    def test_wrong_use(self, loads: Path, arguments: tuple[str, ...], part: str) -> None:
        assert_one_line_error(evenroute("replay", loads, *arguments), part)

    def test_start_placement_of_another_engine(self, loads: Path, tmp_path: Path) -> None:
        """A placement that fits from the start beats experts in order."""
        rows = [[*range(0, 16, 4), 1, *range(1, 16, 4), 2, *range(2, 16, 4), 3, *range(3, 16, 4), 0]] * 3
        (tmp_path / "m.json").write_text(json.dumps({"physical_to_logical_map": rows}))
        call = ("replay", loads, "--ep-size", 4, "--redundant", 4, "--policy", "none", "--json")
        plain = evenroute(*call).json["runs"][0]["points"]
        started = evenroute(*call, "--start", tmp_path / "m.json").json["runs"][0]["points"]
        assert [point["mean"] for point in started] != [point["mean"] for point in plain]
        assert_one_line_error(evenroute(*call, "--start", loads), "holds no placement")
        wrong = ("replay", loads, "--ep-size", 4, "--redundant", 8, "--start", tmp_path / "m.json")
        assert_one_line_error(evenroute(*wrong), "20 slots")

    def test_files_of_two_shapes_are_refused(self, loads: Path, tmp_path: Path) -> None:
        np.save(tmp_path / "other.npy", np.ones((3, 8)))
        assert_one_line_error(evenroute("replay", loads, tmp_path / "other.npy"), "[3, 8]", "[3, 16]")

    def test_a_placement_is_no_history(self, tmp_path: Path) -> None:
        (tmp_path / "m.json").write_text('{"physical_to_logical_map": [[0, 1]]}')
        assert_one_line_error(evenroute("replay", tmp_path / "m.json"), "holds no loads")

    def test_runs_without_torch(self, loads: Path) -> None:
        outcome = evenroute_without("torch", "replay", loads, "--ep-size", 4)
        assert outcome.status == 0, outcome.err


class TestAdvise:
    def test_shared_files_deserve_it(self, shared_data: Path) -> None:
        outcome = evenroute("advise", shared_data, "--hardware", "h200", "--batch-tokens", 16384, "--json")
        facts = outcome.json
        assert facts["verdict"] == "recommend"
        assert facts["smallest_redundancy_within_1_percent"] == 32
        assert facts["phases"]["own_placements"]
        assert 0.7 < facts["phases"]["other_phases_plan"] < 0.8
        assert 0.95 < facts["batch_balancedness_after"] < 0.98
        assert facts["memory_bytes_per_rank"] == 58 * 3 * 7168 * 2048
        assert "upper bound" in facts["gain_basis"]

    def test_text_names_its_assumptions(self, loads: Path) -> None:
        text = evenroute("advise", loads, "--ep-size", 4).out
        assert text.startswith("Verdict: ")
        for words in ("(assumed)", "plans age", "memory price", "give --expert-bytes"):
            assert words in " ".join(text.split()), words

    def test_a_single_window_is_told_to_have_no_time_axis(self, tmp_path: Path) -> None:
        (tmp_path / "l.json").write_text(json.dumps(SMALL))
        text = " ".join(evenroute("advise", tmp_path / "l.json", "--ep-size", 4).out.split())
        assert "no time axis" in text

    def test_on_another_engines_folder(self, tmp_path: Path) -> None:
        parts = np.stack([random_counts(6, 3, 16, seed=rank) for rank in range(2)])
        folder = trtllm_statistics(tmp_path / "s", parts, layers=[3, 4, 5], top_k=2)
        facts = evenroute("advise", folder, "--ep-size", 4, "--json").json
        assert facts["top_k"] == 2
        assert facts["top_k_is"] == "known"

    def test_placement_in_use(self, loads: Path, tmp_path: Path) -> None:
        (tmp_path / "m.json").write_text(
            json.dumps({"physical_to_logical_map": [[*range(15, -1, -1), 0, 4, 8, 15]] * 3})
        )
        outcome = evenroute("advise", loads, "--ep-size", 4, "--placement", tmp_path / "m.json", "--json")
        assert outcome.json["placement_now"].endswith("m.json")

    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (("--hardware", "abacus"), "--hardware 'abacus'"),
            (("--replan-minutes", "0"), "--replan-minutes"),
            (("--redundant", "3", "--ep-size", "4"), "num_slots=19"),
            (("--model", "gpt"), "--model"),
        ],
    )
    def test_wrong_use(self, loads: Path, arguments: tuple[str, ...], part: str) -> None:
        assert_one_line_error(evenroute("advise", loads, *arguments), part)

    def test_runs_without_torch(self, loads: Path) -> None:
        outcome = evenroute_without("torch", "advise", loads, "--ep-size", 4)
        assert outcome.status == 0, outcome.err
