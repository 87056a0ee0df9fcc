"""A recording as the file that SGLang's recorder writes, so that what reads those reads these.

`stat`: {rank, logical_count [windows, L, E], average_utilization_rate_over_window}. `per_pass`, `per_token`: {records,
last_physical_to_logical_map}. Our counts and ids are those of logical experts, so the map written is the identity: a
reader decodes them exactly, also passes before a change of placement, for which SGLang's last map is wrong. L counts
all hidden layers, dense ones are rows of zeros, as in SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evenroute.dist.record.files import SUFFIX
from evenroute.dist.wire.control import Recorded
from evenroute.eplb.dump.reader import DumpReader

_EXTEND = 1  # SGLang's ForwardMode of a prefill: which one a pass was is not recorded


@dataclass(frozen=True)
class Layers:
    """All hidden layers of a model, and the numbers of those with experts."""

    num_hidden: int
    ids: tuple[int, ...]

    def spread(self, rows: NDArray[Any], fill: int = 0) -> NDArray[Any]:
        """``[MoE layers, ...]`` -> ``[hidden layers, ...]``."""
        whole = np.full((self.num_hidden, *rows.shape[1:]), fill, dtype=rows.dtype)
        whole[list(self.ids)] = rows
        return whole


def stat_object(parts: Sequence[Recorded], layers: Layers) -> dict[str, Any]:
    """The rebalancer's windows as a `stat` dump of rank 0. ValueError without a window."""
    windows = [
        layers.spread(
            np.frombuffer(window.counts, dtype="<i8").reshape(part.num_layers, part.num_logical_experts)
        )
        for part in parts
        for window in part.windows
    ]
    if not windows:
        raise ValueError("the recording holds no window yet")
    return {
        "rank": 0,
        "logical_count": torch.from_numpy(np.stack(windows)),
        "average_utilization_rate_over_window": None,
    }


def rank_records(path: str, rank: int, layers: Layers) -> dict[str, Any]:
    """One rank's own recording of passes as a `per_pass` or `per_token` dump."""
    records: list[dict[str, Any]] = []
    experts = 0
    first = Path(path)
    more = first.parent.glob(f"{first.name.removesuffix(SUFFIX)}.part*{SUFFIX}")
    for part in (first, *sorted(more, key=lambda found: int(found.name.split(".part")[1].split(".")[0]))):
        reader = DumpReader(part)
        experts = reader.header.num_logical_experts
        inputs = {frame.step: frame for frame in reader.tokens()}
        for window in reader.windows():
            assert window.first_step is not None
            record = {
                "forward_pass_id": window.first_step,
                "rank": rank,
                "gatherer_key": "primary",
                "global_physical_count": torch.from_numpy(layers.spread(window.counts).astype(np.int32)),
            }
            frame = inputs.get(window.first_step)
            if frame is not None:
                none = np.full(frame.ids.shape[1], -1, dtype=np.int32)
                tokens, positions = (
                    (none if found is None else found).tolist()
                    for found in (frame.token_ids, frame.positions)
                )
                record |= {
                    "topk_ids_of_layer": torch.from_numpy(layers.spread(frame.ids.astype(np.int32), -1)),
                    "input_ids": tokens,
                    "positions": positions,
                    "extend_seq_lens": None,
                    "forward_mode": _EXTEND,
                    "misc_objects": [],
                }
            records.append(record)
    if not records:
        raise ValueError("the recording holds no pass")
    identity = torch.arange(experts, dtype=torch.int64).repeat(layers.num_hidden, 1)
    return {"records": records, "last_physical_to_logical_map": identity}


def save(folder: str, content: dict[str, Any], *, rank: int | None) -> Path:
    """Write a dump under SGLang's name for it."""
    path = Path(folder) / f"expert_distribution_recorder_{time.time()}{'' if rank is None else f'_{rank}'}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)
    return path
