"""Wrong flags of the stress run: one line with field, found and expected, before any process is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evenroute.tools.stress.__main__ import split_launcher_flag
from evenroute.tools.stress.options import parse_options


def stress(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`evenroute stress ...` as a user types it, outside torchrun."""
    return subprocess.run(
        [sys.executable, "-m", "evenroute.tools", "stress", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [
        (["--num-redundant-experts", "3"], 2, "259"),
        (["--num-experts", "4", "--num-groups", "8", "--top-k", "2"], 2, "--num-groups=8"),
        (["--num-experts", "250"], 2, "--num-groups must divide --num-experts"),
        (["--topk-group", "9"], 2, "--topk-group=9"),
        (["--top-k", "129"], 2, "--top-k=129"),
        (
            ["--top-k", "17", "--topk-group", "1", "--num-experts", "128"],
            2,
            "--num-groups = 16",
        ),
        (["--num-experts", "4096"], 2, "--num-experts must be in [1, 2048], found 4096"),
        (["--tokens", str(10**30)], 2, "--tokens: found"),
        (["--zipf-exponent", "inf"], 2, "--zipf-exponent: found inf"),
        (["--zipf-exponent", "nan"], 2, "--zipf-exponent: found nan"),
        (["--step-delay", "inf"], 2, "--step-delay: found inf"),
        (["--policy", "hierarchical", "--num-nodes", "2", "--model", "qwen3"], 2, "--num-nodes: found 2"),
        (["--init-placement", "/no/such/placement.json"], 2, "placement.json"),
        (["--store", "/no/such/run.db"], 2, "--store: /no/such/run.db: folder /no/such does not exist"),
        (["--report", "/tmp"], 2, "--report: /tmp: is a folder"),
        (["--top-k", "0"], 2, "--top-k must be >= 1, found 0"),
        (["--num-groups", "256", "--topk-group", "8"], 2, "a group needs at least 2 experts"),
        (["--num-redundant-experts", "257", "--num-experts", "256"], 1, "513"),
        (["--num-nodes", "3"], 8, "3"),
        (["--steps", "0"], 2, "--steps: found 0, expected 1 to"),
        (["--tokens", "-1"], 2, "--tokens: found -1, expected 0 to"),
        (["--interval-steps", "0"], 2, "--interval-steps: found 0"),
        (["--layers", "0"], 2, "--layers must be >= 1, found 0"),
        (["--num-experts", "0"], 2, "--num-experts must be >= 1, found 0"),
        (["--num-groups", "0"], 2, "--num-groups must be >= 1, found 0"),
        (["--topk-group", "-1"], 2, "--topk-group must be >= 1, found -1"),
        (["--num-redundant-experts", "-1"], 2, "--num-redundant-experts must be >= 0, found -1"),
        (["--num-nodes", "0"], 2, "--num-nodes must be >= 1, found 0"),
        (["--routing", "trace"], 2, "--loads: missing"),
        (["--routing", "zipf", "--loads", "x.json"], 2, "expected only with --routing trace"),
        (["--token-mode", "shared", "--dispatch", "dynamic"], 2, "--dispatch: found dynamic"),
        (["--dispatch", "dynamic", "--policy", "auto"], 2, "--policy: found auto with --dispatch dynamic"),
        (["--rebalancer", "localhost"], 2, "--rebalancer"),
        (["--keys", "/no/such/rank.toml"], 2, "--keys: found with --rebalancer start"),
        (["--rebalancer", "ipc:///tmp/r.sock", "--store", "x.db"], 2, "--store"),
        (["--report", "/no/such/folder/r.json"], 2, "folder /no/such/folder does not exist"),
        (["--record-dir", "/no/such/folder"], 2, "--record-dir: /no/such/folder: not there"),
        (
            ["--kill-rank", "1@20"],
            2,
            "--kill-rank: ranks of a stress run stay; expected `evenroute bench elastic",
        ),
        (["--join=20"], 2, "`evenroute bench elastic --join=20 ...`"),
        (["--leave", "1@20"], 2, "--leave: ranks of a stress run stay"),
    ],
)
def test_impossible_settings_name_field_found_and_expected(
    flags: list[str], ranks: int, message: str
) -> None:
    with pytest.raises((ValueError, OSError)) as error:
        parse_options(flags, ep_size=ranks)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-redundant-experts", "3"],
        ["--routing", "zpif"],
        ["--model", "dsv4"],
        ["--stpes", "3"],
        ["--routing", "trace", "--loads", "/no/such/file.json"],
        ["--nproc-per-node", "0"],
        ["--nproc-per-node"],
    ],
)
def test_wrong_use_is_one_line_and_status_2(flags: list[str]) -> None:
    done = stress(*flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("evenroute: error: ")


@pytest.mark.parametrize("rank", ["0", "3"])
def test_its_own_rebalancer_is_refused_with_ranks_on_several_hosts(rank: str) -> None:
    """They would never be heard; rank 0 says so, the others end with the same status."""
    torchrun = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "evenroute.tools.stress", "--num-nodes", "2"],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **torchrun},
    )
    assert done.returncode == 2
    told = done.stderr.splitlines()
    if rank == "0":
        assert len(told) == 1
        assert "--rebalancer: found start with 2 of 4 ranks on this host" in told[0]
    else:
        assert not told


def test_loads_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps({"logical_count": [[1, 2, 3, 4]] * 2}))
    small = ["--routing", "trace", "--loads", str(path), "--num-experts", "4", "--num-groups", "1"]
    small += ["--topk-group", "1", "--top-k", "2"]
    options = parse_options([*small, "--layers", "2"], ep_size=2)
    assert options.shape.num_layers == 2
    with pytest.raises(ValueError, match="has 2 layers with load, expected at least 3"):
        parse_options([*small, "--layers", "3"], ep_size=2)
    with pytest.raises(ValueError, match="has 4 experts, expected 256"):
        parse_options(["--routing", "trace", "--loads", str(path)], ep_size=2)


def test_defaults_follow_the_model_and_the_token_mode() -> None:
    options = parse_options(["--model", "kimi-k2", "--token-mode", "shared"], ep_size=8)
    assert (options.shape.num_logical_experts, options.shape.num_slots) == (384, 448)
    assert (options.dispatch, options.policy) == ("auto", "auto")
    assert parse_options(["--dispatch", "dynamic"], ep_size=2).policy == "incremental"


def test_launcher_flag_is_taken_out() -> None:
    assert split_launcher_flag(["--steps", "3", "--nproc-per-node", "4"]) == (4, ["--steps", "3"])
    assert split_launcher_flag(["--nproc_per_node=8"]) == (8, [])
    assert split_launcher_flag([]) == (2, [])
