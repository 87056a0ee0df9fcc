"""One layer's dispatch tables from its row, compiled: a switch of all layers must not show on the forward thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import describe
from evenroute.eplb._compiled import kernel
from evenroute.eplb.placement.placement import SHARE_TOTAL, PlacementRow
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.tables.tickets import TREE_REPLICAS, sequence_words

SPAN_COUNT_BITS = 10
FIELDS = (
    "physical_to_logical",
    "replica_offset",
    "replica_slot",
    "replica_threshold",
    "replica_span",
    "static_slot",
    "replica_payload",
    "static_payload",
    "replica_sequence",
    "replica_depth",
    "slot_entry",
)


def _read_only(values: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """A contiguous view that can't be written: numba compiles anew for a writable one, on the forward thread."""
    view = np.ascontiguousarray(values, dtype=dtype).view()
    view.flags.writeable = False
    return view


_EVEN = _read_only(np.zeros(0), np.uint16)


def fits_payload(num_slots: int, ep_size: int) -> bool:
    """True if offset (12 bits) and replicas (7 bits) of every expert fit beside its id in the kernels' payload."""
    return num_slots <= 1 << 12 and ep_size < 1 << 7


@kernel
def _static_choice(ranks, first, last, expert, ep_size, per_node, ep_rank):  # type: ignore[no-untyped-def]
    """Index (in first..last) of the replica that this rank uses: same rank, else same node, else dealt evenly.

    Ranks that must share a set of replicas take them in turn, from a start that differs by expert.
    """
    node = ep_rank // per_node
    begin = node * per_node
    on_node = 0
    for entry in range(first, last):
        if ranks[entry] == ep_rank:
            return entry  # never twice on a rank
        if ranks[entry] // per_node == node:
            on_node += 1
    if on_node:
        turn = ep_rank - begin
        for entry in range(first, last):
            if begin <= ranks[entry] < ep_rank:
                turn -= 1
        wanted = (turn + expert) % on_node
    else:
        without = node
        for other in range(node):
            for entry in range(first, last):
                if ranks[entry] // per_node == other:
                    without -= 1
                    break
        turn = without * per_node + ep_rank - begin
        wanted = (turn + expert) % (last - first)
    for entry in range(first, last):
        if on_node and ranks[entry] // per_node != node:
            continue
        if wanted == 0:
            return entry
        wanted -= 1
    return first


@kernel
def _fill(  # type: ignore[no-untyped-def]
    slots,
    shares,
    ep_size,
    per_node,
    ep_rank,
    with_entry,
    only_used,
    sequence_begin,
    p2l,
    offset,
    slot,
    threshold,
    span,
    static,
    payload,
    fixed,
    sequence,
    depth,
    slot_entry,
):
    depth[0] = 0
    num_slots, num_experts = len(slots), len(span)
    local = num_slots // ep_size
    for expert in range(num_experts + 1):
        offset[expert] = 0
    for p in range(num_slots):
        p2l[p] = slots[p]
        offset[slots[p] + 1] += 1
    for expert in range(num_experts):
        offset[expert + 1] += offset[expert]
    place = offset.copy()
    ranks = np.empty(num_slots, np.int64)
    used = np.zeros(num_experts, np.int64)
    for unused in range(2 if only_used else 1):
        for p in range(num_slots):  # in slot order, so that an expert's slots rise
            if only_used and (shares[p] == 0) != (unused == 1):
                continue
            entry = place[slots[p]]
            place[slots[p]] += 1
            used[slots[p]] += 1 - unused
            slot[entry] = p
            slot_entry[p] = entry
            ranks[entry] = p // local
    for expert in range(num_experts):
        first, last = offset[expert], offset[expert] + used[expert]
        count = last - first
        total, uneven = 0, 0
        for entry in range(last, offset[expert + 1]):
            threshold[entry] = 65535
        for entry in range(first, last):
            share = 65535 // count + (1 if entry - first < 65535 % count else 0)
            # Placements promise even shares over more than four replicas of a class.
            if len(shares) and shares[slot[entry]] != share and not (only_used and count > 4):
                share, uneven = np.int64(shares[slot[entry]]), 1
            total += share
            threshold[entry] = total
        sequence[expert] = 0
        if uneven and count > 2:
            depth[0] = max(depth[0], 1 if count <= 4 else 2)
        if uneven and count > 4:
            sequence[expert] = sequence_begin
            sequence_begin += 2048 * (4 if count <= 16 else 8 if count <= 256 else 16)
        span[expert] = (first << 11) | (count << 1) | uneven
        chosen = _static_choice(ranks, first, last, expert, ep_size, per_node, ep_rank)
        static[expert] = slot[chosen]
        inverted = (2047 - expert) << 20
        payload[expert] = inverted | (((first << 8) | (count << 1) | uneven) if with_entry else 0)
        fixed[expert] = inverted | slot[chosen]


@kernel
def _row_fault(slots, shares, num_experts, ep_size):  # type: ignore[no-untyped-def]
    """(0, 0) for a good row, else what is wrong (index of `_FAULTS`) and the slot or expert where."""
    local = len(slots) // ep_size
    total = np.zeros(num_experts, np.int64)
    last_rank = np.full(num_experts, -1, np.int64)
    for p in range(len(slots)):
        expert = slots[p]
        if expert < 0 or expert >= num_experts:
            return 1, p
        if last_rank[expert] == p // local:
            return 2, p
        last_rank[expert] = p // local
        total[expert] += shares[p] if len(shares) else 0
    for expert in range(num_experts):
        if last_rank[expert] < 0:
            return 3, expert
        if len(shares) and total[expert] != 65535:
            return 4, expert
    return 0, 0


_FAULTS = (
    "",
    "slot {} holds no expert of [0, {experts})",
    "slot {} holds an expert that its rank has already",
    "expert {} has no slot",
    "shares of expert {} do not sum to 65535",
)


def check_table_row(row: PlacementRow, num_slots: int, num_experts: int, topology: Topology) -> None:
    """ValueError unless a row of [P] integers is one of a placement of this shape (2 us for 288 slots)."""
    slots, shares = row[:2] if isinstance(row, tuple) and len(row) in (2, 3) else (None, None)
    for name, values in (("slots", slots), ("shares", shares)):
        if name == "shares" and values is None:
            continue
        if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu" or values.ndim != 1:
            found = describe(row if slots is None else values)
            raise ValueError(f"row.{name} must be a numpy array of integers [{num_slots}], found {found}")
        if len(values) != num_slots:
            raise ValueError(f"row has {len(values)} {name}, the tables have {num_slots} slots")
    assert slots is not None
    if shares is not None and shares.dtype != np.uint16:
        raise ValueError(f"row.shares must be uint16, found {shares.dtype}")
    if slots.dtype != np.int32 and not -1 <= slots.min() <= slots.max() < 1 << 31:
        raise ValueError(
            f"row.slots: experts of [0, {num_experts}) allowed, found {slots.min()}..{slots.max()}"
        )
    known = _EVEN if shares is None else _read_only(shares, np.uint16)
    sets = [] if len(row) < 3 or row.classes is None else list(row.classes.shares)
    for number, one in enumerate((known, *sets)):
        if number and (one.dtype != np.uint16 or one.shape != slots.shape):
            raise ValueError(f"row.classes.shares must be uint16 [sets, {num_slots}], found {describe(one)}")
        checked = (_read_only(slots, np.int32), _read_only(one, np.uint16))
        fault, where = _row_fault(*checked, num_experts, topology.ep_size)
        if fault:
            raise ValueError(f"row: {_FAULTS[fault].format(where, experts=num_experts)}")


def fill_table_row(
    row: PlacementRow,
    topology: Topology,
    ep_rank: int,
    sequence_begin: int,
    fields: dict[str, NDArray[np.int32]],
    *,
    only_used: bool = False,
) -> None:
    """Writes one layer's tables into `fields` (names of `FIELDS`, 1-D int32 views of the layer's storage).

    sequence_begin: word at which the layer's first order of tickets lies, the others behind it (`ticket_sequence.py`).

    only_used: of an expert's replicas those without a share come last, and are not counted.

    The row must come from a checked placement: experts in range, each with a slot, none twice on a rank.
    """
    _fill(
        _read_only(row.slots, np.int32),
        _EVEN if row.shares is None else _read_only(row.shares, np.uint16),
        topology.ep_size,
        topology.ranks_per_node,
        ep_rank,
        fits_payload(len(row.slots), topology.ep_size),
        only_used,
        sequence_begin,
        *(fields[name] for name in FIELDS),
    )


assert SHARE_TOTAL == 65535, "the kernels divide by 65535"
assert SPAN_COUNT_BITS == 10, "the compiled builder shifts by 11 and 1"
assert TREE_REPLICAS == 4, "the compiled builder knows when an expert needs an order of tickets"
assert [sequence_words(k) // 2048 for k in (5, 17, 257)] == [4, 8, 16], "and how long it is"
