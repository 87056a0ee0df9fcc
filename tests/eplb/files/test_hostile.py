"""Files that claim more than they hold, or more than any job has: one line at once, before memory is taken for it."""

from __future__ import annotations

import json
import os
import resource
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evenroute.eplb import _io as regular_files
from evenroute.eplb.dump.format import (
    END_MAGIC,
    HEADER,
    MAGIC,
    PLACEMENT,
    TAIL,
    TOKENS,
    WINDOW,
    DumpHeader,
    EndMeta,
    PlacementMeta,
    TokensMeta,
    WindowMeta,
    frame_parts,
)
from evenroute.eplb.files.open import open_sources
from evenroute.eplb.files.safetensors import write_safetensors
from support.command import assert_one_line_error, evenroute
from support.control_plane import patience

ONES = np.ones((2, 4), "<u2")
SLOTS = np.array([[0, 1, 2, 3]] * 2, "<i4")
GOOD = (WINDOW, WindowMeta(dtype="<u2"), ONES)
END_FRAME = 9


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """What would take gigabytes fails instead of taking them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + (1 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def dump(path: Path, header: dict[str, Any], *frames: tuple[int, Any, np.ndarray]) -> Path:
    """A dump with valid checksums, whatever it says."""
    known = DumpHeader(**({"num_layers": 2, "num_logical_experts": 4} | header))
    data = MAGIC + b"".join(map(bytes, frame_parts(HEADER, known)))
    placements = []
    for kind, meta, array in frames:
        if kind == PLACEMENT:
            placements.append(len(data))
        data += b"".join(map(bytes, frame_parts(kind, meta, array)))
    kinds = [frame[0] for frame in frames]
    end = EndMeta(len(frames) + 2, kinds.count(WINDOW), kinds.count(TOKENS), placements)
    start = len(data)
    path.write_bytes(data + b"".join(map(bytes, frame_parts(END_FRAME, end))) + TAIL.pack(start, END_MAGIC))
    return path


def refused(path: Path, *parts: str) -> None:
    """Every command refuses it quickly in one line that names the file."""
    began = time.monotonic()
    for words in (
        ["inspect", path],
        ["plan", path, "--ep-size", 2, "--num-slots", 4],
        ["convert", path, path.with_suffix(".out"), "--to", "sglang", "--what", "loads"],
    ):
        assert_one_line_error(evenroute(*words), path.name, *parts)
    assert time.monotonic() - began < 20 * patience()


@pytest.mark.parametrize(
    "header",
    [
        {"num_layers": 10**9, "num_logical_experts": 10**9},
        {"num_layers": 10**5, "num_logical_experts": 10**5},
        {"num_layers": 2**62},
        {"ep_size": 0},
        {"ep_size": 2**40, "num_slots": 2**40},
        {"num_nodes": 0},
        {"mode": "per_pass", "scope": "rank", "rank": -1},
        {"mode": "per_pass", "scope": "rank", "rank": 0, "recording": "z", "part": 2**31},
        {"layer_ids": [2**62, 0]},
    ],
    ids=str,
)
def test_headers_beyond_any_job(tmp_path: Path, header: dict[str, Any]) -> None:
    refused(dump(tmp_path / "d.evd", header, GOOD))


@pytest.mark.parametrize(
    "frame",
    [
        (WINDOW, WindowMeta(dtype="<u2", time=float("nan")), ONES),
        (WINDOW, WindowMeta(dtype="<u2", time=float("inf")), ONES),
        (WINDOW, WindowMeta(dtype="<u2", tokens=-5), ONES),
        (WINDOW, WindowMeta(dtype="<i8"), np.full((2, 4), -7, "<i8")),
        (WINDOW, WindowMeta(dtype="<i8"), np.full((2, 4), 2**63 - 1, "<i8")),
        (WINDOW, WindowMeta(dtype="V2"), ONES),  # type: ignore[arg-type]
        (PLACEMENT, PlacementMeta(-1, 2), SLOTS),
        (PLACEMENT, PlacementMeta(2**40, 2), SLOTS),
        (PLACEMENT, PlacementMeta(4, 2**40), SLOTS),
    ],
    ids=lambda frame: str(frame[1])[:60],
)
def test_records_that_cannot_be_meant(tmp_path: Path, frame: tuple[int, Any, np.ndarray]) -> None:
    refused(dump(tmp_path / "d.evd", {}, frame, GOOD))


@pytest.mark.parametrize(("tokens", "dtype"), [(-1, "<i2"), (2**40, "<i2"), (1, "O"), (4, "V2"), (1, "<U9")])
def test_ids_that_cannot_be_meant(tmp_path: Path, tokens: int, dtype: str) -> None:
    meta = TokensMeta(0, 0, tokens, 2, dtype)  # type: ignore[arg-type]
    refused(dump(tmp_path / "d.evd", {"mode": "per_token"}, (TOKENS, meta, np.zeros((2, 4, 2), "<i2"))))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.json", {"physical_to_logical_map": [[0, 2**31 - 2]]}),
        ("m.json", {"physical_to_logical_map": [[0, 10**18]]}),
        ("t.jsonl", {"step": 0, "layer": 0, "top_indices": [[2**40]]}),
        ("t.jsonl", {"step": 2**62, "layer": 0, "top_indices": [[1]]}),
        ("t.jsonl", {"step": 0, "layer": -(2**62), "top_indices": [[1]]}),
        ("t.jsonl", {"step": 0, "layer": 0, "rank": -3, "top_indices": [[0]]}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_ids_beyond_any_model(tmp_path: Path, name: str, content: dict[str, Any]) -> None:
    (tmp_path / name).write_text(json.dumps(content) + "\n")
    assert_one_line_error(evenroute("inspect", tmp_path / name), name)


def test_nests_of_references_do_not_unfold(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    nests = "".join(
        f"{c}: &{c} [{', '.join(['*' + p] * 9)}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    rest = "num_slots: 9\ninitial_global_assignments: {0: *i}\nlayer_updates_per_iter: 0\n"
    (tmp_path / "b.yaml").write_text(f"a: &a [x, x]\n{nests}{rest}")
    began = time.monotonic()
    assert_one_line_error(evenroute("inspect", tmp_path / "b.yaml"), "layer 0 must be a list of integers")
    assert time.monotonic() - began < 10 * patience()


def test_arrays_that_memory_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "z.npz", a=np.zeros((64, 2, 512)))
    (tmp_path / "l.json").write_text(json.dumps({"logical_count": [[1] * 4000] * 10}))
    assert evenroute("inspect", tmp_path / "z.npz").status == 0
    monkeypatch.setattr(regular_files, "_available_bytes", lambda: 100_000)
    with zipfile.ZipFile(tmp_path / "z.npz") as archive:
        size = archive.infolist()[0].file_size
    assert_one_line_error(evenroute("inspect", tmp_path / "z.npz"), f"takes {size:,} bytes of memory")
    assert_one_line_error(evenroute("inspect", tmp_path / "l.json"), "100,000 are available")


@pytest.mark.parametrize("name", ["z.npz", "z.pt"])
def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, name: str) -> None:
    """Refused by what its directory says, however it is divided."""
    zeros = bytes(8 << 20)
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(40):
            archive.writestr("z/data.pkl" if name == "z.pt" and not number else f"z/{number}.npy", zeros)
    began = time.monotonic()
    assert_one_line_error(
        evenroute("inspect", tmp_path / name), name, "that unpack to 335,544,320", "100 times"
    )
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 0, "layer": 0, "top_indices": [[0, 1]]}',
        "EPLB step: 1 avg_tokens=1, max_tokens=2, balancedness=0.5",
    ],
)
def test_a_line_without_an_end_is_not_held(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be longer than it takes on disk: what memory cannot hold is not read as one line."""
    monkeypatch.setattr(regular_files, "_MOST_LINE", 1 << 20)
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    if line.startswith("EPLB"):
        path = path.rename(tmp_path / "t.log")
    assert evenroute("inspect", path).status == 0
    os.truncate(path, 1 << 40)
    began = time.monotonic()
    assert_one_line_error(evenroute("inspect", path), path.name, "a line of more than 1,048,576 bytes")
    assert time.monotonic() - began < 10


def test_an_array_whose_size_overflows(tmp_path: Path) -> None:
    head = repr({"descr": "<f8", "fortran_order": False, "shape": (10**12, 10**12)}).encode() + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    assert_one_line_error(evenroute("inspect", tmp_path / "a.npy"), "a.npy", "truncated or damaged")


def test_names_that_are_no_text(tmp_path: Path) -> None:
    """A name is bytes to the kernel; what is shown and written of it is text."""
    path = tmp_path / os.fsdecode(b"l\xff.json")
    path.write_text('{"logical_count": [[1, 2], [3, 4]]}')
    outcome = evenroute("inspect", path)
    assert outcome.status == 0
    assert "l\\xff.json" in outcome.out
    assert evenroute("inspect", path, "--json").json["sources"][0]["path"].endswith("l\\xff.json")
    assert evenroute("convert", path, tmp_path / "d.evd", "--to", "evenroute").status == 0
    (source,) = open_sources([tmp_path / "d.evd"]).sources
    assert any("converted from logical_count l\\xff.json" in note for note in source.notes)


def test_a_rank_file_that_only_claims_experts(tmp_path: Path) -> None:
    (tmp_path / "meta_info.json").write_text('{"num_experts": 1000000000000, "num_experts_per_token": 1}')
    write_safetensors(tmp_path / "rank0.safetensors", {"0_0": np.ones(4, np.int64)})
    assert_one_line_error(evenroute("inspect", tmp_path), "rank0.safetensors", "expected [1000000000000]")
