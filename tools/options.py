"""Options that several commands have, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

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
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]
WeightBytes = Annotated[float, typer.Option(help="Bytes a weight (fp8 1, bf16 2).")]
ExpertBytes = Annotated[int | None, typer.Option(min=1, help="Bytes of one expert in one layer.")]
