"""What `advise`, `replay` and `convert` share: opening loads, and knowing the size of an expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from numpy.typing import NDArray

from evenroute.eplb.files import open as files
from evenroute.eplb.files.open import open_source
from evenroute.eplb.loads.source import LoadSource, PlacementMap
from evenroute.eplb.placement.models import MODEL_SHAPES, ModelShape
from evenroute.tools.pt_files import read_pt


def tell_unfinished(line: str) -> None:
    """One line on stderr for a dump that was never finished and is left out."""
    typer.echo(f"evenroute: note: {' '.join(line.split())}", err=True)


def open_loads(
    paths: Sequence[Path], *, num_experts: int | None = None, layout: str | None = None
) -> list[LoadSource]:
    """`evenroute.open_loads` with `.pt` files, and a note for each dump that is left out."""
    return files.open_loads(
        paths, num_experts=num_experts, layout=layout, read_pt=read_pt, on_unfinished=tell_unfinished
    )


def open_placement(path: Path) -> PlacementMap:
    """The placement in a file of any known form; ValueError if it holds none, or several."""
    source = open_source(path, read_pt=read_pt)
    if source.placement_map is None:
        raise ValueError(f"{path}: holds no placement but {source.kind}")
    return source.placement_map


def all_windows(sources: Sequence[LoadSource]) -> Iterator[NDArray[Any]]:
    """Counts ``[L, E]`` of all sources, one after the other."""
    for source in sources:
        for window in source.windows():
            yield window.counts


def known_model(name: str | None, source: LoadSource) -> tuple[ModelShape | None, bool]:
    """The model by name, else the one with as many experts, and whether that was only assumed."""
    if name is not None:
        if name not in MODEL_SHAPES:
            raise ValueError(f"--model {name!r}, expected one of {', '.join(MODEL_SHAPES)}")
        return MODEL_SHAPES[name], False
    if source.model in MODEL_SHAPES:
        return MODEL_SHAPES[source.model], False
    for shape in MODEL_SHAPES.values():
        if shape.num_logical_experts == source.num_logical_experts:
            return shape, True
    return None, False


@dataclass(frozen=True)
class ExpertSize:
    """Bytes of one expert's weights in one layer, and where the figure comes from; None = not known."""

    num_bytes: int | None
    origin: str


def expert_size(
    *,
    given: int | None,
    hidden: int | None,
    intermediate: int | None,
    weight_bytes: float,
    model: ModelShape | None,
    assumed: bool,
) -> ExpertSize:
    """Given, else gate, up and down projection: 3 x hidden x intermediate x bytes a weight."""
    if given is not None:
        return ExpertSize(given, "given")
    sizes = (hidden, intermediate)
    if None not in sizes:
        return ExpertSize(round(3 * sizes[0] * sizes[1] * weight_bytes), "given sizes")  # type: ignore[operator]
    if model is None:
        return ExpertSize(None, "not known: give --expert-bytes, or --hidden and --intermediate, or --model")
    wide = hidden or model.hidden_size
    high = intermediate or model.moe_intermediate_size
    origin = f"{model.name}'s sizes{' (assumed by its number of experts)' if assumed else ''}"
    return ExpertSize(round(3 * wide * high * weight_bytes), f"{origin}, {weight_bytes:g} bytes a weight")


def number_list(name: str, text: str) -> list[int]:
    """ "0,32,64" -> [0, 32, 64]; ValueError names the option."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} {text!r}: expected whole numbers separated by commas") from None
