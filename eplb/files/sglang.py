"""SGLang's files: recorder dumps in all modes and `--init-expert-location`.

Sources, read for the format only: sgl-project/sglang `python/sglang/srt/eplb/expert_distribution.py`
(`_StatAccumulator.dump`, `_DetailAccumulator.dump`, the gatherers' `collect`) and `expert_location.py`
(`compute_initial_expert_location_metadata`: a `.pt` or JSON object, passed on as keyword arguments, so any key
beside `physical_to_logical_map` is an error there).

- `stat`, `stat_approx`: one file of rank 0, counts already summed over ranks:
  {rank, logical_count [steps, L, E], average_utilization_rate_over_window}. Unused steps of its ring are zeros.
- `per_pass`: a file per rank: {records: [{forward_pass_id, rank, gatherer_key, global_physical_count [L, P]}],
  last_physical_to_logical_map [L, P]}.
- `per_token`: the same, records also hold topk_ids_of_layer [L, T, K] (physical ids, -1 = padding), input_ids,
  positions, extend_seq_lens, forward_mode, misc_objects.

All hidden layers are counted: dense ones are rows of zeros. Objects come here as plain Python with numpy arrays;
who reads the `.pt` must do so without executing pickles (`evenroute.tools.inputs`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_path
from evenroute.eplb._io import read_input, write_beside_and_rename
from evenroute.eplb.files.format import EngineRows, Format
from evenroute.eplb.loads.balance import validate_loads
from evenroute.eplb.loads.decoding import check_counts, check_map, phase_of_name, reading
from evenroute.eplb.loads.source import Counts, LoadSource, LoadWindow, PlacementMap
from evenroute.eplb.loads.total import CountTotal


def source_from_object(path: Path, data: Any, num_logical_experts: int | None = None) -> LoadSource:
    """What an SGLang `.pt` or JSON object holds; ValueError with the keys found if it is neither."""
    with reading(path):
        if isinstance(data, dict) and "logical_count" in data:
            return _from_logical_count(path, data)
        if isinstance(data, dict) and "physical_to_logical_map" in data:
            return _from_map(path, data, num_logical_experts)
        if isinstance(data, dict) and "records" in data:
            return _from_records(path, data, num_logical_experts)
    found = sorted(map(str, data))[:8] if isinstance(data, dict) else type(data).__name__
    raise ValueError(
        f"{path}: found {found}, expected the key logical_count, physical_to_logical_map or records"
    )


def _from_logical_count(path: Path, data: dict[str, Any]) -> LoadSource:
    stack = np.asarray(data["logical_count"])
    layout = data.get("logical_count_layout")
    if layout is not None:
        stack = _ordered(stack, layout)
    if stack.ndim not in (2, 3) or 0 in stack.shape or stack.dtype.kind not in "iuf":
        raise ValueError(
            f"logical_count must be numbers [L, E] or [steps, L, E], "
            f"found shape {list(stack.shape)} of {stack.dtype}"
        )
    steps = stack[None] if stack.ndim == 2 else stack
    if steps.dtype.kind == "f":
        for index, step in enumerate(steps):
            check_counts(step, f"step {index}")

    def open_windows() -> Iterator[LoadWindow]:
        for index in range(steps.shape[0]):
            with reading(path):
                counts = check_counts(steps[index], f"step {index}")
            if counts.any() or steps.shape[0] == 1:
                number = index if stack.ndim == 3 else None
                yield LoadWindow(counts, first_step=number, last_step=number)

    notes = []
    empty = sum(1 for step in steps if not step.any())
    if empty and len(steps) > 1:
        notes.append(f"{empty} of {len(steps)} steps of the recorder's ring were never used: left out")
    rate = data.get("average_utilization_rate_over_window")
    if isinstance(rate, float):
        notes.append(f"the engine's own average utilisation rate: {rate:.4f}")
    return LoadSource(
        path=path,
        kind="SGLang stat dump" if "rank" in data else "logical_count",
        num_layers=steps.shape[1],
        num_logical_experts=steps.shape[2],
        open_windows=open_windows,
        num_windows=max(len(steps) - empty, 1),
        phase=phase_of_name(path),
        notes=notes,
    )


def _ordered(stack: NDArray[Any], layout: Any) -> NDArray[Any]:
    """``[L, E]`` or ``[steps, L, E]`` of counts in a stated layout."""
    if layout == "rank_layer_expert" and stack.ndim == 3:
        return np.asarray(stack.sum(axis=0))
    if (layout, stack.ndim) in (("layer_expert", 2), ("step_layer_expert", 3)):
        return stack
    raise ValueError(
        f"logical_count_layout {layout!r} of shape {list(stack.shape)}, expected layer_expert, step_layer_expert or "
        "rank_layer_expert"
    )


def _from_map(path: Path, data: dict[str, Any], num_logical_experts: int | None) -> LoadSource:
    extra = sorted(set(map(str, data)) - {"physical_to_logical_map"})
    rows, num_experts = check_map(data["physical_to_logical_map"], num_logical_experts)
    if "logical_to_physical_map" in data:
        _check_inverse(rows, data["logical_to_physical_map"])
    notes = [f"SGLang refuses this file: it allows no key beside physical_to_logical_map, found {extra}"]
    known = PlacementMap(rows, num_experts)
    return LoadSource.of_map(path, "SGLang expert location", known, notes=notes if extra else [])


def _check_inverse(rows: NDArray[np.int32], inverse: Any) -> None:
    """ValueError where ``logical_to_physical_map [L, E, X]`` (-1 padded) names other slots than the map."""
    for layer, (row, experts) in enumerate(zip(rows.tolist(), inverse, strict=False)):
        for expert, slots in enumerate(experts):
            stated = sorted(int(slot) for slot in np.atleast_1d(slots) if int(slot) >= 0)
            held = [slot for slot, holds in enumerate(row) if holds == expert]
            if stated != held:
                raise ValueError(
                    f"logical_to_physical_map: layer {layer} expert {expert} has slots {stated[:8]}, "
                    f"physical_to_logical_map says {held[:8]}"
                )


def _physical_counts(record: dict[str, Any], num_layers: int, num_slots: int) -> NDArray[np.int64]:
    """``[L, P]`` of one record: as recorded, else counted from the tokens' ids."""
    if "global_physical_count" in record:
        counts = check_counts(record["global_physical_count"], "global_physical_count").astype(np.int64)
        if counts.shape != (num_layers, num_slots):
            raise ValueError(
                f"global_physical_count is {list(counts.shape)}, expected {[num_layers, num_slots]}"
            )
        return counts
    ids = np.asarray(record["topk_ids_of_layer"])
    if ids.ndim != 3 or ids.dtype.kind not in "iu" or ids.shape[0] != num_layers:
        raise ValueError(f"topk_ids_of_layer is {list(ids.shape)}, expected [{num_layers}, tokens, top_k]")
    flat = ids.reshape(num_layers, -1).astype(np.int64)
    if flat.size and (flat.min() < -1 or flat.max() >= num_slots):
        raise ValueError(f"topk_ids_of_layer holds {flat.min()} .. {flat.max()}, expected [-1, {num_slots})")
    keys = (flat + np.arange(num_layers)[:, None] * num_slots)[flat >= 0]
    return np.bincount(keys, minlength=num_layers * num_slots).reshape(num_layers, num_slots)


def to_logical(physical: NDArray[np.int64], rows: NDArray[np.int32], num_experts: int) -> NDArray[np.int64]:
    """Slot counts ``[L, P]`` summed over replicas: ``[L, E]``."""
    keys = (rows + np.arange(len(rows), dtype=np.int64)[:, None] * num_experts).ravel()
    sums = np.zeros(len(rows) * num_experts, np.int64)
    np.add.at(sums, keys, physical.ravel())
    return sums.reshape(len(rows), num_experts)


def _from_records(path: Path, data: dict[str, Any], num_logical_experts: int | None) -> LoadSource:
    records = data["records"]
    rows, num_experts = check_map(data["last_physical_to_logical_map"], num_logical_experts)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError("records must be a list of objects")
    if not records:
        raise ValueError("records is empty: nothing was recorded")
    ranks = {int(record["rank"]) for record in records}
    if len(ranks) != 1:
        raise ValueError(f"records of ranks {sorted(ranks)[:8]} in one file, expected one rank")
    per_token = "topk_ids_of_layer" in records[0]
    top_k = int(np.asarray(records[0]["topk_ids_of_layer"]).shape[2]) if per_token else None
    order = sorted(range(len(records)), key=lambda i: int(records[i]["forward_pass_id"]))

    def open_windows() -> Iterator[LoadWindow]:
        for index in order:
            record = records[index]
            with reading(path):
                counts: Counts = to_logical(_physical_counts(record, *rows.shape), rows, num_experts)
                step = int(record["forward_pass_id"])
                tokens = len(record["input_ids"]) if "input_ids" in record else None
            yield LoadWindow(counts, first_step=step, last_step=step, tokens=tokens)

    rank = ranks.pop()
    return LoadSource(
        path=path,
        kind=f"SGLang {'per_token' if per_token else 'per_pass'} dump",
        num_layers=len(rows),
        num_logical_experts=num_experts,
        open_windows=open_windows,
        num_windows=len(records),
        scope="rank",
        rank=rank,
        ranks=(rank,),
        num_slots=rows.shape[1],
        top_k=top_k,
        phase=phase_of_name(path),
        placement_map=PlacementMap(rows, num_experts),
        notes=["decoded with the last placement of the dump: wrong for passes before a change of placement"],
    )


class _LogicalCount(msgspec.Struct):
    logical_count: list[list[float]]


def read_logical_count(path: str | PathLike[str]) -> NDArray[np.float64]:
    """Loads ``[L, E]`` of a ``{"logical_count": [[...]]}`` file; dense layers stay as rows of zeros.

    Raises:
        OSError: the file cannot be read.
        ValueError: one line that names the file, what was found and what was expected.
    """
    path = as_path("path", path)
    data = read_input(path)
    try:
        rows = msgspec.json.decode(data, type=_LogicalCount).logical_count
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a logical_count file: {error}") from None
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise ValueError(
            f"{path}: logical_count rows must have one length, found {sorted(lengths) or 'no rows'}"
        )
    try:
        return validate_loads(rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _write_loads(path: Path, source: LoadSource, _: int | None) -> int:
    """``{"logical_count": [[...]]}`` summed over windows, for `--init-expert-location`; all hidden layers."""
    sums, number = CountTotal(source.shape), 0
    for window in source.windows():
        sums.add(window.counts)
        number += 1
    total: Any = sums.counts
    whole_numbers = total.max(initial=0) < 2**63 and np.array_equal(total, np.rint(total))
    rows: Any = total.astype(np.int64) if whole_numbers else total
    if source.layer_ids is not None:
        whole = np.zeros((max(source.layer_ids) + 1, total.shape[1]), dtype=rows.dtype)
        whole[list(source.layer_ids)] = rows
        rows = whole
    write_beside_and_rename(path, json.dumps({"logical_count": rows.tolist()}).encode())
    return number


def _placement_bytes(placement: EngineRows) -> bytes:
    return json.dumps({"physical_to_logical_map": placement.rows.tolist()}).encode()


FORMAT = Format(
    "sglang",
    matches_object=lambda _, data: (
        True
    ),  # the last one asked: it names the keys that would have made it known
    from_object=lambda path, data, given: source_from_object(path, data, given.num_logical_experts),
    counts_dense=True,
    placement_bytes=_placement_bytes,
    write_loads=_write_loads,
)
