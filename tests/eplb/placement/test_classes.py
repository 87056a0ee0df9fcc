"""Sets of shares for small batches: what carries a placement carries them, and old readers' bytes stay as they were."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenroute.dist.wire.messages import JobShape, MessageError
from evenroute.dist.wire.placement import pack_placement, pack_rows, unpack_placement
from evenroute.eplb.dump.format import DumpHeader
from evenroute.eplb.dump.reader import DumpReader
from evenroute.eplb.dump.writer import DumpWriter
from evenroute.eplb.loads.source import PlacementEvent
from evenroute.eplb.placement.classes import ShareClasses, default_class_rows, shares_of
from evenroute.eplb.placement.file import load_placement, save_placement
from evenroute.eplb.placement.placement import Placement, row_digest
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.schema import PublishedPlacement
from evenroute.eplb.store.writer import HistoryStore
from support.placements import random_placement

LAYERS, EXPERTS, SLOTS, RANKS = 3, 12, 24, 4
JOB = JobShape(LAYERS, EXPERTS, SLOTS, RANKS, top_k=2)


def drawn(seed: int, *, uneven: bool = True, classes: bool = True) -> Placement:
    rng = np.random.default_rng(seed)
    return random_placement(rng, LAYERS, EXPERTS, SLOTS, Topology(RANKS), uneven=uneven, classes=classes)


def with_sets(seed: int = 0) -> Placement:
    """A drawn placement that has sets."""
    return next(
        one for one in (drawn(number) for number in range(seed, seed + 100)) if one.classes is not None
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), uneven=st.booleans(), classes=st.booleans())
def test_rows_and_wire_keep_every_set(seed: int, uneven: bool, classes: bool) -> None:
    placement = drawn(seed, uneven=uneven, classes=classes)
    rows = placement.rows()
    assert Placement.from_rows(rows, EXPERTS, Topology(RANKS)).digest() == placement.digest()
    assert [row_digest(*row) for row in rows] == placement.row_digests().tolist()
    assert unpack_placement(pack_placement(placement), JOB).digest() == placement.digest()
    assert unpack_placement(pack_rows(rows, JOB), JOB).digest() == placement.digest()
    plain = drawn(seed + 1, classes=False)
    mixed = plain
    for layer, row in enumerate(rows):
        mixed = mixed.with_row(layer, row)
    assert mixed.digest() == placement.digest()


def test_digests_differ_by_rows_and_by_shares_of_a_set() -> None:
    placement = with_sets()
    assert placement.classes is not None
    rows, shares = placement.classes
    plain = Placement(placement.physical_to_logical, EXPERTS, placement.topology, placement.shares)
    larger = ShareClasses(np.where(rows > 0, rows + 1, 0), shares)
    one = shares.copy()
    one[rows > 0] = shares_of(placement.physical_to_logical, np.ones_like(one[:, 0], bool))[0]
    found = {
        Placement(placement.physical_to_logical, EXPERTS, placement.topology, placement.shares, sets).digest()
        for sets in (None, placement.classes, larger)
    }
    assert len(found) == 3
    assert plain.digest() in found


def test_files_with_sets_are_of_version_2_and_others_as_ever(tmp_path: Path) -> None:
    placement, plain = with_sets(), drawn(5, classes=False)
    save_placement(tmp_path / "sets.json", placement)
    save_placement(tmp_path / "plain.json", plain)
    read, content = load_placement(tmp_path / "sets.json")
    assert (read.digest(), content.format_version) == (placement.digest(), 2)
    kept = json.loads((tmp_path / "plain.json").read_text())
    assert kept["format_version"] == 1
    assert not {"class_rows", "class_shares"} & kept.keys()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 1}, "format version 2 has both and version 1 none"),
        ({"class_rows": None}, "class_rows"),
        ({"class_rows": [[5, 5]] * LAYERS}, "rows must rise"),
        ({"class_rows": [[5]] * LAYERS}, "classes: rows must be"),
        ({"class_shares": [[[1] * SLOTS] * 2] * LAYERS}, "expected"),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, change: dict[str, object], said: str) -> None:
    placement = next(p for p in map(with_sets, range(100)) if p.classes and (p.classes.rows > 0).all())
    save_placement(tmp_path / "sets.json", placement)
    content = json.loads((tmp_path / "sets.json").read_text())
    (tmp_path / "bad.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=said):
        load_placement(tmp_path / "bad.json")


def test_the_store_keeps_them(tmp_path: Path) -> None:
    placement = with_sets()
    with HistoryStore(tmp_path / "run.db") as store:
        store.begin_epoch(5, pid=1, now=0.0)
        moves = np.zeros(LAYERS, np.int64)
        store.add_placement(PublishedPlacement(1.0, 5, 1, placement, moves, "joint", ""))
        newest = store.newest_placement()
        assert newest is not None
        assert newest.placement.digest() == placement.digest()
        for digest in placement.row_digests().tolist():
            row = store.row(digest)
            assert row is not None
            assert row_digest(*row) == digest


def test_dumps_keep_them(tmp_path: Path) -> None:
    placement = with_sets()
    with DumpWriter(tmp_path / "a.evd", DumpHeader(num_layers=LAYERS, num_logical_experts=EXPERTS)) as dump:
        dump.add_placement(PlacementEvent(placement))
        dump.add_placement(PlacementEvent(drawn(3, classes=False)))
    kept = DumpReader(tmp_path / "a.evd").placements()
    assert [event.placement.digest() for event in kept] == [
        placement.digest(),
        drawn(3, classes=False).digest(),
    ]


def test_a_message_of_another_length_is_refused() -> None:
    wire = pack_placement(with_sets())
    assert wire.shares is not None
    for shares in (wire.shares[:-2], wire.shares + b"\0\0"):
        with pytest.raises(MessageError, match="placement: found"):
            unpack_placement(
                type(wire)(*(getattr(wire, f) for f in wire.__struct_fields__[:-1]), shares), JOB
            )


def test_an_expert_uses_four_replicas_or_divides_evenly() -> None:
    slots = np.tile(np.arange(2, dtype=np.int32), 6)[None]
    even = shares_of(slots, np.ones((1, 12), bool))
    uneven = even.copy()
    uneven[0, 0] += 1
    uneven[0, 2] -= 1
    few = shares_of(slots, (np.arange(12) < 8)[None]).astype(np.int64)
    few[0, 0] += 100
    few[0, 2] -= 100
    for shares, allowed in ((even, True), (few, True), (uneven, False)):
        sets = ShareClasses(np.array([[8]]), shares[:, None])
        if allowed:
            assert Placement(slots, 2, Topology(6), None, sets).classes is not None
            continue
        with pytest.raises(ValueError, match="expert 0 has uneven shares on 6 slots"):
            Placement(slots, 2, Topology(6), None, sets)


def test_sizes_of_the_classes() -> None:
    """The mean expert of a batch of 128 tokens a rank at EP32 has 128 tokens (256 experts, 8 a token)."""
    assert default_class_rows(256, 8, 32) == [32, 128]
    assert default_class_rows(256, 8, 8) == [128, 512]
    assert default_class_rows(8, 8, 1024) == [1]
