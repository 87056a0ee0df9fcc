"""The page of `evenroute inspect --html`: one file, no network, heatmaps drawn on canvas.

`page.html` is the page without its data, which is one JSON object in `<script id="data">` (see
`evenroute.tools.report.pictures.page_data`).
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def page(data: dict[str, Any]) -> str:
    """The whole page for ``data``."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # "</script>" inside a string would end the element; JSON may write any character as \\u.
    text = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    empty = files("evenroute.tools.report").joinpath("page.html").read_text(encoding="utf-8")
    return empty.replace("@DATA@", text)
