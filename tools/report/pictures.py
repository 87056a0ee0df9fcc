"""Pictures of a history: the page of `--html` and the image of `--png`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import write_beside_and_rename
from evenroute.eplb.analysis.facts import derived_tokens, named_balancedness, placement_facts
from evenroute.eplb.analysis.history import History
from evenroute.eplb.analysis.inspection import InspectSettings, planned
from evenroute.eplb.loads.balance import Balancedness, RankLoadMap, balancedness
from evenroute.eplb.loads.skew import skew
from evenroute.tools.report.words import plural, visible


def page_data(histories: Sequence[History], settings: InspectSettings) -> dict[str, Any]:
    """The JSON the page draws: loads `[L, E]`, rank loads `[L, R]` before and after, points over time."""
    return {"sources": [_page_source(history, settings) for history in histories]}


def _rounded(values: NDArray[Any]) -> list[list[float]]:
    """Nested lists with four significant digits: what a heatmap and its tooltips need."""
    result: list[list[float]] = []
    for row in values:
        result.append([float(f"{value:.4g}") for value in row])  # noqa: PERF401
    return result


def _page_source(history: History, settings: InspectSettings) -> dict[str, Any]:
    source, using, balance = history.source, history.using, history.balancedness()
    assert using is not None and balance is not None and history.rank_total is not None  # noqa: PT018
    before = named_balancedness(balance, source) | {"ranks": _rounded(history.rank_total)}
    after = None
    if balance.has_load.any():
        placement, moves, reason = planned(history, settings)
        ranks = RankLoadMap.of(placement)(history.total)
        after = named_balancedness(balancedness(ranks), source) | {
            "ranks": _rounded(ranks),
            "num_slots": placement.num_slots,
            "moves": moves,
            "reason": reason,
        }
    uneven = skew(history.total).as_dict(source.layer_name)["max_over_mean"]
    names = filter(None, [source.model, source.phase, source.kind])
    return {
        "name": visible(source.path.name),
        "title": f"{visible(source.path.name)} ({', '.join(names)}; {plural(history.num_windows, 'window')})",
        "layers": [source.layer_name(row) for row in range(source.num_layers)],
        "has_load": balance.has_load.tolist(),
        "placement": using.origin,
        "before": before,
        "after": after,
        "experts": _rounded(history.total),
        "skew": None if uneven is None else uneven["mean"],
        "tokens": history.tokens if history.tokens is not None else derived_tokens(history),
        "points": [
            {"window": p.first, "num_windows": p.num_windows, "step": p.step, "mean": p.mean}
            for p in history.points
        ],
        "placements": [placement_facts(found) | {"window": found.first_window} for found in history.achieved],
    }


def history_html(path: Path, histories: Sequence[History], settings: InspectSettings) -> None:
    """Write the self-contained page."""
    from evenroute.tools.report.page import page

    write_beside_and_rename(path, page(page_data(histories, settings)).encode())


Panel = tuple[str, NDArray[np.float64], Balancedness]


def history_png(path: Path, histories: Sequence[History], settings: InspectSettings) -> None:
    """Write one image of the first history: heatmaps now and after a plan, balancedness per layer.

    Raises ValueError when matplotlib is not installed.
    """
    history = histories[0]
    balance = history.balancedness()
    assert balance is not None and history.rank_total is not None  # noqa: PT018
    panels = [("now", history.rank_total, balance)]
    title = f"{history.source.path.name}: {plural(history.num_windows, 'window')}"
    if balance.has_load.any():
        placement, moves, _ = planned(history, settings)
        ranks = RankLoadMap.of(placement)(history.total)
        panels.append((f"after a plan with {placement.num_slots} slots", ranks, balancedness(ranks)))
        title += f"; {moves:,} slots would move"
    names = [history.source.layer_name(row) for row in range(history.source.num_layers)]
    _draw(path, title, panels, names)


def _draw(path: Path, title: str, panels: Sequence[Panel], names: Sequence[int]) -> None:
    """Heatmaps side by side, balancedness per layer below."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--png needs matplotlib: pip install 'evenroute[report]'") from None
    figure = Figure(figsize=(12, 7.2), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, len(panels), height_ratios=[3, 1.2])
    figure.suptitle(visible(title), fontsize=11, parse_math=False)
    for column, (name, loads, found) in enumerate(panels):
        axis = figure.add_subplot(grid[0, column])
        image = _heat(axis, loads)
        mean = "no data" if found.mean is None else f"{found.mean:.4f}"
        axis.set_title(f"{name}: balancedness {mean}", fontsize=10)
        axis.set_xlabel("rank")
        axis.set_ylabel("layer")
    figure.colorbar(image, ax=figure.axes, label="log2(load / mean of its layer)", shrink=0.6)
    below = figure.add_subplot(grid[1, :])
    for name, _, found in panels:
        values = np.where(found.has_load, found.per_layer, np.nan)
        below.plot(names, values, marker=".", linewidth=1.2, label=name)
    below.set_ylim(0, 1.3)
    below.set_xlabel("layer")
    below.set_ylabel("balancedness")
    below.legend(loc="upper right", ncols=len(panels), fontsize=8)
    beside = path.with_name(f".{path.name}.partial")
    figure.savefig(beside, format="png")
    beside.replace(path)


def _heat(axis: Any, loads: NDArray[np.float64]) -> Any:
    means = loads.mean(axis=1, keepdims=True)
    relative = np.divide(loads, means, out=np.full_like(loads, np.nan), where=means > 0)
    values = np.clip(np.log2(np.maximum(relative, 2.0**-2)), -2, 2)
    return axis.imshow(values, aspect="auto", cmap="RdBu_r", vmin=-2, vmax=2, interpolation="nearest")
