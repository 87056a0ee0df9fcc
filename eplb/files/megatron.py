"""Megatron's router traces: `router_trace_rank<r>.jsonl`, one JSON object per layer and step.

Source, read for the format only: NVIDIA/Megatron-LM `megatron/core/.../router_trace` (`RouterTracer`): {"step",
"stage", "block" ("decoder" | "mtp"), "layer", "rank", "num_tokens", "topk", "top_indices" [tokens][topk]}. Layers
count from the model's own first index; multi-token-prediction blocks are left out here (they repeat layer numbers).
The number of experts is not stated: the highest id + 1, unless given.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from evenroute.eplb._io import input_lines
from evenroute.eplb.files.format import Format
from evenroute.eplb.files.ranks import join_rank_sources
from evenroute.eplb.loads.decoding import beginning, damaged, is_text, phase_of_name, reading
from evenroute.eplb.loads.source import MOST_LAYERS, LoadSource, LoadWindow


class _Record(msgspec.Struct):
    step: Annotated[int, Meta(ge=0, lt=1 << 62)]
    layer: Annotated[int, Meta(ge=0, lt=MOST_LAYERS)]
    top_indices: list[list[int]]
    rank: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    block: str = "decoder"
    num_tokens: Annotated[int, Meta(ge=0)] | None = None

    def rows(self) -> list[list[int]]:
        """The tokens' experts: rows after `num_tokens` are padding, and so is -1 in a row.

        Raises:
            ValueError: a row names an expert twice, so it is no token's.
        """
        rows = [[expert for expert in row if expert != -1] for row in self.top_indices[: self.num_tokens]]
        for row in rows:
            if len(set(row)) != len(row):
                raise ValueError(
                    f"step {self.step} layer {self.layer}: a token names an expert twice: {row[:8]}"
                )
        return [row for row in rows if row]


_DECODER = msgspec.json.Decoder(_Record)


def _records(path: Path) -> Iterator[_Record]:
    for number, line in enumerate(input_lines(path), start=1):
        if number == 1:
            line = line.removeprefix(BOM_UTF8)
        if not line.strip():
            continue
        try:
            record = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if number == 1 and is_text(line[:4096]) and line.lstrip()[:1] != b"{":
                what = f"plain text that begins {beginning(line)}, expected a router trace (JSON lines)"
                raise ValueError(f"{path}: {what}") from None
            raise damaged(path, f"line {number}: {error}") from None
        if record.block != "mtp":
            yield record


class _Shape:
    """What one pass over a file finds: layers, experts, top-k and rank."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.layers: set[int] = set()
        self.highest = -1
        self.top_k = 0
        self.rank: int | None = None
        last = None
        for record in _records(path):
            if last is not None and record.step < last:
                raise ValueError(f"{path}: step {record.step} follows step {last}, expected rising steps")
            last = record.step
            self.layers.add(record.layer)
            with reading(path):
                rows = record.rows()
            self.rank = record.rank if self.rank is None else self.rank
            if record.rank != self.rank:
                raise ValueError(f"{path}: ranks {self.rank} and {record.rank} in one file")
            for row in rows:
                self.top_k = max(self.top_k, len(row))
                self.highest = max(self.highest, max(row, default=-1))
                if row and min(row) < 0:
                    raise ValueError(f"{path}: step {record.step} holds expert {min(row)}, expected >= 0")
        if self.rank is None:
            raise ValueError(f"{path}: no record of a decoder layer")


def _rank_source(shape: _Shape, layers: tuple[int, ...], num_experts: int) -> LoadSource:
    row_of_layer = {layer: row for row, layer in enumerate(layers)}

    def window(step: int, counts: NDArray[np.int64], tokens: int, seen: int) -> LoadWindow:
        complete = seen == len(layers)
        return LoadWindow(counts, first_step=step, last_step=step, tokens=tokens, complete=complete)

    def open_windows() -> Iterator[LoadWindow]:
        counts = np.zeros((len(layers), num_experts), dtype=np.int64)
        step, tokens, seen = None, 0, 0
        for record in _records(shape.path):
            if step is not None and record.step != step:
                yield window(step, counts, tokens, seen)
                counts, tokens, seen = np.zeros_like(counts), 0, 0
            step = record.step
            rows = record.rows()
            ids = [expert for row in rows for expert in row]
            counts[row_of_layer[record.layer]] += np.bincount(
                np.asarray(ids, dtype=np.int64), minlength=num_experts
            )
            tokens = max(tokens, len(rows))
            seen += 1
        if step is not None:
            yield window(step, counts, tokens, seen)

    return LoadSource(
        path=shape.path,
        kind="Megatron router trace",
        num_layers=len(layers),
        num_logical_experts=num_experts,
        open_windows=open_windows,
        scope="rank",
        rank=shape.rank,
        ranks=(shape.rank or 0,),
        top_k=shape.top_k,
        phase=phase_of_name(shape.path),
        layer_ids=layers,
    )


def read_traces(
    path: Path, *, num_logical_experts: int | None = None, errors: list[str] | None = None
) -> LoadSource:
    """One trace file, or a folder of `router_trace_rank<r>.jsonl` joined over ranks.

    A folder's bad files get a line in `errors`, and the good ones are joined; ValueError if none is good.
    """
    paths = sorted(path.glob("router_trace_rank*.jsonl")) if path.is_dir() else [path]
    shapes: list[_Shape] = []
    for file in paths:
        try:
            shapes.append(_Shape(file))
        except ValueError as error:
            if errors is None or len(paths) == 1:
                raise
            errors.append(str(error))
    if not shapes:
        raise ValueError(f"{path}: none of its {len(paths)} traces can be read")
    layers = tuple(sorted({layer for shape in shapes for layer in shape.layers}))
    highest = max(shape.highest for shape in shapes)
    num_experts = highest + 1 if num_logical_experts is None else num_logical_experts
    if highest >= num_experts:
        raise ValueError(f"{path}: holds expert {highest}, expected [0, {num_experts})")
    sources = [_rank_source(shape, layers, num_experts) for shape in shapes]
    if num_logical_experts is None:
        for source in sources:
            source.notes.append(
                f"the trace does not state its experts: {num_experts} = highest id + 1 (--num-experts overrides)"
            )
    return sources[0] if len(sources) == 1 else join_rank_sources(path, sources)


def is_trace_name(name: str) -> bool:
    """Whether a file name is one of Megatron's traces."""
    return re.fullmatch(r"router_trace_rank\d+\.jsonl", name) is not None


FORMAT = Format(
    "megatron",
    matches=lambda file: file.suffix == ".jsonl",
    read=lambda path, given: [read_traces(path, num_logical_experts=given.num_logical_experts)],
    matches_folder=lambda names: any(is_trace_name(name) for name in names),
    read_folder=lambda path, given: read_traces(
        path, num_logical_experts=given.num_logical_experts, errors=given.errors
    ),
)
