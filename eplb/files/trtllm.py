"""TensorRT-LLM's files: statistics folders and load-balancer YAML.

Sources, read for the format only: NVIDIA/TensorRT-LLM `modules/fused_moe/.../expert_statistic.py`
(`ExpertStatistic._write`: `meta_info.json` {num_experts, num_experts_per_token} by rank 0,
`rank<r>.safetensors` with keys "<iteration>_<layer>", each int [num_experts]),
`examples/wide_ep/ep_load_balancer/utils.py` (`load_expert_statistic`: ranks are summed) and `llm_args.py`
(`MoeLoadBalancerConfig`: num_slots, initial_global_assignments {layer: [slots]}, layer_updates_per_iter; a strict
model, so no other key). Only MoE layers appear, under the model's own layer index.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._io import read_input, read_input_text, write_beside_and_rename
from evenroute.eplb.files.format import Format, Reading, one
from evenroute.eplb.files.safetensors import SafetensorsFile, write_safetensors
from evenroute.eplb.loads.decoding import check_counts, check_map, damaged, phase_of_name, reading
from evenroute.eplb.loads.source import LoadSource, LoadWindow, PlacementMap

META = "meta_info.json"
YAML_KEYS = {"num_slots", "initial_global_assignments", "layer_updates_per_iter"}


def read_statistics(folder: Path, errors: list[str] | None = None) -> LoadSource:
    """A folder of `meta_info.json` and `rank<r>.safetensors`; ranks are parts and are summed.

    Bad files get a line in `errors`, and the good ones are summed; ValueError if none is good.
    """
    meta_path = folder / META
    with reading(meta_path):
        meta = json.loads(read_input(meta_path))
        num_experts, top_k = int(meta["num_experts"]), int(meta["num_experts_per_token"])
    if num_experts < 1 or top_k < 1:
        raise ValueError(
            f"{meta_path}: num_experts={num_experts}, num_experts_per_token={top_k}, expected >= 1"
        )
    files, keys_of_rank = _rank_files(folder, num_experts, errors)
    layers = sorted({layer for keys in keys_of_rank.values() for _, layer in keys})
    iterations = sorted({iteration for keys in keys_of_rank.values() for iteration, _ in keys})
    if not layers:
        raise ValueError(f"{folder}: the rank files hold no counts")
    row_of_layer = {layer: row for row, layer in enumerate(layers)}
    expected = len(layers) * len(files)

    def open_windows() -> Iterator[LoadWindow]:
        for iteration in iterations:
            total = np.zeros((len(layers), num_experts), dtype=np.int64)
            found = 0
            for rank, file in files.items():
                for layer in layers:
                    if (iteration, layer) in keys_of_rank[rank]:
                        total[row_of_layer[layer]] += _counts(file, f"{iteration}_{layer}", num_experts)
                        found += 1
            tokens = int(total.sum()) // (top_k * len(layers))
            yield LoadWindow(
                total, first_step=iteration, last_step=iteration, tokens=tokens, complete=found == expected
            )

    notes = [f"the files of {len(files)} ranks are parts of the job's counts: summed"]
    missing = sorted(set(range(max(files) + 1)) - set(files))
    if missing:
        notes.append(f"no file of rank {', '.join(map(str, missing[:8]))}")
    return LoadSource(
        path=folder,
        kind="TensorRT-LLM statistics",
        num_layers=len(layers),
        num_logical_experts=num_experts,
        open_windows=open_windows,
        num_windows=len(iterations),
        ranks=tuple(sorted(files)),
        top_k=top_k,
        phase=phase_of_name(folder),
        layer_ids=tuple(layers),
        notes=notes,
    )


def _rank_files(
    folder: Path, num_experts: int, errors: list[str] | None
) -> tuple[dict[int, SafetensorsFile], dict[int, set[tuple[int, int]]]]:
    """The ranks' files, read once to their end, and their keys."""
    files: dict[int, SafetensorsFile] = {}
    keys_of_rank: dict[int, set[tuple[int, int]]] = {}
    seen = 0
    for path in sorted(folder.glob("rank*.safetensors")):
        match = re.fullmatch(r"rank(\d+)", path.stem)
        if not match:
            continue
        seen += 1
        rank = int(match.group(1))
        try:
            if rank in files:
                raise ValueError(f"{path}: of rank {rank}, as {files[rank].path.name}")
            file = SafetensorsFile(path)
            keys = _keys(file)
            for iteration, layer in keys:
                _counts(file, f"{iteration}_{layer}", num_experts)
        except (ValueError, OSError) as error:
            if errors is None:
                raise
            errors.append(f"{path}: {error.strerror or error}" if isinstance(error, OSError) else str(error))
        else:
            files[rank], keys_of_rank[rank] = file, keys
    if not files:
        what = (
            f"none of its {seen} rank files can be read" if seen else f"no rank<r>.safetensors beside {META}"
        )
        raise ValueError(f"{folder}: {what}")
    return files, keys_of_rank


def _keys(file: SafetensorsFile) -> set[tuple[int, int]]:
    keys = set()
    for name in file.keys():  # noqa: SIM118 - not a mapping
        match = re.fullmatch(r"(\d+)_(\d+)", name)
        if not match:
            raise ValueError(f"{file.path}: key {name!r}, expected <iteration>_<layer>")
        keys.add((int(match.group(1)), int(match.group(2))))
    return keys


def _counts(file: SafetensorsFile, name: str, num_experts: int) -> NDArray[np.int64]:
    values = file.read(name)
    if values.shape != (num_experts,):
        raise ValueError(f"{file.path}: {name} has shape {list(values.shape)}, expected [{num_experts}]")
    with reading(file.path):
        return np.asarray(check_counts(values[None], name)[0], dtype=np.int64)


def _whole(counts: NDArray[Any]) -> NDArray[np.int64]:
    return np.asarray(counts if counts.dtype.kind == "i" else np.rint(counts), dtype=np.int64)


def write_statistics(
    folder: Path, windows: Iterator[LoadWindow], *, layer_ids: tuple[int, ...], top_k: int
) -> int:
    """Write windows as one rank's statistics (whole counts in `rank0.safetensors`); returns the windows written."""
    tensors: dict[str, NDArray[Any]] = {}
    num_experts = number = 0
    for number, window in enumerate(windows, start=1):
        num_experts = window.counts.shape[1]
        iteration = window.first_step if window.first_step is not None else number - 1
        for row, layer in enumerate(layer_ids):
            tensors[f"{iteration}_{layer}"] = _whole(window.counts[row])
    if not number:
        raise ValueError(f"{folder}: no window to write")
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "rank0.safetensors", tensors)
    meta = {"num_experts": num_experts, "num_experts_per_token": top_k}
    write_beside_and_rename(folder / META, json.dumps(meta).encode())
    return number


def read_load_balancer(path: Path) -> LoadSource:
    """A load-balancer YAML; layers keep the model's index."""
    try:
        import yaml
    except ImportError:
        raise ValueError(f"{path}: reading YAML needs pyyaml: pip install 'evenroute[report]'") from None
    text = read_input_text(path)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        data = yaml.load(text, Loader=loader)
    except yaml.YAMLError as error:
        raise damaged(path, " ".join(str(error).split())) from None
    with reading(path):
        if not isinstance(data, dict) or "initial_global_assignments" not in data:
            found = sorted(map(str, data))[:8] if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"found {found}, expected the keys {sorted(YAML_KEYS)}")
        return _from_yaml(path, data)


def _from_yaml(path: Path, data: dict[str, Any]) -> LoadSource:
    table = data["initial_global_assignments"]
    if not isinstance(table, dict) or not table or not all(type(layer) is int for layer in table):
        raise ValueError("initial_global_assignments must map layer indices to lists of experts")
    layers = sorted(table)
    for layer in layers:  # references in YAML can make nests that unfold without end
        if not isinstance(table[layer], list) or not all(type(expert) is int for expert in table[layer]):
            raise ValueError(f"initial_global_assignments: layer {layer} must be a list of integers")
    lengths = sorted({len(table[layer]) for layer in layers})
    if lengths != [data.get("num_slots")]:
        raise ValueError(f"num_slots={data.get('num_slots')}, but the layers list {lengths} experts")
    rows, num_experts = check_map([table[layer] for layer in layers])
    extra = sorted(set(map(str, data)) - YAML_KEYS)
    ep_size = data.get("ep_size")
    notes = [f"TensorRT-LLM refuses this file: keys beside {sorted(YAML_KEYS)}: {extra}"]
    known = PlacementMap(rows, num_experts, ep_size if isinstance(ep_size, int) else None, tuple(layers))
    return LoadSource.of_map(path, "TensorRT-LLM load balancer", known, notes=notes if extra else [])


def load_balancer_yaml(rows: NDArray[np.int32], layer_ids: Sequence[int]) -> bytes:
    """The YAML TensorRT-LLM reads: ``rows [L, P]`` under their layer indices, nothing else."""
    lines = [f"num_slots: {rows.shape[1]}", "initial_global_assignments:"]
    for layer, row in zip(layer_ids, rows.tolist(), strict=True):
        lines.append(f"  {layer}: [{', '.join(map(str, row))}]")
    lines.append("layer_updates_per_iter: 0")
    return ("\n".join(lines) + "\n").encode()


def write_loads(path: Path, source: LoadSource, top_k: int | None) -> int:
    """A statistics folder; TensorRT-LLM lists MoE layers only, so layers without load are left out."""
    known = source.top_k or top_k
    if known is None:
        raise ValueError("TensorRT-LLM's meta_info.json states the experts a token: give --top-k")
    ids = source.layer_ids or tuple(range(source.num_layers))
    busy = _busy_rows(source)
    windows = (_take_rows(window, busy) for window in source.windows())
    return write_statistics(path, windows, layer_ids=tuple(ids[row] for row in busy), top_k=known)


def _busy_rows(source: LoadSource) -> list[int]:
    """EngineRows with load: TensorRT-LLM lists MoE layers only."""
    seen = np.zeros(source.num_layers, dtype=bool)
    for window in source.windows():
        seen |= window.counts.any(axis=1)
    if not seen.any():
        raise ValueError(f"{source.path}: no layer has load")
    return [int(row) for row in np.flatnonzero(seen)]


def _take_rows(window: LoadWindow, rows: list[int]) -> LoadWindow:
    return LoadWindow(window.counts[rows], window.time, window.first_step, window.last_step, window.tokens)


def _refuse_meta(path: Path, _: Any, __: Reading) -> LoadSource:
    raise ValueError(f"{path}: TensorRT-LLM's {META}: give the folder that holds it")


STATISTICS = Format(
    "trtllm",
    matches_folder=lambda names: META in names,
    read_folder=lambda path, given: read_statistics(path, given.errors),
    matches_object=lambda _, data: (
        isinstance(data, dict) and {"num_experts", "num_experts_per_token"} <= set(data)
    ),
    from_object=_refuse_meta,
    placement_bytes=lambda placement: load_balancer_yaml(placement.rows, placement.layer_ids),
    write_loads=write_loads,
)
LOAD_BALANCER = Format(
    "trtllm yaml", matches=lambda file: file.suffix in (".yaml", ".yml"), read=one(read_load_balancer)
)
