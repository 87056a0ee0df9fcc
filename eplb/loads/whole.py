"""Loads that commands judge are the whole job's: parts of ranks are refused, files of other layers are joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.loads.source import LoadSource, LoadWindow

_REMEDY = "give one file of the whole job, or the ranks' parts stacked in one array and --layout ranks,layers,experts"


def join_layers(sources: Sequence[LoadSource]) -> list[LoadSource]:
    """Sources of one shape; files of different layers (pipeline stages) become one source with all of them.

    Raises:
        ValueError: shapes differ, or layers that overlap or have other windows, named with the files.
    """
    layers = [source.layer_ids for source in sources]
    if len(set(layers)) < 2 or None in layers:
        first = sources[0]
        for source in sources:
            if source.shape != first.shape or source.layer_ids != first.layer_ids:
                raise ValueError(
                    f"{source.path}: {list(source.shape)} (layers, experts), {first.path} has {list(first.shape)}"
                    + ("" if source.shape != first.shape else " of other layers")
                )
        return list(sources)
    flat = [layer for ids in layers if ids is not None for layer in ids]
    names = ", ".join(source.path.name for source in sources[:4])
    if len(set(flat)) < len(flat):
        raise ValueError(f"{names}: layers overlap, expected files of the same layers or of quite other ones")
    if len({source.num_logical_experts for source in sources}) > 1:
        raise ValueError(f"{names}: numbers of experts differ between layers")
    order = np.argsort(flat, kind="stable")

    def open_windows() -> Iterator[LoadWindow]:
        try:
            for parts in zip(*(source.windows() for source in sources), strict=True):
                counts = np.concatenate([part.counts for part in parts])[order]
                yield replace(parts[0], counts=counts, complete=all(part.complete for part in parts))
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            raise ValueError(
                f"{names}: numbers of windows differ between files of different layers"
            ) from None

    first = sources[0]
    joined = replace(
        first,
        num_layers=len(flat),
        layer_ids=tuple(flat[place] for place in order),
        open_windows=open_windows,
        placements=[],
        placement_map=None,
        notes=[*first.notes, f"layers of {len(sources)} files were put together"],
    )
    return [joined]


def require_whole(sources: Sequence[LoadSource], ep_size: int) -> list[LoadSource]:
    """The sources, unless one holds load only where one rank's experts lie.

    Raises:
        ValueError: it does; the line names the file, the experts and the rank.
    """
    for source in sources:
        ours = source.kind.startswith("evenroute")  # states whose counts it holds
        if ours or ep_size < 2 or source.num_logical_experts % ep_size:
            continue
        per_rank = source.num_logical_experts // ep_size
        held = np.zeros(source.num_logical_experts, dtype=bool)
        for window in source.windows():
            held |= window.counts.any(axis=0)
        used: NDArray[np.int64] = np.flatnonzero(held)
        if per_rank > 1 and len(used) and used[0] // per_rank == used[-1] // per_rank:
            rank = int(used[0]) // per_rank
            raise ValueError(
                f"{source.path}: load only in experts {rank * per_rank} .. {(rank + 1) * per_rank - 1} of "
                f"{len(held)}, which looks like the part of rank {rank} of {ep_size}; {_REMEDY}"
            )
    return list(sources)
