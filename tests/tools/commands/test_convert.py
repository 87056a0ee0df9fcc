"""`evenroute convert`: from any form to any other, and every refusal in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml

from evenroute.eplb.files.open import open_source
from support.command import assert_one_line_error, evenroute, evenroute_without
from support.foreign_files import (
    ascend_map,
    random_counts,
    random_map,
    sglang_per_pass,
    sglang_stat,
    trtllm_yaml,
)


def test_engine_to_engine_and_back(tmp_path: Path) -> None:
    """SGLang -> evenroute -> TensorRT-LLM -> vLLM-Ascend -> SGLang: the same rows."""
    rows = random_map(5, 8, 12, 4)
    (tmp_path / "a.json").write_text(json.dumps({"physical_to_logical_map": rows.tolist()}))
    chain = [
        ("a.json", "b.json", "evenroute", ("--ep-size", 4)),
        ("b.json", "c.yaml", "trtllm", ()),
        ("c.yaml", "d.json", "vllm-ascend", ("--ep-size", 4)),
        ("d.json", "e.json", "sglang", ()),
    ]
    for source, target, to, options in chain:
        outcome = evenroute("convert", tmp_path / source, tmp_path / target, "--to", to, *options)
        assert outcome.status == 0, outcome.err
        assert "8 experts in 12 slots" in outcome.out
    assert json.loads((tmp_path / "e.json").read_text()) == {"physical_to_logical_map": rows.tolist()}


def test_deepseeks_sixty_one_layers(tmp_path: Path) -> None:
    """58 MoE layers become SGLang's 61 rows, TensorRT-LLM's layers 3..60 and vLLM-Ascend's 58."""
    rows = random_map(58, 16, 24, 8)
    ascend_map(tmp_path / "in.json", rows, 8)
    layers = ("--dense-layers", 3, "--num-hidden-layers", 61)
    for to, name in (("sglang", "s.json"), ("trtllm", "t.yaml"), ("vllm-ascend", "v.json")):
        assert evenroute("convert", tmp_path / "in.json", tmp_path / name, "--to", to, *layers).status == 0
    sglang = json.loads((tmp_path / "s.json").read_text())["physical_to_logical_map"]
    assert len(sglang) == 61
    assert np.array_equal(sglang[3:], rows)
    assert list(yaml.safe_load((tmp_path / "t.yaml").read_text())["initial_global_assignments"]) == [
        *range(3, 61)
    ]
    assert json.loads((tmp_path / "v.json").read_text())["moe_layer_count"] == 58


def test_loads_of_an_engine_become_a_dump(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    counts = random_counts(4, 3, 8)
    sglang_stat(tmp_path / "d.pt", counts)
    outcome = evenroute("convert", tmp_path / "d.pt", tmp_path / "d.evd", "--to", "evenroute")
    assert "4 windows of loads" in outcome.out
    found = np.stack([window.counts for window in open_source(tmp_path / "d.evd").windows()])
    assert np.array_equal(found, counts)


def test_what_has_to_be_said_where_both_are_in_it(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows = random_map(3, 8, 12, 4)
    sglang_per_pass(tmp_path / "d.pt", 0, random_counts(2, 3, 12), rows)
    call = ("convert", tmp_path / "d.pt", tmp_path / "o.json", "--to", "sglang")
    assert_one_line_error(evenroute(*call), "--what")
    assert evenroute(*call, "--what", "placement").status == 0
    assert json.loads((tmp_path / "o.json").read_text()) == {"physical_to_logical_map": rows.tolist()}
    assert evenroute(*call, "--what", "loads").status == 0
    assert set(json.loads((tmp_path / "o.json").read_text())) == {"logical_count"}


def test_keys_of_a_set(tmp_path: Path) -> None:
    for name, seed in (("target", 1), ("draft", 2)):
        trtllm_yaml(tmp_path / f"{name}.yaml", random_map(3, 8, 12, 4, seed), [0, 1, 2])
        call = ("--to", "evenroute", "--ep-size", 4, "--key", name)
        assert evenroute("convert", tmp_path / f"{name}.yaml", tmp_path / "set.json", *call).status == 0
    assert_one_line_error(
        evenroute("convert", tmp_path / "set.json", tmp_path / "o.json", "--to", "sglang"), "--from-key"
    )
    call = ("convert", tmp_path / "set.json", tmp_path / "o.json", "--to", "sglang", "--from-key")
    assert evenroute(*call, "draft").status == 0
    written = json.loads((tmp_path / "o.json").read_text())["physical_to_logical_map"]
    assert np.array_equal(written, random_map(3, 8, 12, 4, 2))
    assert_one_line_error(evenroute(*call, "other"), "'draft', 'target'")
    assert evenroute("inspect", tmp_path / "set.json").status == 0


@pytest.mark.parametrize("to", ["evenroute", "sglang", "trtllm"])
def test_all_shared_files(shared_data: Path, tmp_path: Path, to: str) -> None:
    for path in sorted(shared_data.glob("*.json")):
        target = tmp_path / f"{path.stem}.{to}"
        outcome = evenroute("convert", path, target, "--to", to, "--top-k", 8)
        assert outcome.status == 0, outcome.err
        total = sum(window.counts.sum() for window in open_source(target).windows())
        assert total == sum(window.counts.sum() for window in open_source(path).windows())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--to", "word"), "--to 'word'"),
        (("--to", "sglang", "--what", "cake"), "--what 'cake'"),
        (("--to", "sglang", "--what", "loads"), "holds no loads"),
        (("--to", "vllm-ascend"), "--ep-size"),
        (("--to", "evenroute"), "--ep-size"),
        (("--to", "evenroute", "--ep-size", 5), "nearest"),
        (("--to", "sglang", "--key", "a"), "--key"),
        (("--to", "sglang", "--dense-layers", 1, "--num-hidden-layers", 9), "3 layers found"),
    ],
)
def test_wrong_use(tmp_path: Path, arguments: tuple[object, ...], part: str) -> None:
    trtllm_yaml(tmp_path / "in.yaml", random_map(3, 8, 12, 4), [0, 1, 2])
    (tmp_path / "in.json").write_text(
        json.dumps({"physical_to_logical_map": random_map(3, 8, 12, 4).tolist()})
    )
    outcome = evenroute("convert", tmp_path / "in.json", tmp_path / "out", *arguments)
    assert_one_line_error(outcome, part)
    assert not (tmp_path / "out").exists()


def test_out_is_kept_when_in_is_bad(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text('{"physical_to_logical_map": [[0, 2]]}')
    (tmp_path / "out.json").write_text("precious")
    assert_one_line_error(
        evenroute("convert", tmp_path / "in.json", tmp_path / "out.json", "--to", "sglang"), "expert 1"
    )
    assert (tmp_path / "out.json").read_text() == "precious"


def test_runs_without_torch(tmp_path: Path) -> None:
    trtllm_yaml(tmp_path / "in.yaml", random_map(3, 8, 12, 4), [0, 1, 2])
    outcome = evenroute_without(
        "torch", "convert", tmp_path / "in.yaml", tmp_path / "o.json", "--to", "sglang"
    )
    assert outcome.status == 0, outcome.err
