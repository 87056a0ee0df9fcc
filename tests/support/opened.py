"""What tests of readers ask of an opened file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenroute.eplb.files.open import open_source
from evenroute.eplb.loads.source import LoadSource


def windows(source: LoadSource) -> np.ndarray:
    """All windows stacked; reading twice must give the same."""
    first = np.stack([window.counts for window in source.windows()])
    assert np.array_equal(first, np.stack([window.counts for window in source.windows()]))
    return first


def refused(path: Path, *parts: str, **options: Any) -> None:
    """The path cannot be opened and read, and one line says why."""
    with pytest.raises((ValueError, OSError)) as caught:
        for _ in open_source(path, **options).windows():
            pass
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text
