"""vLLM-Ascend's expert map JSON.

Sources, read for the format only: vllm-project/vllm-ascend `eplb/adaptor/vllm_adaptor.py`
(`_export_tensor_to_file`, `_expert_file_to_tensor`): {"moe_layer_count": L, "layer_list": [{"layer_id": i,
"device_count": R, "device_list": [{"device_id": r, "device_expert": [expert, ...]}]}]}. `layer_id` counts MoE layers
from 0; every device lists its slots in order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from evenroute.eplb.files.format import EngineRows, Format
from evenroute.eplb.loads.decoding import check_map, reading
from evenroute.eplb.loads.source import LoadSource, PlacementMap


def source_from_object(path: Path, data: dict[str, Any]) -> LoadSource:
    """The placement of a decoded expert map."""
    with reading(path):
        missing = [key for key in ("layer_list", "moe_layer_count") if key not in data]
        if missing:
            raise ValueError(f"no {missing[0]}, expected an expert map with moe_layer_count and layer_list")
        layers, count = data["layer_list"], data["moe_layer_count"]
        if not isinstance(layers, list) or not isinstance(count, int) or len(layers) != count:
            raise ValueError(f"moe_layer_count={count!r}, but layer_list has {len(layers)} layers")
        rows = []
        device_counts = set()
        for index, layer in enumerate(layers):
            if layer.get("layer_id", index) != index:
                raise ValueError(f"layer_list[{index}] has layer_id {layer['layer_id']}, expected {index}")
            devices = layer["device_list"]
            stated = layer.get("device_count", len(devices))
            if stated != len(devices):
                raise ValueError(f"layer {index}: device_count={stated}, but {len(devices)} devices listed")
            ids = [device.get("device_id", place) for place, device in enumerate(devices)]
            if ids != list(range(len(devices))):
                raise ValueError(f"layer {index}: device_id {ids[:8]}, expected 0, 1, 2, ...")
            lengths = {len(device["device_expert"]) for device in devices}
            if len(lengths) != 1:
                raise ValueError(
                    f"layer {index}: devices list {sorted(lengths)} experts, expected one number"
                )
            device_counts.add(len(devices))
            rows.append([expert for device in devices for expert in device["device_expert"]])
        if len(device_counts) != 1 or len({len(row) for row in rows}) != 1:
            raise ValueError("layers differ in devices or slots")
        checked, num_experts = check_map(rows)
    ep_size = device_counts.pop()
    return LoadSource.of_map(path, "vLLM-Ascend expert map", PlacementMap(checked, num_experts, ep_size))


def placement_bytes(placement: EngineRows) -> bytes:
    """The JSON vLLM-Ascend reads (MoE layers only)."""
    rows, ep_size = placement.rows, placement.ep_size
    if ep_size is None:
        raise ValueError("vllm-ascend lists slots by device: give --ep-size")
    if rows.shape[1] % ep_size:
        raise ValueError(f"--ep-size {ep_size} does not divide {rows.shape[1]} slots")
    num_local = rows.shape[1] // ep_size
    layers = [
        {
            "layer_id": index,
            "device_count": ep_size,
            "device_list": [
                {"device_id": rank, "device_expert": row[rank * num_local : (rank + 1) * num_local]}
                for rank in range(ep_size)
            ],
        }
        for index, row in enumerate(rows.tolist())
    ]
    return json.dumps({"moe_layer_count": len(layers), "layer_list": layers}, indent=1).encode() + b"\n"


FORMAT = Format(
    "vllm-ascend",
    matches_object=lambda _, data: (
        isinstance(data, dict) and ("layer_list" in data or "moe_layer_count" in data)
    ),
    from_object=lambda path, data, _: source_from_object(path, data),
    placement_bytes=placement_bytes,
)
