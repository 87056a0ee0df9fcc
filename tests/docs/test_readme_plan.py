"""The README's planning example gives exactly the output that stands beside it."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"


def test_two_speeds_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    block = next(text for text in blocks if "few.reason" in text)
    shown = re.search(r"# (weighted: .*)", block)
    assert shown is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, str(README), "exec"), {})
    assert printed.getvalue().strip() == shown[1].strip()
