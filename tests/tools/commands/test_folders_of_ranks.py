"""A folder of ranks' files in which something is wrong: the good ones are reported, the rest is named and kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.partial import unfinished_in
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.files.safetensors import write_safetensors
from evenroute.eplb.loads.source import LoadWindow
from support.command import assert_one_line_error, evenroute

L, E, STEPS = 2, 4, 20
HEADER = DumpHeader(
    num_layers=L,
    num_logical_experts=E,
    mode="per_pass",
    scope="rank",
    rank=0,
    ep_size=3,
    format_version=2,
    recording="a-1",
)


def part(folder: Path, rank: int, number: int = 1, *, finish: bool = True) -> Path:
    """A file of a rank, `STEPS` passes of rank + 1 tokens an expert each."""
    header = msgspec.structs.replace(HEADER, rank=rank, part=number)
    name = f"x-rank{rank}{'' if number == 1 else f'.part{number}'}.evd"
    writer = DumpWriter(folder / name, header)
    for step in range((number - 1) * STEPS, number * STEPS):
        counts = np.full((L, E), rank + 1) + (np.arange(E) == step % E)
        writer.add_window(LoadWindow(counts, None, step, step, tokens=1))
    if not finish:
        return writer.abandon()
    writer.close()
    return writer.path


def routed(rank: int, parts: int = 1) -> int:
    return parts * STEPS * L * (E * (rank + 1) + 1)


def flip(path: Path, at: float) -> None:
    """Change one bit somewhere in the middle of what the file holds."""
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 4
    path.write_bytes(data)


# ---------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("at", [0.02, 0.3, 0.5, 0.7, 0.93, 0.999])
def test_one_flipped_bit_costs_one_file_and_is_told(tmp_path: Path, at: float) -> None:
    paths = [part(tmp_path, rank) for rank in range(3)]
    flip(paths[1], at)
    outcome = evenroute("inspect", tmp_path, "--json")
    (source,) = outcome.json["sources"]
    assert outcome.status == 2
    assert source["ranks"] == [0, 2]
    assert source["routed"] == routed(0) + routed(2)
    (error,) = outcome.json["errors"]
    assert str(paths[1]) in error
    assert outcome.err == f"evenroute: error: {error}\n"
    text = evenroute("inspect", *paths)
    assert (text.status, text.err) == (2, outcome.err)
    assert "2 ranks" in text.out
    for command in (["convert", tmp_path, tmp_path / "out", "--to", "evenroute"], ["advise", tmp_path]):
        assert_one_line_error(evenroute(*command), str(paths[1]))
    assert not (tmp_path / "out").exists()


def test_a_damaged_part_leaves_its_ranks_other_parts(tmp_path: Path) -> None:
    for rank in range(2):
        for number in (1, 2, 3):
            part(tmp_path, rank, number)
    flip(tmp_path / "x-rank1.part2.evd", 0.5)
    outcome = evenroute("inspect", tmp_path, "--json")
    assert outcome.status == 2
    (source,) = outcome.json["sources"]
    assert source["ranks"] == [0, 1]
    assert source["routed"] == routed(0, 3) + routed(1, 2)
    assert source["num_incomplete_windows"] == STEPS
    assert any("part 2 of this recording is missing" in note for note in source["notes"])


def test_where_none_is_left_it_is_one_line(tmp_path: Path) -> None:
    for rank in range(2):
        flip(part(tmp_path, rank), 0.5)
    assert_one_line_error(evenroute("inspect", tmp_path), "x-rank0.evd", "checksum", "(and 1 more)")


def test_diff_is_not_made_of_what_is_left(tmp_path: Path) -> None:
    for name in "abc":
        part_of = tmp_path / name
        part_of.mkdir()
        part(part_of, 0)
    flip(tmp_path / "a" / "x-rank0.evd", 0.02)
    outcome = evenroute("inspect", *(tmp_path / name / "x-rank0.evd" for name in "abc"), "--diff")
    assert_one_line_error(outcome, "a/x-rank0.evd", "damaged")


def test_good_ranks_of_other_engines_folders(tmp_path: Path) -> None:
    trace, statistics = tmp_path / "trace", tmp_path / "statistics"
    trace.mkdir()
    statistics.mkdir()
    (statistics / "meta_info.json").write_text('{"num_experts": 4, "num_experts_per_token": 1}')
    for rank in range(3):
        lines = [
            f'{{"step": {step}, "layer": 0, "rank": {rank}, "top_indices": [[{rank}]]}}\n'
            for step in range(3)
        ]
        (trace / f"router_trace_rank{rank}.jsonl").write_text("".join(lines))
        tensors = {f"0_{layer}": np.full(4, rank + 1) for layer in range(2)}
        write_safetensors(statistics / f"rank{rank}.safetensors", tensors)
    (trace / "router_trace_rank1.jsonl").write_text('{"step": 0, "layer": 0, "top_')
    with (statistics / "rank1.safetensors").open("r+b") as file:
        file.truncate(os.path.getsize(statistics / "rank1.safetensors") - 8)
    for folder, bad, expected in (
        (trace, "router_trace_rank1.jsonl", 6),
        (statistics, "rank1.safetensors", 32),
    ):
        outcome = evenroute("inspect", folder, "--json")
        assert outcome.status == 2
        (error,) = outcome.json["errors"]
        assert str(folder / bad) in error
        assert outcome.json["sources"][0]["ranks"] == [0, 2]
        assert outcome.json["sources"][0]["routed"] == expected


def test_a_file_that_changes_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = part(tmp_path, 0)
    reader = DumpReader(path)
    other = tmp_path / "other"
    other.mkdir()
    os.replace(part(other, 1), path)
    with pytest.raises(ValueError, match="was changed while it was read"):
        list(reader.windows())


# ------------------------------------------------------------------------------------------ unfinished


def test_what_a_killed_rank_left_is_told_and_read_on_request(tmp_path: Path) -> None:
    part(tmp_path, 0, 1)
    part(tmp_path, 0, 2)
    finished = part(tmp_path, 1, 1)
    left = part(tmp_path, 1, 2, finish=False)
    with left.open("ab") as file:
        file.write(b"\x02\0\0\0half a record")
    before = left.read_bytes()
    for given in ([tmp_path], [tmp_path / "x-rank0.evd", tmp_path / "x-rank0.part2.evd", finished]):
        told = evenroute("inspect", *given, "--json")
        assert (told.status, told.err) == (0, "")
        (line,) = told.json["unfinished"]
        assert line == (
            f"{left}: unfinished, {len(before):,} bytes, was left by a process that ended; not read: --unfinished "
            "reads it up to its last whole record"
        )
        assert told.json["sources"][0]["routed"] == routed(0, 2) + routed(1)
        text = evenroute("inspect", *given)
        assert (text.status, text.err) == (0, f"evenroute: note: {line}\n")
        whole = evenroute("inspect", *given, "--unfinished", "--json")
        assert whole.status == 0
        assert whole.json["unfinished"] == []
        (source,) = whole.json["sources"]
        assert source["routed"] == routed(0, 2) + routed(1, 2)
        assert source["num_incomplete_windows"] == 0
        assert any(
            f"{left.name}: unfinished, its {STEPS} whole records are read" in n for n in source["notes"]
        )
    for words in (["advise", tmp_path], ["replay", tmp_path]):
        assert f"evenroute: note: {left}" in evenroute(*words).err
    (tmp_path / "made").mkdir()
    made = evenroute("convert", tmp_path, tmp_path / "made" / "d.evd", "--to", "evenroute", "--unfinished")
    assert (made.status, made.err) == (0, ""), made
    assert evenroute("inspect", tmp_path / "made", "--json").json["sources"][0]["routed"] == routed(
        0, 2
    ) + routed(1, 2)
    assert left.read_bytes() == before


def test_a_folder_of_nothing_else_and_the_file_itself(tmp_path: Path) -> None:
    left = part(tmp_path, 0, finish=False)
    for words in (["inspect"], ["advise"], ["convert", "--to", "sglang"]):
        given = [tmp_path, tmp_path / "out"] if words[0] == "convert" else [tmp_path]
        outcome = evenroute(words[0], *given, *words[1:])
        assert_one_line_error(outcome, str(left), "left by a process that ended", "--unfinished")
    assert_one_line_error(evenroute("inspect", left), str(left), "unfinished", "--unfinished reads it")
    for given in (tmp_path, left):
        facts = evenroute("inspect", given, "--unfinished", "--json").json
        assert facts["sources"][0]["routed"] == routed(0)


@pytest.mark.parametrize("size", [0, 5, 40, 160])
def test_one_without_a_whole_record_is_told_and_costs_nothing_else(tmp_path: Path, size: int) -> None:
    part(tmp_path, 0)
    left = part(tmp_path, 1, finish=False)
    os.truncate(left, size)
    outcome = evenroute("inspect", tmp_path, "--unfinished", "--json")
    assert outcome.status == 0
    assert outcome.json["sources"][0]["routed"] == routed(0)
    (line,) = outcome.json["unfinished"]
    assert str(left) in line


def test_damage_inside_one_ends_it_there_and_is_told(tmp_path: Path) -> None:
    part(tmp_path, 0)
    left = part(tmp_path, 1, finish=False)
    flip(left, 0.5)
    facts = evenroute("inspect", tmp_path, "--unfinished", "--json").json
    (source,) = facts["sources"]
    assert routed(0) < source["routed"] < routed(0) + routed(1)
    assert any("bytes after them are none (" in note for note in source["notes"])


WRITER = """
import sys, time
from pathlib import Path
import numpy as np
from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import LoadWindow
writer = DumpWriter(Path(sys.argv[1]), DumpHeader(num_layers=2, num_logical_experts=4))
for step in range(3):
    writer.add_window(LoadWindow(np.ones((2, 4), np.int64), None, step, step, tokens=1))
print("written", flush=True)
time.sleep(60)
"""


def test_a_file_that_is_being_written_is_told_from_one_that_was_left(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "d.evd")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        (found,) = unfinished_in(tmp_path)
        assert found.being_written
        assert_one_line_error(evenroute("inspect", tmp_path), "is being written", "--unfinished")
        facts = evenroute("inspect", tmp_path, "--unfinished", "--json").json
        assert facts["sources"][0]["num_windows"] == 3  # nothing waits in the writer's memory
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    deadline = time.monotonic() + 10
    while unfinished_in(tmp_path)[0].being_written and time.monotonic() < deadline:
        time.sleep(0.01)
    assert_one_line_error(evenroute("inspect", tmp_path), "was left by a process that ended")
    assert evenroute("inspect", tmp_path, "--unfinished", "--json").json["sources"][0]["num_windows"] == 3
