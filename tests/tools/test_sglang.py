"""The bridge to SGLang against a stand-in of its server: record, plan, hand back, and what can go wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from evenroute.eplb.loads.balance import balancedness, rank_loads
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.tools import sglang as adapter_sglang
from support.sglang_stand_in import SglangStandIn, init_expert_location

LAYERS, EXPERTS, REDUNDANT, RANKS = 4, 16, 4, 4
NUMBERS = ["--ep-size", str(RANKS), "--ep-num-redundant-experts", str(REDUNDANT), "--seconds", "0.3"]


@pytest.fixture
def loads() -> torch.Tensor:
    """Layer 0 is dense: SGLang counts all hidden layers."""
    counts = np.random.default_rng(3).zipf(1.5, (LAYERS, EXPERTS)).clip(max=4000)
    counts[0] = 0
    return torch.from_numpy(counts)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    folder = tmp_path / "dumps"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_sglang, "SETTLE_S", 0.05)


def bridge(server: SglangStandIn, dumps: Path, output: Path, *more: object) -> int:
    words = ["--url", server.url, "--recorder-dir", dumps, "-o", output, *NUMBERS, *more]
    try:
        adapter_sglang.main([str(word) for word in words])
    except SystemExit as leave:
        return int(leave.code or 0)
    return 0


def test_records_plans_and_hands_back(
    loads: torch.Tensor, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "location.json"
    with SglangStandIn(dumps, loads) as server:
        assert bridge(server, dumps, output) == 0
        assert server.calls == ["start", "stop", "dump"]
    table = init_expert_location(
        output, ep_size=RANKS, num_layers=LAYERS, num_experts=EXPERTS, redundant=REDUNDANT
    )
    start = Placement.initial(LAYERS, EXPERTS, EXPERTS + REDUNDANT, Topology(RANKS))
    planned = Placement(table.numpy().astype(np.int32), EXPERTS, Topology(RANKS))
    before, after = (
        balancedness(rank_loads(loads.double().numpy(), placement)).mean for placement in (start, planned)
    )
    assert before is not None
    assert after is not None
    assert after > before + 0.1
    assert np.array_equal(planned.physical_to_logical[0], start.physical_to_logical[0]), (
        "a dense layer has no load"
    )
    out = capsys.readouterr().out
    assert str(output) in out
    assert f"{after:.4f}" in out


def test_a_second_round_starts_from_the_placement_in_use(
    loads: torch.Tensor, dumps: Path, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    with SglangStandIn(dumps, loads) as server:
        assert bridge(server, dumps, first) == 0
        assert bridge(server, dumps, second, "--init-expert-location", first) == 0
    maps = [
        init_expert_location(path, ep_size=RANKS, num_layers=LAYERS, num_experts=EXPERTS, redundant=REDUNDANT)
        for path in (first, second)
    ]
    by_rank = [table.view(LAYERS, RANKS, -1).sort(-1).values for table in maps]
    assert torch.equal(*by_rank), "the same loads moved experts again"


def test_a_recorder_that_is_off_is_found(
    loads: torch.Tensor, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """U06: commands are answered but do nothing; the bridge says so, with the remedy."""
    with SglangStandIn(dumps, loads, mode=None) as server:
        assert bridge(server, dumps, tmp_path / "x.json", "--timeout", 2) == 2
    error = capsys.readouterr().err
    assert "wrote no dump" in error
    assert "--expert-distribution-recorder-mode stat" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "x.json").exists()


def test_a_recording_without_traffic_is_refused(
    loads: torch.Tensor, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SglangStandIn(dumps, torch.zeros_like(loads)) as server:
        assert bridge(server, dumps, tmp_path / "x.json") == 2
    assert "nothing was counted" in capsys.readouterr().err


def test_an_api_key_is_sent_and_a_missing_one_refused(
    loads: torch.Tensor,
    dumps: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGLANG_TEST_KEY", "secret")
    with SglangStandIn(dumps, loads, api_key="secret") as server:
        assert bridge(server, dumps, tmp_path / "x.json") == 2
        assert "answered 401" in capsys.readouterr().err
        assert bridge(server, dumps, tmp_path / "x.json", "--api-key-env", "SGLANG_TEST_KEY") == 0
        assert bridge(server, dumps, tmp_path / "x.json", "--api-key-env", "NOT_SET_HERE") == 2
        assert "NOT_SET_HERE is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--url", "127.0.0.1:30000"], "expected http://HOST:PORT"),
        (["--recorder-dir", "/nowhere/at/all"], "is no folder"),
        (["--seconds", "0"], "--seconds: found 0.0"),
        (["--timeout", "-1"], "--timeout: found -1.0"),
        (["--nnodes", "3"], "num_nodes=3 does not divide ep_size=4"),
        (["--ep-num-redundent-experts", "4"], "unrecognized arguments: --ep-num-redundent-experts"),
        (["--policy", "best"], "invalid choice: 'best'"),
    ],
)
def test_wrong_use_is_one_line(
    words: list[str], message: str, dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [
        "--url",
        "http://127.0.0.1:9",
        "--recorder-dir",
        str(dumps),
        "-o",
        str(tmp_path / "x.json"),
        *NUMBERS,
    ]
    with pytest.raises(SystemExit) as leave:
        adapter_sglang.main([*good, *words])
    assert leave.value.code == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_server_that_is_not_there_is_one_line(
    dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SglangStandIn(dumps, torch.zeros(1, 4)) as server:
        address = server.url
    words = ["--url", address, "--recorder-dir", str(dumps), "-o", str(tmp_path / "x.json"), *NUMBERS]
    with pytest.raises(SystemExit):
        adapter_sglang.main(words)
    assert "start_expert_distribution_record" in capsys.readouterr().err
