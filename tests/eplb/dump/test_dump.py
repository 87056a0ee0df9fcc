"""Recorder dumps: nothing is lost or invented, whatever happens to writer, file or disk."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from evenroute.eplb.dump.format import MAGIC, DumpHeader, narrow
from evenroute.eplb.dump.partial import unfinished_of
from evenroute.eplb.dump.reader import DumpReader, read_dump
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import LoadWindow, PlacementEvent
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import even_shares
from evenroute.eplb.placement.topology import Topology
from support.foreign_files import random_counts, random_map

LAYERS, EXPERTS = 3, 8
HEADER = DumpHeader(num_layers=LAYERS, num_logical_experts=EXPERTS)
TOKENS = DumpHeader(num_layers=LAYERS, num_logical_experts=EXPERTS, mode="per_token", scope="rank", rank=1)


def write(path: Path, counts: np.ndarray, header: DumpHeader = HEADER) -> None:
    with DumpWriter(path, header) as writer:
        for step, window in enumerate(counts):
            writer.add_window(LoadWindow(window, None, step, step))


def counts_of(path: Path) -> np.ndarray:
    return np.stack([window.counts for window in DumpReader(path).windows()])


class TestContent:
    @pytest.mark.parametrize("highest", [0, 1, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**62])
    def test_counts_of_any_size(self, tmp_path: Path, highest: int) -> None:
        counts = np.zeros((2, LAYERS, EXPERTS), np.int64)
        counts[1, 2, 7] = highest
        write(tmp_path / "d", counts)
        assert np.array_equal(counts_of(tmp_path / "d"), counts)

    def test_small_counts_are_stored_small(self) -> None:
        assert narrow(np.array([[65535]])).dtype == np.uint16
        assert narrow(np.array([[65536]])).dtype == np.uint32
        assert narrow(np.array([[1.0]])).dtype == np.uint16
        assert narrow(np.array([[1.5]])).dtype == np.float64

    def test_all_that_is_known_of_a_window(self, tmp_path: Path) -> None:
        window = LoadWindow(np.ones((LAYERS, EXPERTS), np.int64), 12.5, 3, 7, 99, False, "warm")
        with DumpWriter(tmp_path / "d", HEADER) as writer:
            writer.add_window(window)
        (found,) = DumpReader(tmp_path / "d").windows()
        assert (found.time, found.first_step, found.last_step) == (12.5, 3, 7)
        assert (found.tokens, found.complete, found.label) == (99, False, "warm")

    def test_placements_with_shares(self, tmp_path: Path) -> None:
        rows = random_map(LAYERS, EXPERTS, 12, 4)
        shares = np.array(even_shares(rows))
        slots = np.flatnonzero(rows[0] == np.flatnonzero(np.bincount(rows[0]) > 1)[0])
        shares[0, slots[0]] += 7
        shares[0, slots[1]] -= 7
        uneven = Placement(rows, EXPERTS, Topology(4, 2), shares)
        event = PlacementEvent(uneven, 1.0, 5, 3, 2, 0.5, 0.9, 17, "weighted", "why")
        with DumpWriter(tmp_path / "d", HEADER) as writer:
            writer.add_placement(event)
        (found,) = DumpReader(tmp_path / "d").placements()
        assert found.placement.digest() == uneven.digest()
        assert found.placement.topology == Topology(4, 2)
        assert (found.epoch, found.version, found.moves, found.reason) == (3, 2, 17, "why")

    def test_tokens(self, tmp_path: Path) -> None:
        ids = np.random.default_rng(0).integers(-1, EXPERTS, (LAYERS, 5, 2))
        with DumpWriter(tmp_path / "d", TOKENS) as writer:
            writer.add_tokens(4, 1, ids, np.arange(5))
            writer.add_tokens(5, 1, ids[:, :0])
        first, second = DumpReader(tmp_path / "d").tokens()
        assert np.array_equal(first.ids, ids)
        assert first.token_ids is not None
        assert first.token_ids.tolist() == [0, 1, 2, 3, 4]
        assert (first.step, first.rank) == (4, 1)
        assert second.ids.shape == (LAYERS, 0, 2)
        assert second.token_ids is None

    def test_ids_alone_are_counted(self, tmp_path: Path) -> None:
        ids = np.random.default_rng(0).integers(-1, EXPERTS, (LAYERS, 5, 2))
        ids[:, 4] = -1
        with DumpWriter(tmp_path / "d", TOKENS) as writer:
            writer.add_tokens(4, 1, ids)
        (window,) = DumpReader(tmp_path / "d").windows()
        expected = [np.bincount(row[row >= 0].ravel(), minlength=EXPERTS) for row in ids]
        assert np.array_equal(window.counts, expected)
        assert (window.first_step, window.tokens) == (4, int((ids[0] >= 0).any(axis=1).sum()))
        assert read_dump(tmp_path / "d").num_windows == 1


class TestRefusals:
    def test_wrong_shapes_and_modes(self, tmp_path: Path) -> None:
        with DumpWriter(tmp_path / "d", HEADER) as writer:
            with pytest.raises(ValueError, match=r"\[1, 8\]"):
                writer.add_window(LoadWindow(np.ones((1, EXPERTS), np.int64)))
            with pytest.raises(ValueError, match="per_token"):
                writer.add_tokens(0, 0, np.zeros((LAYERS, 1, 1), int))
        with DumpWriter(tmp_path / "t", TOKENS) as writer:
            with pytest.raises(ValueError, match="logical experts"):
                writer.add_tokens(0, 0, np.full((LAYERS, 1, 1), EXPERTS))
            with pytest.raises(ValueError, match="token_ids"):
                writer.add_tokens(0, 0, np.zeros((LAYERS, 2, 1), int), np.arange(3))

    @pytest.mark.parametrize(
        ("changes", "part"),
        [
            ({"num_layers": 0}, "num_layers"),
            ({"scope": "rank"}, "rank"),
            ({"rank": 3}, "rank"),
            ({"layer_ids": [1]}, "layer_ids"),
            ({"format_version": 3}, "format version 3"),
        ],
    )
    def test_impossible_headers(self, changes: dict[str, object], part: str) -> None:
        known: dict[str, object] = {"num_layers": LAYERS, "num_logical_experts": EXPERTS}
        with pytest.raises(ValueError, match=part):
            DumpHeader(**(known | changes))  # type: ignore[arg-type]

    def test_other_versions_and_files(self, tmp_path: Path) -> None:
        (tmp_path / "d").write_bytes(b"EVRDUMP2" + bytes(100))
        with pytest.raises(ValueError, match="not an evenroute dump"):
            DumpReader(tmp_path / "d")
        write(tmp_path / "d", random_counts(1, LAYERS, EXPERTS))
        old = msgspec.msgpack.encode(HEADER)
        raw = msgspec.msgpack.decode(old) | {"format_version": 3}
        newer = msgspec.msgpack.encode(raw)
        payload = len(newer).to_bytes(4, "little") + newer
        crc = zlib.crc32(payload, zlib.crc32(struct.pack("<BQ", 1, len(payload))))
        data = (tmp_path / "d").read_bytes()
        frame = struct.pack("<B3xIQ", 1, crc, len(payload)) + payload
        (tmp_path / "d").write_bytes(data[:8] + frame + data[8 + len(frame) :])
        with pytest.raises(ValueError, match="format version 3 found, expected 1 or 2"):
            DumpReader(tmp_path / "d")
        (tmp_path / "d").write_bytes(MAGIC)
        with pytest.raises(ValueError, match="truncated or damaged"):
            DumpReader(tmp_path / "d")


def write_for_ever(target: Path) -> None:
    """Dump number n has n % 7 + 1 windows full of n."""
    number = 0
    while True:
        number += 1
        with DumpWriter(target, DumpHeader(num_layers=2, num_logical_experts=256)) as writer:
            for step in range(number % 7 + 1):
                writer.add_window(LoadWindow(np.full((2, 256), number), None, step, step))


class TestWholeOrNothing:
    def test_an_exception_keeps_the_old_file(self, tmp_path: Path) -> None:
        write(tmp_path / "d", random_counts(2, LAYERS, EXPERTS))
        before = (tmp_path / "d").read_bytes()

        def fail() -> None:
            with DumpWriter(tmp_path / "d", HEADER) as writer:
                writer.add_window(LoadWindow(np.ones((LAYERS, EXPERTS), np.int64)))
                raise RuntimeError

        with pytest.raises(RuntimeError):
            fail()
        assert (tmp_path / "d").read_bytes() == before
        assert [path.name for path in tmp_path.iterdir()] == ["d"]

    def test_every_cut_is_found(self, tmp_path: Path) -> None:
        write(tmp_path / "d", random_counts(3, LAYERS, EXPERTS))
        data = (tmp_path / "d").read_bytes()
        for size in sorted({*range(0, len(data), 5), *range(len(data) - 30, len(data))}):
            (tmp_path / "d").write_bytes(data[:size])
            with pytest.raises(ValueError, match="truncated or damaged"):
                counts_of(tmp_path / "d")

    def test_every_flipped_bit_is_found_or_harmless(self, tmp_path: Path) -> None:
        """Counts are never another number than was written."""
        counts = random_counts(3, LAYERS, EXPERTS)
        write(tmp_path / "d", counts)
        data = (tmp_path / "d").read_bytes()
        found = 0
        for place in range(len(data)):
            damaged = bytearray(data)
            damaged[place] ^= 1 << (place % 8)
            (tmp_path / "d").write_bytes(bytes(damaged))
            try:
                assert np.array_equal(counts_of(tmp_path / "d"), counts), place
            except ValueError:
                found += 1
        assert found > 0.9 * len(data) / 2

    def test_frames_left_out_or_swapped_files_are_found(self, tmp_path: Path) -> None:
        write(tmp_path / "d", random_counts(3, LAYERS, EXPERTS))
        data = (tmp_path / "d").read_bytes()
        reader = DumpReader(tmp_path / "d")
        header_end = reader._first
        window = (reader._end - header_end) // 3  # three frames of one size
        (tmp_path / "d").write_bytes(data[:header_end] + data[header_end + window :])
        with pytest.raises(ValueError, match="truncated or damaged"):
            counts_of(tmp_path / "d")

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12, where threads run
    def test_killed_at_random_times(self, tmp_path: Path) -> None:
        """B30: 30 kills; the final name holds a whole old or a whole new dump each time."""
        target = tmp_path / "d"
        context = multiprocessing.get_context("fork")
        rng = random.Random(0)
        seen = 0
        for _ in range(30):
            process = context.Process(target=write_for_ever, args=(target,))
            process.start()
            time.sleep(rng.uniform(0.005, 0.06))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            if target.exists():
                windows = list(DumpReader(target).windows())
                values = {int(value) for window in windows for value in np.unique(window.counts)}
                assert len(values) == 1
                assert len(windows) == values.pop() % 7 + 1
                seen += 1
        assert seen >= 10
        write(target, random_counts(1, LAYERS, EXPERTS))
        left = unfinished_of(target)
        assert len(left) == len(list(tmp_path.iterdir())) - 1 > 0  # what the killed ones left is kept
        assert not any(found.being_written for found in left)
        DumpWriter(target, HEADER, replaces_left=True).close()
        assert [path.name for path in tmp_path.iterdir()] == [
            "d"
        ]  # unless it is said that it can be made again

    def test_a_living_writers_file_is_left_alone(self, tmp_path: Path) -> None:
        first = DumpWriter(tmp_path / "d", HEADER)
        first.add_window(LoadWindow(np.full((LAYERS, EXPERTS), 1)))
        assert [found.being_written for found in unfinished_of(tmp_path / "d")] == [True]
        DumpWriter(tmp_path / "d", HEADER, replaces_left=True).close()
        first.close()
        assert counts_of(tmp_path / "d")[0, 0, 0] == 1
