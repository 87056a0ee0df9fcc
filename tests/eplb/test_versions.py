"""Versions that are too old: pip is told them, and what is there all the same is refused by name."""

from __future__ import annotations

import tomllib
from importlib import metadata

import pytest

import evenroute
from evenroute.eplb._versions import LEAST
from evenroute.tools.run.launch import require_torch
from support.control_plane import ROOT


@pytest.mark.parametrize(
    ("name", "found", "wanted"), [("torch", "2.10.1+cpu", "2.11"), ("triton", "3.5.1", "3.6")]
)
def test_an_old_one_is_refused_by_name(
    name: str, found: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda asked: found if asked == name else real(asked))
    line = f"evenroute needs {name} {wanted} or newer, found {found}: pip install 'evenroute[rank]'"
    with pytest.raises(ImportError) as refused:
        evenroute.__getattr__("Router")
    assert str(refused.value) == line
    with pytest.raises(ValueError) as told:
        require_torch("stress")
    assert str(told.value) == line
    assert evenroute.__getattr__("plan_placement") is evenroute.plan_placement, "planning needs neither"


def test_pip_is_told_the_same() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("rank", "elastic"):
        for name, least in LEAST.items():
            needed = f"{name}>={'.'.join(map(str, least))}"
            assert any(line.split(";")[0] == needed for line in extras[extra]), (extra, needed)
