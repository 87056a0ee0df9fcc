"""Small generators of other engines' files, after the formats stated in `evenroute.eplb.files`.

They are written independently of our own writers, so that a reader is never tested against its own mistakes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

TORCH_TO_CODE = {"int64": "I64", "int32": "I32", "float32": "F32"}


def random_counts(windows: int, layers: int, experts: int, seed: int = 0) -> np.ndarray:
    """int64 [W, L, E], skewed, no zero layer."""
    rng = np.random.default_rng(seed)
    popularity = rng.lognormal(0, 1, (layers, experts))
    return rng.poisson(popularity * 50 + 1, (windows, layers, experts)).astype(np.int64)


def random_map(layers: int, experts: int, slots: int, ranks: int, seed: int = 0) -> np.ndarray:
    """int32 [L, P]: every expert once, the rest spread, no expert twice on a rank."""
    rng = np.random.default_rng(seed)
    local = slots // ranks
    rows = []
    for _ in range(layers):
        while True:
            extra = rng.choice(experts, slots - experts, replace=False) if slots > experts else []
            row = rng.permutation(np.concatenate([np.arange(experts), extra]).astype(np.int32))
            if all(len(set(part)) == local for part in row.reshape(ranks, local).tolist()):
                rows.append(row)
                break
    return np.stack(rows).astype(np.int32)


def sglang_stat(path: Path, counts: np.ndarray, *, unused_steps: int = 0) -> Path:
    """torch.save of {rank, logical_count [steps, L, E], average_utilization_rate_over_window}."""
    import torch

    ring = np.concatenate([counts, np.zeros((unused_steps, *counts.shape[1:]), counts.dtype)])
    torch.save(
        {
            "rank": 0,
            "logical_count": torch.from_numpy(ring.astype(np.int32)),
            "average_utilization_rate_over_window": 0.5,
        },
        path,
    )
    return path


def sglang_per_pass(path: Path, rank: int, physical: np.ndarray, rows: np.ndarray) -> Path:
    """torch.save of one rank's records, physical [passes, L, P]."""
    import torch

    records = [
        {
            "forward_pass_id": index,
            "rank": rank,
            "gatherer_key": "primary",
            "global_physical_count": torch.from_numpy(counts.astype(np.int32)),
        }
        for index, counts in enumerate(physical)
    ]
    torch.save(
        {"records": records, "last_physical_to_logical_map": torch.from_numpy(rows.astype(np.int64))}, path
    )
    return path


def sglang_per_token(path: Path, rank: int, ids: list[np.ndarray], rows: np.ndarray) -> Path:
    """torch.save of one rank's records with the physical ids [L, T, K] of each pass."""
    import torch

    records = [
        {
            "forward_pass_id": index,
            "rank": rank,
            "gatherer_key": "primary",
            "input_ids": list(range(pass_ids.shape[1])),
            "positions": list(range(pass_ids.shape[1])),
            "extend_seq_lens": [pass_ids.shape[1]],
            "forward_mode": 1,
            "topk_ids_of_layer": torch.from_numpy(pass_ids.astype(np.int32)),
            "misc_objects": [],
        }
        for index, pass_ids in enumerate(ids)
    ]
    torch.save(
        {"records": records, "last_physical_to_logical_map": torch.from_numpy(rows.astype(np.int64))}, path
    )
    return path


def safetensors(path: Path, tensors: dict[str, np.ndarray], *, header: dict[str, Any] | None = None) -> Path:
    """The format written by hand: u64 header length, JSON, data."""
    entries: dict[str, Any] = {"__metadata__": {"made": "by hand"}}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        entries[name] = {
            "dtype": TORCH_TO_CODE[str(array.dtype)],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(entries if header is None else header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def trtllm_statistics(
    folder: Path, parts: np.ndarray, *, layers: list[int], first: int = 100, top_k: int = 8
) -> Path:
    """meta_info.json and rank<r>.safetensors of counts int64 [R, iterations, L, E]."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {"num_experts": int(parts.shape[-1]), "num_experts_per_token": top_k}
    (folder / "meta_info.json").write_text(json.dumps(meta))
    for rank, counts in enumerate(parts):
        tensors = {
            f"{first + index}_{layer}": window[row]
            for index, window in enumerate(counts)
            for row, layer in enumerate(layers)
        }
        safetensors(folder / f"rank{rank}.safetensors", tensors)
    return folder


def trtllm_yaml(path: Path, rows: np.ndarray, layers: list[int]) -> Path:
    """What TensorRT-LLM's generate_eplb_config writes."""
    import yaml

    config = {
        "num_slots": int(rows.shape[1]),
        "initial_global_assignments": dict(zip(layers, rows.tolist(), strict=True)),
        "layer_updates_per_iter": 0,
    }
    path.write_text(yaml.safe_dump(config, default_flow_style=None, width=100000))
    return path


def ascend_map(path: Path, rows: np.ndarray, ranks: int) -> Path:
    """vLLM-Ascend's expert map."""
    layers = []
    for index, row in enumerate(rows):
        devices = [
            {"device_id": rank, "device_expert": part.tolist()}
            for rank, part in enumerate(row.reshape(ranks, -1))
        ]
        layers.append({"layer_id": index, "device_count": ranks, "device_list": devices})
    path.write_text(json.dumps({"moe_layer_count": len(rows), "layer_list": layers}))
    return path


def megatron_trace(folder: Path, rank: int, steps: list[dict[int, np.ndarray]]) -> Path:
    """router_trace_rank<r>.jsonl; a step is {layer: ids [tokens, top_k]}."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"router_trace_rank{rank}.jsonl"
    with path.open("w") as file:
        for step, layers in enumerate(steps):
            for layer, ids in layers.items():
                record = {
                    "step": step,
                    "stage": "pre_dispatch",
                    "block": "decoder",
                    "layer": layer,
                    "rank": rank,
                    "num_tokens": len(ids),
                    "topk": ids.shape[1],
                    "top_indices": ids.tolist(),
                }
                file.write(json.dumps(record) + "\n")
    return path
