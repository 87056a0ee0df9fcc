"""Writes placements and loads in the forms that engines accept, with the row count each of them expects.

SGLang counts all hidden layers, dense ones included; TensorRT-LLM lists MoE layers under the model's index;
vLLM-Ascend lists MoE layers from 0; an evenroute placement has whatever rows its loads had.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import write_beside_and_rename
from evenroute.eplb.files.format import EngineRows, Format
from evenroute.eplb.files.formats import FORMATS
from evenroute.eplb.loads.source import LoadSource, PlacementMap
from evenroute.eplb.placement.file import save_placement, update_placement_set
from evenroute.eplb.placement.placement import Placement

FORMAT_OF = {made.name: made for made in FORMATS if made.placement_bytes or made.write_loads}
TARGETS = tuple(sorted(FORMAT_OF))


@dataclass(frozen=True)
class ModelLayers:
    """The model's layers: how many there are and how many of the first ones are dense; None = not given."""

    num_hidden: int | None = None
    num_dense: int | None = None

    def ids(self, num_rows: int, stated: tuple[int, ...] | None, *, includes_dense: bool | None) -> list[int]:
        """The model's index of each row.

        Args:
            stated: as the file says; wins.
            includes_dense: whether the file's form counts dense layers; None = it may or may not.
        """
        if stated is not None:
            return list(stated)
        dense = self.num_dense or 0
        if self.num_hidden is not None and num_rows not in (self.num_hidden, self.num_hidden - dense):
            raise ValueError(
                f"{num_rows} layers found, expected {self.num_hidden} (all hidden layers) or "
                f"{self.num_hidden - dense} (without the {dense} dense ones)"
            )
        if not dense:
            return list(range(num_rows))
        if self.num_hidden is None and includes_dense is None:
            raise ValueError(
                f"--dense-layers {dense}: do the {num_rows} rows count them? Give --num-hidden-layers"
            )
        counted = includes_dense if self.num_hidden is None else num_rows == self.num_hidden
        return list(range(num_rows)) if counted else list(range(dense, dense + num_rows))


def place_rows(
    known: PlacementMap, layers: ModelLayers, target: Format, *, includes_dense: bool | None
) -> tuple[NDArray[np.int32], list[int]]:
    """The rows a target wants, ``[L', P]``, and the model's index of each."""
    rows = known.physical_to_logical
    ids = layers.ids(len(rows), known.layer_ids, includes_dense=includes_dense)
    dense = layers.num_dense or 0
    if target.counts_dense:
        count = max(layers.num_hidden or 0, max(ids) + 1)
        plain = (np.arange(rows.shape[1]) % known.num_logical_experts).astype(np.int32)
        whole = np.tile(plain, (count, 1))  # dense layers: any valid row will do, nothing is routed there
        whole[ids] = rows
        return whole, list(range(count))
    kept = [place for place, layer in enumerate(ids) if layer >= dense]
    if not kept:
        raise ValueError(f"--dense-layers {dense} leaves none of the {len(rows)} layers")
    return rows[kept], [ids[place] for place in kept]


def even_or_refuse(known: PlacementMap, target: str, drop_shares: bool) -> None:
    """Engines divide tokens evenly over replicas: uneven shares, small batches' too, are dropped only on request."""
    made = known.placement
    uneven = made is not None and (made.shares is not None or made.classes is not None)
    if uneven and target != "evenroute" and not drop_shares:
        raise ValueError(
            f"the placement has uneven shares, which {target} cannot express: give --drop-shares"
        )


def write_placement(
    path: Path,
    known: PlacementMap,
    target: str,
    layers: ModelLayers,
    *,
    ep_size: int | None = None,
    num_nodes: int = 1,
    includes_dense: bool | None = None,
    drop_shares: bool = False,
    key: str | None = None,
) -> None:
    """Write a placement for ``target``, as a whole; ``key`` puts it into an evenroute placement set."""
    even_or_refuse(known, target, drop_shares)
    write = FORMAT_OF[target].placement_bytes
    if write is not None:
        rows, ids = place_rows(known, layers, FORMAT_OF[target], includes_dense=includes_dense)
        write_beside_and_rename(path, write(EngineRows(rows, ids, ep_size or known.ep_size)))
        return
    placement = own_placement(known, layers, ep_size, num_nodes, includes_dense)
    if key is None:
        save_placement(path, placement, model=known.model, phase=known.phase)
    else:
        update_placement_set(path, key, placement, model=known.model, phase=known.phase)


def own_placement(
    known: PlacementMap, layers: ModelLayers, ep_size: int | None, num_nodes: int, includes_dense: bool | None
) -> Placement:
    """The checked placement; dense rows go if they are named."""
    placement = known.to_placement(ep_size, num_nodes)
    if not layers.num_dense:
        return placement
    ids = layers.ids(placement.num_layers, known.layer_ids, includes_dense=includes_dense)
    kept = [placement.row(place) for place, layer in enumerate(ids) if layer >= layers.num_dense]
    return Placement.from_rows(kept, placement.num_logical_experts, placement.topology)


def write_loads(path: Path, source: LoadSource, target: str, *, top_k: int | None = None) -> int:
    """Write a history of loads for ``target``; returns the number of windows.

    evenroute: a dump. sglang: {"logical_count"} summed over windows, for `--init-expert-location`. trtllm: a folder.
    """
    write = FORMAT_OF[target].write_loads
    if write is None:
        raise ValueError(f"{target} reads placements, not loads: make one with `evenroute plan` first")
    return write(path, source, top_k)
