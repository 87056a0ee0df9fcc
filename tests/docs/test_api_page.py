"""docs/api.md is what the docstrings say, and they say what a caller needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import evenroute
from support.deploy_files import ROOT

SCRIPT = ROOT / "docs/make_api.py"


def test_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout


def test_a_stale_page_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    copy.mkdir()
    (copy / "make_api.py").write_text(SCRIPT.read_text())
    (copy / "api.md").write_text((ROOT / "docs/api.md").read_text().replace("API reference", "API", 1))
    for package in ("evenroute", "eplb", "routing", "dist", "tools"):
        (tmp_path / package).symlink_to(ROOT / package)
    command = [sys.executable, str(copy / "make_api.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 1
    assert "docs/api.md:1: found '# API'" in done.stdout


def test_every_public_name_is_documented() -> None:
    page = (ROOT / "docs/api.md").read_text()
    for name in evenroute.__all__:
        if name != "__version__":
            assert f"id='{name.lower()}'" in page
            assert getattr(evenroute, name).__doc__, f"{name} has no docstring"
