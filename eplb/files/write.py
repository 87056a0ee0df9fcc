"""Writes placements and loads in the forms that engines accept, with the row count each of them expects.

SGLang counts all hidden layers, dense ones included; TensorRT-LLM lists MoE layers under the model's index;
vLLM-Ascend lists MoE layers from 0; an evenroute placement has whatever rows its loads had.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import shown
from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.files.ascend import expert_map_json
from evenroute.eplb.files.trtllm import load_balancer_yaml, write_statistics
from evenroute.eplb.loads.source import LoadSource, PlacementMap, Window
from evenroute.eplb.placement.file import save_placement, write_beside_and_rename
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.set import update_placement_set

TARGETS = ("evenroute", "sglang", "trtllm", "vllm-ascend")


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
    known: PlacementMap, layers: ModelLayers, target: str, *, includes_dense: bool | None
) -> tuple[NDArray[np.int32], list[int]]:
    """The rows a target wants, ``[L', P]``, and the model's index of each."""
    rows = known.physical_to_logical
    ids = layers.ids(len(rows), known.layer_ids, includes_dense=includes_dense)
    dense = layers.num_dense or 0
    if target == "sglang":
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
    """Engines divide tokens evenly over replicas: uneven shares are dropped only when asked for."""
    uneven = known.placement is not None and known.placement.shares is not None
    if uneven and target != "evenroute" and not drop_shares:
        raise ValueError(
            f"the placement has uneven shares, which {target} cannot express: give --drop-shares"
        )


def placement_content(
    known: PlacementMap, target: str, layers: ModelLayers, *, ep_size: int | None, includes_dense: bool | None
) -> bytes:
    """The bytes of a placement file for an engine (not evenroute's own)."""
    rows, ids = place_rows(known, layers, target, includes_dense=includes_dense)
    if target == "sglang":
        return json.dumps({"physical_to_logical_map": rows.tolist()}).encode()
    if target == "trtllm":
        return load_balancer_yaml(rows, tuple(ids))
    ranks = ep_size or known.ep_size
    if ranks is None:
        raise ValueError("vllm-ascend lists slots by device: give --ep-size")
    if rows.shape[1] % ranks:
        raise ValueError(f"--ep-size {ranks} does not divide {rows.shape[1]} slots")
    return expert_map_json(rows, ranks)


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
    if target != "evenroute":
        content = placement_content(known, target, layers, ep_size=ep_size, includes_dense=includes_dense)
        write_beside_and_rename(path, content)
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
    if target == "vllm-ascend":
        raise ValueError("vllm-ascend reads placements, not loads: make one with `evenroute plan` first")
    if target == "evenroute":
        return _write_dump(path, source)
    if target == "trtllm":
        known = source.top_k or top_k
        if known is None:
            raise ValueError("TensorRT-LLM's meta_info.json states the experts a token: give --top-k")
        ids = source.layer_ids or tuple(range(source.num_layers))
        busy = _busy_rows(source)
        kept = tuple(ids[row] for row in busy)
        windows = (_take_rows(window, busy) for window in source.windows())
        return write_statistics(path, windows, layer_ids=kept, top_k=known)
    total, number = np.zeros(source.shape), 0
    for window in source.windows():
        total += window.counts
        number += 1
    rows: Any = (
        total.astype(np.int64)
        if total.max(initial=0) < 2**63 and np.array_equal(total, np.rint(total))
        else total
    )
    if source.layer_ids is not None:  # SGLang counts all hidden layers
        whole = np.zeros((max(source.layer_ids) + 1, total.shape[1]), dtype=rows.dtype)
        whole[list(source.layer_ids)] = rows
        rows = whole
    write_beside_and_rename(path, json.dumps({"logical_count": rows.tolist()}).encode())
    return number


def _busy_rows(source: LoadSource) -> list[int]:
    """Rows with load: TensorRT-LLM lists MoE layers only."""
    seen = np.zeros(source.num_layers, dtype=bool)
    for window in source.windows():
        seen |= window.counts.any(axis=1)
    if not seen.any():
        raise ValueError(f"{source.path}: no layer has load")
    return [int(row) for row in np.flatnonzero(seen)]


def _take_rows(window: Window, rows: list[int]) -> Window:
    return Window(window.counts[rows], window.time, window.first_step, window.last_step, window.tokens)


def _write_dump(path: Path, source: LoadSource) -> int:
    header = DumpHeader(
        num_layers=source.num_layers,
        num_logical_experts=source.num_logical_experts,
        scope=source.scope,
        rank=source.rank if source.scope == "rank" else None,
        ep_size=source.ep_size,
        num_nodes=source.num_nodes,
        num_slots=source.num_slots,
        num_groups=source.num_groups,
        top_k=source.top_k,
        model=source.model,
        phase=source.phase,
        layer_ids=None if source.layer_ids is None else list(source.layer_ids),
        notes=[f"converted from {source.kind} {shown(source.path.name)}"],
    )
    with DumpWriter(path, header, replaces_left=True) as writer:
        for event in source.placements:
            writer.add_placement(event)
        for window in source.windows():
            writer.add_window(window)
        return writer.num_windows
