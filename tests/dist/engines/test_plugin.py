"""What the engines' plug-ins share: settings from either side, and refusals that end the process in one line."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evenroute.dist.engines.plugin import (
    check_version,
    known_settings,
    read_settings,
    refuse,
    start_placement,
)

ADDRESS = "tcp://10.0.0.1:9876"


def line_of(capsys: pytest.CaptureFixture[str], ended: pytest.ExceptionInfo[SystemExit]) -> str:
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("evenroute in Engine: ")
    return said


def test_a_refusal_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        refuse("Engine", "no\nway")
    assert line_of(capsys, ended) == "evenroute in Engine: no way\n"


def test_without_a_setting_it_is_off() -> None:
    assert read_settings("Engine", None, {"HOME": "/root", "EVENROUTE_SOAK_MINUTES": "30"}) is None


def test_every_setting_has_a_variable_and_the_engines_table_comes_first() -> None:
    environ = {
        "EVENROUTE_REBALANCER": "ipc:///tmp/other",
        "EVENROUTE_WINDOW_STEPS": "8",
        "EVENROUTE_VERIFY": "yes",
        "EVENROUTE_TRANSFER_LIMIT_S": "12.5",
        "EVENROUTE_NUM_NODES": "2",
        "EVENROUTE_MODE": "",  # empty is not set
    }
    found = read_settings("Engine", {"rebalancer": ADDRESS, "heartbeat_s": 2}, environ)
    assert found is not None
    assert (found.agent.rebalancer, found.agent.window_steps, found.agent.heartbeat_s) == (ADDRESS, 8, 2.0)
    assert (found.migration.verify, found.migration.transfer_limit_s, found.num_nodes) == (True, 12.5, 2)
    assert found.agent.mode == "balance"
    agent = found.agent_config(model="qwen", top_k=8, shared_counts=True)
    assert (agent.model, agent.top_k, agent.shared_counts, agent.window_steps) == ("qwen", 8, True, 8)
    for name, kind in known_settings().items():
        text = {bool: "x", int: "x", float: "x"}.get(kind)
        if text:  # each of them is looked at
            with pytest.raises(SystemExit):
                read_settings("Engine", None, {**environ, f"EVENROUTE_{name.upper()}": text})


def test_a_name_of_the_model_that_was_given_stays() -> None:
    found = read_settings("Engine", {"rebalancer": ADDRESS, "model": "mine"}, {})
    assert found is not None
    assert found.agent_config(model="theirs", top_k=2, shared_counts=False).model == "mine"


@pytest.mark.parametrize(
    ("given", "environ", "words"),
    [
        ({}, {}, "rebalancer is missing"),
        (None, {"EVENROUTE_MODE": "shadow"}, "rebalancer is missing"),
        (
            {"rebalancer": ADDRESS, "windw_steps": 3},
            {},
            "unknown name 'windw_steps', did you mean 'window_steps'?",
        ),
        ({"rebalancer": ADDRESS, "top_k": 3}, {}, "unknown name 'top_k'"),
        ({"rebalancer": ADDRESS, 3: 3}, {}, "unknown name 3"),
        ({"rebalancer": ADDRESS, "mode": "off"}, {}, "agent.mode: 'off' found, expected balance | shadow"),
        ({"rebalancer": ADDRESS, "verify": 1}, {}, "settings.verify: 1 found, expected bool"),
        (
            {"rebalancer": ADDRESS, "staging_bytes": 0},
            {},
            "staging_bytes must be in [1, 4611686018427387904], found 0",
        ),
        ({"rebalancer": ADDRESS, "num_nodes": "2"}, {}, "settings.num_nodes: '2' found"),
        ({"rebalancer": "nowhere"}, {}, "agent.rebalancer: 'nowhere'"),
        ([1], {}, "a list found, expected a table"),
        (
            None,
            {"EVENROUTE_REBALANCER": ADDRESS, "EVENROUTE_VERIFY": "maybe"},
            "EVENROUTE_VERIFY: 'maybe' found",
        ),
        (
            None,
            {"EVENROUTE_REBALANCR": ADDRESS},
            "EVENROUTE_REBALANCR: unknown, did you mean EVENROUTE_REBALANCER?",
        ),
        (None, {"EVENROUTE_REBALANCER": ADDRESS, "EVENROUTE_WINDOW_STEPS": "4w"}, "expected a number (int)"),
    ],
)
def test_a_wrong_setting_ends_the_process(given, environ, words, capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit) as ended:
        read_settings("Engine", given, environ)
    assert words in line_of(capsys, ended)


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0+cpu", "0.33", "0.33.1.dev3+g12"])
def test_a_known_version_goes_on(version: str) -> None:
    check_version("Engine", version, "0.26", "0.33")


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0rc1", "1.0", "", "dev"])
def test_an_unknown_version_ends_the_process(version: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check_version("Engine", version, "0.26", "0.33")
    assert "found, evenroute knows 0.26 to 0.33" in line_of(capsys, ended)


def test_the_start_placement_is_the_engines_map_or_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[0, 1, 2, 3, 0, 1]] * 2
    for found in (np.array(rows), torch.tensor(rows)):
        assert start_placement("Engine", found, 4, 2, 1).physical_to_logical.tolist() == rows
    with pytest.raises(SystemExit) as ended:
        start_placement("Engine", np.array([[0, 0, 1, 2, 3, 1]]), 4, 2, 1)
    line_of(capsys, ended)
