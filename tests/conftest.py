"""Shared fixtures: the real loads beside the checkout; no extra threads; hypothesis without a stopwatch."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two cores, several processes: threads only get in each other's way

# Triton reads this at its first import, wherever that happens: without a GPU its kernels are interpreted.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings

# How long a case takes is the machine's load and first-use compilation, not a property.
settings.register_profile("evenroute", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("evenroute")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Suites for a GPU are sized for one: interpreted they would take hours."""
    if Path("/dev/nvidia0").exists():
        return
    for item in items:
        if item.get_closest_marker("gpu") or item.get_closest_marker("multigpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real DeepSeek loads; tests that need it are skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(f"real loads not here: {SHARED_DATA}")
    return SHARED_DATA
