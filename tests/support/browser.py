"""Headless Chromium on local pages; tests that need it skip where it is absent."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def chromium(page: Path, *arguments: str) -> str:
    """Run on ``page`` with its own profile; stdout."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", *arguments, page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def rendered(page: Path, *, width: int = 1366, height: int = 768) -> str:
    """The page's DOM after its scripts have run."""
    return chromium(page, f"--window-size={width},{height}", "--dump-dom")


def screenshot(page: Path, target: Path, *, width: int = 1366, height: int = 768) -> Path:
    """A picture of the first screen."""
    chromium(page, f"--window-size={width},{height}", f"--screenshot={target}")
    return target
