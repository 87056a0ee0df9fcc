"""Mutated files of every form: the answer is counts or one line, never another exception, never a hang."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.files.open import open_sources
from evenroute.eplb.loads.source import LoadSource, LoadWindow, PlacementEvent
from evenroute.eplb.placement.file import save_placement, update_placement_set
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from support.foreign_files import (
    ascend_map,
    megatron_trace,
    random_counts,
    random_map,
    safetensors,
    trtllm_statistics,
    trtllm_yaml,
)

COUNTS = random_counts(3, 3, 8)
ROWS = random_map(3, 8, 12, 4)


def npy(folder: Path) -> Path:
    np.save(folder / "a.npy", COUNTS)
    return folder / "a.npy"


def npz(folder: Path) -> Path:
    np.savez(folder / "a.npz", a=COUNTS[0], b=COUNTS[1])
    return folder / "a.npz"


def csv(folder: Path) -> Path:
    (folder / "a.csv").write_text("\n".join(",".join(map(str, row)) for row in COUNTS[0].tolist()))
    return folder / "a.csv"


def logical_count(folder: Path) -> Path:
    (folder / "a.json").write_text(f'{{"logical_count": {COUNTS.tolist()}}}')
    return folder / "a.json"


def tensors(folder: Path) -> Path:
    return safetensors(folder / "a.safetensors", {"a": COUNTS[0], "b": COUNTS[1]})


def dump(folder: Path) -> Path:
    header = DumpHeader(num_layers=3, num_logical_experts=8, mode="per_token")
    with DumpWriter(folder / "a.evd", header) as writer:
        writer.add_placement(PlacementEvent(Placement(ROWS, 8, Topology(4))))
        for window in COUNTS:
            writer.add_window(LoadWindow(window))
        writer.add_tokens(0, 0, np.zeros((3, 2, 2), int))
    return folder / "a.evd"


def statistics(folder: Path) -> Path:
    return trtllm_statistics(folder / "s", COUNTS[None], layers=[3, 4, 5]) / "rank0.safetensors"


def yaml_file(folder: Path) -> Path:
    return trtllm_yaml(folder / "a.yaml", ROWS, [3, 4, 5])


def ascend(folder: Path) -> Path:
    return ascend_map(folder / "a.json", ROWS, 4)


def megatron(folder: Path) -> Path:
    return megatron_trace(folder, 0, [{1: np.array([[0, 5], [3, 1]]), 2: np.array([[0, 5], [3, 1]])}] * 2)


def placement(folder: Path) -> Path:
    save_placement(folder / "a.json", Placement(ROWS, 8, Topology(4)))
    return folder / "a.json"


def placement_set(folder: Path) -> Path:
    update_placement_set(folder / "a.json", "k", Placement(ROWS, 8, Topology(4)))
    return folder / "a.json"


def log(folder: Path) -> Path:
    line = "EPLB step: 1 for model m: avg_tokens=1.50, max_tokens=2, balancedness=0.7500\n"
    (folder / "a.log").write_text(line * 3)
    return folder / "a.log"


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in."""
    work = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(work) + 1)
        kind = rng.randrange(4)
        if kind == 0 and place < len(work):
            work[place] = rng.randrange(256)
        elif kind == 1:
            del work[place : place + rng.randrange(1, 9)]
        elif kind == 2:
            work[place:place] = work[place : place + rng.randrange(1, 9)]
        else:
            work[place:place] = rng.choice(
                (b"-", b"9", b"null", b"1e400", b"NaN", b"[", b"}", b'"', b"\x00", b"\xff")
            )
    return bytes(work)


def read_all(sources: list[LoadSource]) -> str:
    """Read every window; the error if one turns out damaged, else empty."""
    try:
        for source in sources:
            for window in source.windows():
                assert window.counts.shape == source.shape
                assert (window.counts >= 0).all()
    except ValueError as error:
        return str(error)
    return ""


WRITERS = [
    npy,
    npz,
    csv,
    logical_count,
    tensors,
    dump,
    statistics,
    yaml_file,
    ascend,
    megatron,
    placement,
    placement_set,
    log,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
@pytest.mark.timeout(240)
def test_mutations(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    path = write(tmp_path)
    data = path.read_bytes()
    opened_path = path.parent if write is statistics else path
    rng = random.Random(write.__name__)
    refused = 0
    for _ in range(150):
        path.write_bytes(mutated(data, rng))
        opened = open_sources([opened_path])
        for error in opened.errors:
            assert str(opened_path) in error
            assert len(error) < 700
        told = opened.errors or [read_all(opened.sources)]
        if told[0]:
            assert str(opened_path) in told[0]
            refused += 1
    path.write_bytes(data)
    assert not open_sources([opened_path]).errors
    assert refused > (0 if write in (log, csv) else 20)
    shutil.rmtree(tmp_path)
