"""What a notebook shows: heat maps as inline SVG (no script, readable on light and dark pages) and DataFrames."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_ROWS, MOST_COLUMNS = 64, 128
CELL, LABELS = 7, 40  # pixels
HUE = "#1f77b4"


def heat_map(
    values: NDArray[np.float64], title: str, rows: str, columns: str, row_names: Sequence[int | str] = ()
) -> str:
    """``values [rows, columns]`` as squares, darker for larger, with the largest figure in the title.

    More than 64 x 128 squares are drawn as the largest of neighbours.
    """
    if not values.size:
        return f"<div>{html.escape(title)}: no data</div>"
    high, step_down, step_right = float(values.max()), *_steps(values.shape)
    drawn = _largest_of_blocks(values, step_down, step_right)
    names = list(row_names) or list(range(len(values)))
    width, height = LABELS + CELL * drawn.shape[1], CELL * len(drawn)
    squares = "".join(
        f'<rect x="{LABELS + CELL * x}" y="{CELL * y}" width="{CELL}" height="{CELL}" '
        f'fill-opacity="{max(0.04, value / high if high > 0 else 0):.2f}"/>'
        for y, line in enumerate(drawn.tolist())
        for x, value in enumerate(line)
    )
    every = max(1, len(drawn) // 8)
    labels = "".join(
        f'<text x="{LABELS - 4}" y="{CELL * (y + 1)}" text-anchor="end">{names[y * step_down]}</text>'
        for y in range(0, len(drawn), every)
    )
    joined = (
        "" if step_down == step_right == 1 else f"; a square is the largest of {step_down} x {step_right}"
    )
    caption = html.escape(f"{title}: {rows} down, {columns} across, largest {high:.4g}{joined}")
    return (
        f'<figure style="margin:4px 0"><figcaption>{caption}</figcaption>'
        f'<svg role="img" aria-label="{caption}" width="{width}" height="{height}">'
        f'<g fill="{HUE}">{squares}</g><g fill="currentColor" font-size="8">{labels}</g></svg></figure>'
    )


def page(line: str, *parts: str) -> str:
    """A repr's line as text, and what follows it."""
    return f"<div><code>{html.escape(line)}</code>{''.join(parts)}</div>"


def plan_page(line: str, reason: str, before: NDArray[np.float64], predicted: NDArray[np.float64]) -> str:
    """A plan's repr and reason, then the balancedness ``[L]`` of its layers before and as predicted."""
    names = ("before", "predicted")
    drawn = heat_map(np.stack([before, predicted]), "balancedness", "before and predicted", "layers", names)
    return page(line, f"<div>{html.escape(reason)}</div>", drawn)


def _steps(shape: tuple[int, ...]) -> tuple[int, int]:
    return -(-shape[0] // MOST_ROWS), -(-shape[1] // MOST_COLUMNS)


def _largest_of_blocks(values: NDArray[np.float64], down: int, right: int) -> NDArray[np.float64]:
    rows, columns = values.shape
    padded = np.pad(values, ((0, -rows % down), (0, -columns % right)))
    return np.asarray(padded.reshape(-(-rows // down), down, -(-columns // right), right).max(axis=(1, 3)))


def data_frame(index: str = "", **columns: Any) -> Any:
    """A pandas DataFrame of these columns; its index is named ``index``.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError:
        raise ImportError("to_dataframe needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(columns).rename_axis(index or None)


def slot_frame(rows: NDArray[np.int32], shares: NDArray[np.float64], num_local_slots: int) -> Any:
    """A row for each slot of a placement ``[L, P]``, with its share as a part of 1; ImportError without pandas."""
    layers, slots = rows.shape
    return data_frame(
        layer=np.repeat(np.arange(layers), slots),
        rank=np.tile(np.arange(slots) // num_local_slots, layers),
        slot=np.tile(np.arange(slots), layers),
        expert=rows.ravel(),
        share=shares.ravel(),
    )
