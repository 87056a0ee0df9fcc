"""Balancedness lines that engines without a dump write to their log.

Source, read for the format only: vllm-project/vllm `distributed/eplb/eplb_state.py`: "EPLB step: %d for model %s:
avg_tokens=%.2f, max_tokens=%d, balancedness=%.4f[, steps until the next rearrangement: %d]"; DeepInfer logs the same
fields. avg_tokens and max_tokens are sums over layers, so balancedness is the total (sum of means / sum of maxes).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from evenroute.eplb._io import open_input
from evenroute.eplb.files.format import Format
from evenroute.eplb.loads.source import LoadSource

_LINE = re.compile(
    r"EPLB step:\s*(?P<step>\d+)(?:[^\n]*?model (?P<model>[^\s:,]+))?[^\n]*?avg_tokens=(?P<avg>[-+.\deE]+|nan|inf),?\s*"
    r"max_tokens=(?P<max>[-+.\deE]+|nan|inf),?\s*balancedness=(?P<bal>[-+.\deE]+|nan|inf)"
)
_STAMP = re.compile(r"\b(\d{2}-\d{2} \d{2}:\d{2}:\d{2})\b")
MARK = b"EPLB step:"


def read_log(path: Path) -> list[LoadSource]:
    """A time line of balancedness for each model; no loads. ValueError if no line of that form is in it."""
    entries: list[dict[str, Any]] = []
    damaged_lines = 0
    with open_input(path) as file:
        for raw in file:
            if MARK not in raw:
                continue
            entry = _entry(raw.decode("utf-8", errors="replace"))
            if entry is None:
                damaged_lines += 1
            else:
                entries.append(entry)
    if not entries:
        raise ValueError(f"{path}: no line 'EPLB step: ... avg_tokens=..., max_tokens=..., balancedness=...'")
    models = sorted({entry["model"] for entry in entries if entry["model"]}) or [""]
    if len(models) > 1 and not all(entry["model"] for entry in entries):
        models.append("")  # lines that name no model while others name several
    notes = [f"{damaged_lines} damaged EPLB lines were left out"] if damaged_lines else []
    return [
        LoadSource(
            path=path,
            kind="engine log",
            key=model if len(models) > 1 else "",
            num_layers=0,
            num_logical_experts=0,
            open_windows=lambda: iter(()),
            num_windows=0,
            model=model,
            notes=list(notes),
            time_line=[entry for entry in entries if len(models) == 1 or entry["model"] == model],
            has_loads=False,
        )
        for model in models
    ]


def _entry(line: str) -> dict[str, Any] | None:
    """One line's numbers; balancedness is None where there was no load, and the line None if it makes no sense."""
    match = _LINE.search(line)
    if not match:
        return None
    try:
        average, highest, balance = (float(match[name]) for name in ("avg", "max", "bal"))
    except ValueError:
        return None
    if not (0 <= average <= highest and 0 <= balance <= 1.0001):
        return None
    stamp = _STAMP.search(line)
    return {
        "step": int(match["step"]),
        "model": match["model"] or "",
        "stamp": stamp[1] if stamp else "",
        "avg_tokens": average,
        "max_tokens": highest,
        "balancedness": balance if highest > 0 else None,
    }


FORMAT = Format(
    "log",
    matches=lambda file: file.suffix in (".log", ".txt", ".out", ".err") or MARK in file.head,
    read=lambda path, _: read_log(path),
)
