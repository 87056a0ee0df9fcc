"""What every test of wrong use asks of a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(words: str, call: Callable[[], Any]) -> None:
    """`call()` raises exactly a ValueError, in one line that holds each of the words (split at ` | `)."""
    with pytest.raises(ValueError) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is ValueError
    assert "\n" not in text
    assert len(text) < 400
    missing = [word for word in words.split(" | ") if word not in text]
    assert not missing, text
