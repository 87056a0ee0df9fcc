"""What is written for other engines: exactly what they accept, with the rows they expect, and back again."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from evenroute.eplb.files.open import open_source, open_sources
from evenroute.eplb.files.write import ModelLayers, write_loads, write_placement
from evenroute.eplb.loads.source import PlacementMap
from evenroute.eplb.placement.file import load_placement_set, save_placement, update_placement_set
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.classes.sets import with_classes
from evenroute.eplb.planner.classes.times import ExpertTimes
from support.control_plane import wait_for
from support.foreign_files import random_counts, random_map

RANKS, EXPERTS, SLOTS = 4, 8, 12
SUFFIX = {"sglang": ".json", "trtllm": ".yaml", "vllm-ascend": ".json", "evenroute": ".json"}


def placement(layers: int = 5, seed: int = 0) -> Placement:
    return Placement(random_map(layers, EXPERTS, SLOTS, RANKS, seed), EXPERTS, Topology(RANKS))


def known(of: Placement) -> PlacementMap:
    return PlacementMap(of.physical_to_logical, EXPERTS, RANKS, placement=of)


@pytest.mark.parametrize("target", ["sglang", "trtllm", "vllm-ascend", "evenroute"])
class TestRoundTrip:
    def test_same_placement_comes_back(self, tmp_path: Path, target: str) -> None:
        start = placement()
        path = tmp_path / f"m{SUFFIX[target]}"
        write_placement(path, known(start), target, ModelLayers(), ep_size=RANKS)
        found = open_source(path).placement_map
        assert found is not None
        back = tmp_path / "back.json"
        write_placement(back, found, "evenroute", ModelLayers(), ep_size=RANKS)
        again = open_source(back).placement_map
        assert again is not None
        assert again.placement is not None
        assert again.placement.digest() == start.digest()

    def test_with_dense_layers(self, tmp_path: Path, target: str) -> None:
        """Five MoE layers of a model whose first three are dense."""
        start, layers = placement(), ModelLayers(num_hidden=8, num_dense=3)
        path = tmp_path / f"m{SUFFIX[target]}"
        write_placement(path, known(start), target, layers, ep_size=RANKS)
        found = open_source(path)
        assert found.placement_map is not None
        rows = {"sglang": 8, "trtllm": 5, "vllm-ascend": 5, "evenroute": 5}
        assert found.num_layers == rows[target]
        back = tmp_path / "back.json"
        write_placement(
            back,
            found.placement_map,
            "evenroute",
            layers,
            ep_size=RANKS,
            includes_dense=target == "sglang",
        )
        again = open_source(back).placement_map
        assert again is not None
        assert np.array_equal(again.physical_to_logical, start.physical_to_logical)


class TestExactForms:
    def test_sglang_has_one_key_and_all_hidden_layers(self, tmp_path: Path) -> None:
        path = tmp_path / "m.json"
        start = placement()
        write_placement(path, known(start), "sglang", ModelLayers(8, 3))
        data = json.loads(path.read_text())
        assert list(data) == ["physical_to_logical_map"]
        assert np.array_equal(data["physical_to_logical_map"][3:], start.physical_to_logical)
        for row in data["physical_to_logical_map"][:3]:
            assert set(row) == set(range(EXPERTS))

    def test_trtllm_has_three_keys_under_the_models_layers(self, tmp_path: Path) -> None:
        path = tmp_path / "m.yaml"
        start = placement()
        write_placement(path, known(start), "trtllm", ModelLayers(8, 3))
        data = yaml.safe_load(path.read_text())
        assert set(data) == {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}
        assert data["num_slots"] == SLOTS
        assert list(data["initial_global_assignments"]) == [3, 4, 5, 6, 7]
        assert data["initial_global_assignments"][3] == start.physical_to_logical[0].tolist()

    def test_ascend_lists_moe_layers_from_zero(self, tmp_path: Path) -> None:
        path = tmp_path / "m.json"
        start = placement(8)
        write_placement(path, known(start), "vllm-ascend", ModelLayers(8, 3))
        data = json.loads(path.read_text())
        assert data["moe_layer_count"] == 5
        first = data["layer_list"][0]
        assert (first["layer_id"], first["device_count"]) == (0, RANKS)
        listed = [expert for device in first["device_list"] for expert in device["device_expert"]]
        assert listed == start.physical_to_logical[3].tolist()
        assert [device["device_id"] for device in first["device_list"]] == [0, 1, 2, 3]


class TestRefusals:
    def test_row_counts_that_do_not_fit(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="5 layers found, expected 9"):
            write_placement(tmp_path / "m", known(placement()), "sglang", ModelLayers(9, 3))
        with pytest.raises(ValueError, match="--num-hidden-layers"):
            write_placement(tmp_path / "m", known(placement()), "sglang", ModelLayers(None, 3))
        with pytest.raises(ValueError, match="leaves none"):
            write_placement(
                tmp_path / "m", known(placement()), "trtllm", ModelLayers(None, 9), includes_dense=True
            )
        assert not list(tmp_path.iterdir())

    def test_uneven_shares_need_a_word(self, tmp_path: Path) -> None:
        rows = placement().physical_to_logical
        shares = np.array(even_shares(rows))
        layer, expert = 0, int(np.flatnonzero(np.bincount(rows[0]) > 1)[0])
        first, second = np.flatnonzero(rows[layer] == expert)[:2]
        shares[layer, first] += 100
        shares[layer, second] -= 100
        uneven = known(Placement(rows, EXPERTS, Topology(RANKS), shares))
        with pytest.raises(ValueError, match="--drop-shares"):
            write_placement(tmp_path / "m.json", uneven, "sglang", ModelLayers())
        write_placement(tmp_path / "m.json", uneven, "sglang", ModelLayers(), drop_shares=True)
        write_placement(tmp_path / "own.json", uneven, "evenroute", ModelLayers())
        found = open_source(tmp_path / "own.json").placement_map
        assert found is not None
        assert found.placement is not None
        assert np.array_equal(found.placement.shares, shares)

    def test_shares_of_small_batches_need_a_word_too(self, tmp_path: Path) -> None:
        loads = np.ones((placement().num_layers, EXPERTS))
        made = with_classes(placement(), loads, 2, ExpertTimes())
        assert made.classes is not None
        with pytest.raises(ValueError, match="--drop-shares"):
            write_placement(tmp_path / "m.json", known(made), "sglang", ModelLayers())
        write_placement(tmp_path / "own.json", known(made), "evenroute", ModelLayers())
        found = open_source(tmp_path / "own.json").placement_map
        assert found is not None
        assert found.placement is not None
        assert found.placement.digest() == made.digest()

    def test_an_expert_twice_on_a_rank_is_no_placement_of_ours(self, tmp_path: Path) -> None:
        (tmp_path / "m.json").write_text('{"physical_to_logical_map": [[0, 0, 1, 2]]}')
        source = open_source(tmp_path / "m.json")
        assert source.placement_map is not None
        with pytest.raises(ValueError, match="twice on rank 0"):
            write_placement(tmp_path / "o.json", source.placement_map, "evenroute", ModelLayers(), ep_size=2)


class TestLoads:
    def test_dump_keeps_everything(self, tmp_path: Path) -> None:
        counts = random_counts(4, 3, 8)
        np.save(tmp_path / "a.npy", counts)
        assert write_loads(tmp_path / "a.evd", open_source(tmp_path / "a.npy"), "evenroute") == 4
        found = np.stack([window.counts for window in open_source(tmp_path / "a.evd").windows()])
        assert np.array_equal(found, counts)

    def test_fractions_survive(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.array([[0.5, 1.25]]))
        write_loads(tmp_path / "a.evd", open_source(tmp_path / "a.npy"), "evenroute")
        assert next(open_source(tmp_path / "a.evd").windows()).counts.tolist() == [[0.5, 1.25]]

    def test_sglang_and_trtllm(self, tmp_path: Path) -> None:
        counts = random_counts(4, 5, 8)
        counts[:, :2] = 0
        np.save(tmp_path / "a.npy", counts)
        source = open_source(tmp_path / "a.npy")
        write_loads(tmp_path / "a.json", source, "sglang")
        assert np.array_equal(
            json.loads((tmp_path / "a.json").read_text())["logical_count"], counts.sum(axis=0)
        )
        with pytest.raises(ValueError, match="--top-k"):
            write_loads(tmp_path / "s", source, "trtllm")
        write_loads(tmp_path / "s", source, "trtllm", top_k=2)
        back = open_source(tmp_path / "s")
        assert back.layer_ids == (2, 3, 4)
        found = np.stack([window.counts for window in back.windows()])
        assert np.array_equal(found, counts[:, 2:])
        write_loads(tmp_path / "b.json", back, "sglang")
        assert np.array_equal(
            json.loads((tmp_path / "b.json").read_text())["logical_count"], counts.sum(axis=0)
        )
        with pytest.raises(ValueError, match="evenroute plan"):
            write_loads(tmp_path / "m", source, "vllm-ascend")


def held_keys(path: Path) -> set[str]:
    return set(load_placement_set(path)) if path.exists() else set()


def writer(path: Path, index: int, ready: multiprocessing.synchronize.Barrier, rounds: int) -> None:
    mine = placement(seed=index)
    ready.wait()
    for _ in range(rounds):
        save_placement(path / "one.json", mine, model=f"writer {index}")
        update_placement_set(path / "set.json", f"key {index}", mine)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12, where threads run
def test_eight_writers_one_killed(tmp_path: Path) -> None:
    """U08: whoever reads finds a whole file at any time; keys of other writers stay."""
    context = multiprocessing.get_context("fork")
    ready = context.Barrier(9)
    digests = {placement(seed=index).digest() for index in range(8)}
    processes = [context.Process(target=writer, args=(tmp_path, i, ready, 100)) for i in range(8)]
    for process in processes:
        process.start()
    ready.wait()
    # Killed in the barrier, it would take the others' way out with it: only once it writes.
    wait_for(lambda: "key 0" in held_keys(tmp_path / "set.json"), 60, "the first writer writes")
    time.sleep(0.1)
    pid = processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    reads = 0
    while any(process.is_alive() for process in processes) or not reads:
        if (tmp_path / "one.json").exists():
            found = open_source(tmp_path / "one.json").placement_map
            assert found is not None
            assert found.placement is not None
            assert found.placement.digest() in digests
            reads += 1
        time.sleep(0.01)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes[1:]] == [0] * 7
    held = load_placement_set(tmp_path / "set.json")
    assert set(held) >= {f"key {index}" for index in range(1, 8)}
    for index in range(1, 8):
        assert held[f"key {index}"][0].digest() == placement(seed=index).digest()
    left = [path.name for path in tmp_path.iterdir() if path.name not in ("one.json", "set.json")]
    # At most what the killed one was just writing, hidden, and the lock.
    assert all(name.startswith(".") for name in left)
    assert len(left) <= 3


def test_target_and_draft_model_have_their_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "set.json"
    target, draft = placement(seed=1), placement(layers=1, seed=2)
    save_placement(path, target, model="main")  # an older file with a single placement
    update_placement_set(path, "draft", draft, model="mtp")
    held = load_placement_set(path)
    assert set(held) == {"", "draft"}
    assert held[""][0].digest() == target.digest()
    assert held[""][1].model == "main"
    assert held["draft"][0].num_layers == 1
    assert [source.key for source in open_sources([path]).sources] == ["", "draft"]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"format": "other"}', '{"format": "evenroute-placement-set", "format_version": 2}'],
)
def test_a_bad_set_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "set.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"set\.json"):
        update_placement_set(path, "a", placement())
    assert path.read_text() == text
