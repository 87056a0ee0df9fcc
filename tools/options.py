"""Options that several commands share."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Annotated, Any

import typer

from evenroute.eplb._checks import shown

Address = Annotated[str, typer.Argument(help="ipc://PATH or tcp://HOST:PORT of the rebalancer.")]
NumExperts = Annotated[int | None, typer.Option(min=1, help="Experts, where a file does not state them.")]
Layout = Annotated[
    str | None,
    typer.Option(
        metavar="AXES",
        help="Axes of plain arrays of three: windows,layers,experts; layers,windows,experts; "
        "or ranks,layers,experts (summed).",
    ),
]
Unfinished = Annotated[
    bool,
    typer.Option(
        "--unfinished",
        help="Also read dumps that a killed rank never finished, up to their last whole record.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]
WeightBytes = Annotated[float, typer.Option(help="Bytes a weight (fp8 1, bf16 2).")]
ExpertBytes = Annotated[int | None, typer.Option(min=1, help="Bytes of one expert in one layer.")]

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_interval(text: str) -> tuple[float, str]:
    """`60`, `1.5s`, `5m` or `2h` -> seconds, `4w` -> windows; ValueError naming --interval."""
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(ms|[smhdw]?)", text, re.ASCII)
    value = math.nan if found is None else float(found[1])
    if found is None or not math.isfinite(value):
        raise ValueError(
            f"--interval: {shown(text)} found, expected seconds (60), 30s, 5m, 2h or windows (4w)"
        )
    if found[2] == "w":
        return value, "windows"
    return value * _UNITS[found[2] or "s"], "seconds"


def setting(name: str, text: str, *flags: str) -> Any:
    """An option that stands for a settings key, `section.field`: its help shows the key's default and its section."""
    from evenroute.dist.config import SECTIONS

    section, _, field = name.partition(".")
    default = next(one.default for one in dataclasses.fields(SECTIONS[section]) if one.name == field)
    panel = {"rebalancer": "Process", "planner": "Planner", "security": "Security"}[section]
    told = f"{default:g}" if isinstance(default, float) else default
    return typer.Option(*flags, help=f"{text} Default: {told}." if told else text, rich_help_panel=panel)
