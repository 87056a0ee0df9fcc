"""Steps of deploy/README.md that need no cluster, run as they are written there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from support.command import evenroute
from support.command_lines import commands_in_line, shell_lines
from support.deploy_files import DEPLOY
from support.sglang_stand_in import init_expert_location

LAYERS, EXPERTS, SLOTS, RANKS = 58, 256, 288, 16


def section(number: int) -> list[list[str]]:
    """The commands of a numbered section, without their program."""
    text = re.split(r"^## ", (DEPLOY / "README.md").read_text(), flags=re.MULTILINE)
    [part] = [part for part in text if part.startswith(f"{number}. ")]
    return [
        argv[1:] for line in shell_lines(part) for argv in commands_in_line(line) if argv[0] == "evenroute"
    ]


def test_keys_are_made_for_every_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [keygen] = section(1)
    assert evenroute(*keygen).status == 0
    made = {path.name for path in (tmp_path / "keys").iterdir()}
    named = set(re.findall(r"`(\w+\.toml)`", (DEPLOY / "README.md").read_text().split("## 2.")[0]))
    assert made == named
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "keys").iterdir())
    again = evenroute(*keygen)
    assert again.status == 2, "keys are never overwritten"


def test_a_placement_goes_from_loads_to_an_engines_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loads = np.random.default_rng(2).zipf(1.7, (LAYERS, EXPERTS)).clip(max=9000)
    (tmp_path / "loads.json").write_text(json.dumps({"logical_count": loads.tolist()}))
    commands = [words for words in section(7) if words[0] in ("plan", "convert")]
    assert [words[0] for words in commands] == ["plan", "convert"]
    for words in commands:
        outcome = evenroute(*words)
        assert outcome.status == 0, outcome.err
    init_expert_location(
        tmp_path / "location.json",
        ep_size=RANKS,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        redundant=SLOTS - EXPERTS,
    )
