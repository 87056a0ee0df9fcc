"""Topology, placement rows, digests, loads and balancedness."""

import hashlib

import numpy as np
import pytest

from evenroute.eplb.loads.balance import balancedness, rank_loads, slot_loads, validate_loads
from evenroute.eplb.placement.file import load_placement, save_placement
from evenroute.eplb.placement.models import MODEL_SHAPES
from evenroute.eplb.placement.placement import Placement, PlacementRow, placement_digest, row_digest
from evenroute.eplb.placement.shares import even_shares, uneven_or_none
from evenroute.eplb.placement.topology import Topology, automatic_redundant_experts, check_plan_numbers


def test_topology_refuses_what_does_not_divide() -> None:
    assert Topology(8, 2).node_of_rank(5) == 1
    with pytest.raises(ValueError, match=r"num_nodes=3 does not divide ep_size=8.*2"):
        Topology(8, 3)
    with pytest.raises(ValueError, match="ep_size must be >= 1, found 0"):
        Topology(0)


def test_automatic_redundancy() -> None:
    got = [automatic_redundant_experts(e, r) for e, r in [(256, 3), (160, 12), (384, 36), (896, 24), (8, 4)]]
    assert got == [2, 8, 12, 16, 0]


@pytest.mark.parametrize(
    ("numbers", "nearest"),
    [
        ((8, 10, 1, 1, 4), 12),
        ((8, 4, 1, 1, 4), 8),
        ((10, 12, 3, 1, 4), 12),
        ((8, 16, 8, 2, 1), 8),
        ((256, 256, 1, 1, 3), 258),
        ((8, 8, 0, 1, 4), 8),
        ((8, 8, 1, 0, 4), 8),
        ((8, 8, 1, 1, 0), 8),
        ((8, 8, 1, 1, -2), 8),
        ((4, 6, 1, 1, 1), 4),
    ],
)
def test_b18_numbers_that_do_not_fit_are_refused_in_one_line(numbers: tuple[int, ...], nearest: int) -> None:
    with pytest.raises(ValueError) as error:
        check_plan_numbers(*numbers)
    text = str(error.value)
    assert "\n" not in text
    for number in numbers[:2]:
        assert str(number) in text
    assert f"nearest valid num_slots: {nearest}" in text


@pytest.mark.parametrize(("experts", "slots", "ranks"), [(256, 288, 32), (4, 12, 6), (1, 4, 4), (5, 15, 3)])
def test_initial_placement_is_identity_then_round_robin(experts: int, slots: int, ranks: int) -> None:
    placement = Placement.initial(2, experts, slots, Topology(ranks))
    assert placement.physical_to_logical[0, :experts].tolist() == list(range(experts))
    counts = np.bincount(placement.physical_to_logical[1], minlength=experts)
    assert counts.max() - counts.min() <= 1
    assert placement.is_trivial() == (experts == slots)
    assert placement.moved_slots(placement).tolist() == [0, 0]
    assert not placement.physical_to_logical.flags.writeable


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[0, 1, 2, 9]], "slot 3 holds expert 9"),
        ([[0, 1, 2, -1]], "slot 3 holds expert -1"),
        ([[0, 1, 1, 0]], "no slot for expert 2"),
        ([[0, 1, 2, 2]], "expert 2 twice on rank 1"),
        ([[0, 1, 2]], "nearest valid num_slots: 4"),
        ([0, 1, 2, 0], "must be"),
        ([[0.0, 1.0, 2.0, 0.0]], "integers"),
    ],
)
def test_bad_placements_are_refused(rows: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(np.asarray(rows), 3, Topology(2))


def test_shares_sum_to_65535_and_even_ones_vanish() -> None:
    slots = np.array([0, 1, 2, 0, 1, 0], dtype=np.int32)
    even = even_shares(slots)
    assert even.tolist() == [21845, 32768, 65535, 21845, 32767, 21845]
    assert uneven_or_none(slots, even) is None
    topology = Topology(3)
    assert Placement(slots[None], 3, topology, even[None]).shares is None
    uneven = np.array([65535, 1, 65535, 0, 65534, 0], dtype=np.uint16)
    placement = Placement(slots[None], 3, topology, uneven[None])
    assert placement.row(0).shares is not None
    uneven[0] -= 1
    with pytest.raises(ValueError, match="expert 0 sums to 65534, expected 65535"):
        Placement(slots[None], 3, topology, uneven[None])


def test_a_changed_row_gives_what_the_rows_give() -> None:
    """`with_row` takes shares of both kinds of row, into placements of both kinds."""
    start = Placement.initial(2, 8, 12, Topology(4))
    plain = start.row(0)
    twice = next(e for e in range(8) if (plain.slots == e).sum() == 2)
    shares = even_shares(plain.slots)
    shares[plain.slots == twice] = (60000, 5535)
    uneven = PlacementRow(plain.slots, shares)
    for before in (start, start.with_row(0, uneven)):
        for row in (plain, uneven):
            rows = [before.row(0), row]
            assert before.with_row(1, row).digest() == Placement.from_rows(rows, 8, Topology(4)).digest()


def test_digests_follow_the_design() -> None:
    slots = np.array([0, 1, 2, 0], dtype=np.int32)

    def blake(data: bytes) -> int:
        value = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
        return value & ((1 << 62) - 1)

    assert row_digest(slots, None) == row_digest(slots, even_shares(slots)) == blake(slots.tobytes())
    uneven = np.array([1, 65535, 65535, 65534], dtype=np.uint16)
    assert row_digest(slots, uneven) == blake(slots.tobytes() + uneven.tobytes())
    placement = Placement(np.stack([slots, slots]), 3, Topology(2)).with_row(1, PlacementRow(slots, uneven))
    rows = placement.row_digests()
    assert rows.tolist() == [row_digest(slots, None), row_digest(slots, uneven)]
    assert placement.digest() == placement_digest(rows) == blake(rows.astype("<i8").tobytes())


def test_b21_balancedness_runs_over_ranks() -> None:
    loads = [[10, 10, 10, 30], [20, 20, 20, 0], [0, 0, 0, 0]]
    result = balancedness(loads)
    assert result.per_layer.tolist() == [0.5, 0.75, 0.0]
    assert result.has_load.tolist() == [True, True, False]
    assert result.total == pytest.approx(0.6)
    assert (result.mean, result.worst, result.worst_layer) == (0.625, 0.5, 0)
    assert result.as_dict()["per_layer"] == [0.5, 0.75, None]
    nothing = balancedness(np.zeros((2, 4)))
    assert nothing.mean is nothing.worst is nothing.total is nothing.worst_layer is None
    huge = balancedness(np.full((3, 4), 1e308))
    assert huge.total == huge.mean == 1.0


def test_loads_are_divided_by_shares() -> None:
    slots = np.array([[0, 1, 2, 0]], dtype=np.int32)
    loads = [[6.0, 2.0, 1.0]]
    even = Placement(slots, 3, Topology(2))
    assert rank_loads(loads, even).tolist() == [[5.0, 4.0]]
    uneven = Placement(slots, 3, Topology(2), np.array([[0, 65535, 65535, 65535]]))
    assert slot_loads(loads, uneven).tolist() == [[0.0, 2.0, 1.0, 6.0]]


@pytest.mark.parametrize("bad", [np.nan, -1.0, np.inf, -np.inf])
def test_bad_loads_are_named_with_layer_and_expert(bad: float) -> None:
    loads = np.ones((3, 4))
    loads[1, 2] = bad
    with pytest.raises(ValueError, match="layer 1 expert 2"):
        validate_loads(loads)


def test_placement_file_round_trip(tmp_path) -> None:
    placement = Placement.initial(3, 4, 6, Topology(2))
    shares = even_shares(placement.physical_to_logical)
    shares[0, [0, 4]] = [1, 65534]
    placement = Placement(placement.physical_to_logical, 4, Topology(2), shares)
    path = tmp_path / "p.json"
    save_placement(path, placement, model="m", phase="decode", epoch=7, version=9)
    loaded, content = load_placement(path)
    assert loaded.digest() == placement.digest()
    assert (content.model, content.phase, content.epoch, content.version) == ("m", "decode", 7, 9)
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
    path.write_bytes(path.read_bytes().replace(b'"ep_size":2', b'"ep_size":4'))
    with pytest.raises(ValueError, match=r"p\.json: .*nearest valid num_slots"):
        load_placement(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"p\.json: not a placement file"):
        load_placement(path)


def test_model_shapes_have_slots_that_divide() -> None:
    slots = {name: shape.num_slots for name, shape in MODEL_SHAPES.items()}
    assert slots == {"dsv3": 288, "qwen3": 160, "kimi-k2": 448, "kimi-k3": 1024}
