"""A placement: which logical expert every slot holds, and how its tokens divide over its replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.topology import Topology, check_num_slots, require_positive

SHARE_TOTAL = 65535
DIGEST_MASK = (1 << 62) - 1


class PlacementRow(NamedTuple):
    """One layer: ``slots [P] int32`` (the expert of each slot), ``shares [P] uint16`` or None for even."""

    slots: NDArray[np.int32]
    shares: NDArray[np.uint16] | None


def _blake2b62(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") & DIGEST_MASK


def row_digest(slots: NDArray[Any], shares: NDArray[Any] | None) -> int:
    """62-bit blake2b of a layer: ``slots [P]`` as little-endian int32, then uneven ``shares [P]`` as uint16."""
    parts = [np.ascontiguousarray(slots, dtype="<i4").tobytes()]
    if shares is not None:
        uneven = normalize_shares(np.asarray(slots), np.asarray(shares))
        if uneven is not None:
            parts.append(np.ascontiguousarray(uneven, dtype="<u2").tobytes())
    return _blake2b62(*parts)


def placement_digest(row_digests: Iterable[int] | NDArray[np.int64]) -> int:
    """62-bit blake2b over the digests of the rows as little-endian int64."""
    return _blake2b62(np.asarray(list(row_digests), dtype="<i8").tobytes())


def replica_counts(physical_to_logical: NDArray[Any], num_logical_experts: int) -> NDArray[np.int64]:
    """Slots of every expert: ``[L, P]`` (or ``[P]``) -> ``[L, E]`` (or ``[E]``)."""
    rows = np.atleast_2d(physical_to_logical)
    keys = rows + np.arange(len(rows), dtype=np.int64)[:, None] * num_logical_experts
    counts = np.bincount(keys.ravel(), minlength=len(rows) * num_logical_experts)
    counts = counts.reshape(len(rows), num_logical_experts)
    return counts if physical_to_logical.ndim == 2 else counts[0]


def even_shares(slots: NDArray[Any]) -> NDArray[np.uint16]:
    """Equal shares ``[P] uint16`` (or ``[L, P]``): 65535 an expert, left-over units to its lowest slots."""
    rows = np.atleast_2d(np.asarray(slots)).astype(np.int64)
    if rows.size == 0:
        return np.zeros(np.shape(slots), dtype=np.uint16)
    keys = rows + np.arange(len(rows))[:, None] * (int(rows.max()) + 1)
    flat = keys.ravel()
    counts = np.bincount(flat)
    order = np.argsort(flat, kind="stable")
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    replica = np.empty(flat.size, dtype=np.int64)
    replica[order] = np.arange(flat.size) - starts[flat[order]]
    count = counts[flat]
    shares: NDArray[np.uint16] = (SHARE_TOTAL // count + (replica < SHARE_TOTAL % count)).astype(np.uint16)
    return shares.reshape(np.shape(slots))


def normalize_shares(slots: NDArray[Any], shares: NDArray[Any] | None) -> NDArray[np.uint16] | None:
    """``shares`` as uint16, or None where they are exactly the even ones."""
    if shares is None or np.array_equal(shares, even_shares(slots)):
        return None
    return np.asarray(shares, dtype=np.uint16)


def _check_rows(rows: NDArray[np.int32], num_logical_experts: int, ep_size: int) -> None:
    """Range, coverage and no expert twice on a rank; ValueError names layer, slot or expert, and the rule."""
    bad = np.argwhere((rows < 0) | (rows >= num_logical_experts))
    if len(bad):
        layer, slot = (int(i) for i in bad[0])
        found = int(rows[layer, slot])
        raise ValueError(
            f"physical_to_logical: layer {layer} slot {slot} holds expert {found}, "
            f"outside [0, num_logical_experts={num_logical_experts})"
        )
    missing = np.argwhere(replica_counts(rows, num_logical_experts) == 0)
    if len(missing):
        layer, expert = (int(i) for i in missing[0])
        raise ValueError(f"physical_to_logical: layer {layer} has no slot for expert {expert}")
    by_rank = np.sort(rows.reshape(len(rows), ep_size, rows.shape[1] // ep_size), axis=2)
    twice = np.argwhere(by_rank[:, :, 1:] == by_rank[:, :, :-1])
    if len(twice):
        layer, rank, place = (int(i) for i in twice[0])
        raise ValueError(
            f"physical_to_logical: layer {layer} has expert {int(by_rank[layer, rank, place])} "
            f"twice on rank {rank}"
        )


def _check_shares(rows: NDArray[np.int32], shares: NDArray[np.uint16], num_logical_experts: int) -> None:
    layers = np.arange(len(rows))[:, None]
    sums = np.bincount(
        (rows + layers * num_logical_experts).ravel(),
        weights=shares.ravel().astype(np.float64),
        minlength=len(rows) * num_logical_experts,
    ).reshape(len(rows), num_logical_experts)
    bad = np.argwhere(sums != SHARE_TOTAL)
    if len(bad):
        layer, expert = (int(i) for i in bad[0])
        raise ValueError(
            f"shares: layer {layer} expert {expert} sums to {int(sums[layer, expert])}, "
            f"expected {SHARE_TOTAL}"
        )


def _integer_array(name: str, values: Any, dtype: type, low: int, high: int) -> NDArray[Any]:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must hold integers, found dtype {array.dtype}")
    if array.size and (int(array.min()) < low or int(array.max()) > high):
        raise ValueError(
            f"{name} must lie in [{low}, {high}], found {int(array.min())} .. {int(array.max())}"
        )
    return np.array(array, dtype=dtype, order="C", copy=True)


@dataclass(frozen=True, eq=False)
class Placement:
    """Checked, read-only placement of all layers; slot ``p`` lives on rank ``p // (P // ep_size)``.

    Attributes:
        physical_to_logical: ``[L, P] int32``.
        num_logical_experts: E.
        topology: ranks and nodes.
        shares: ``[L, P] uint16`` summing to 65535 an expert, or None where all layers are even.

    Raises:
        ValueError: an id out of range, an expert without a slot or twice on a rank, slots that do not divide
            over the ranks, shares that do not sum to 65535.
    """

    physical_to_logical: NDArray[np.int32]
    num_logical_experts: int
    topology: Topology
    shares: NDArray[np.uint16] | None = None

    def __post_init__(self) -> None:
        limit = 2**31 - 1
        rows = _integer_array("physical_to_logical", self.physical_to_logical, np.int32, -limit, limit)
        if rows.ndim != 2:
            raise ValueError(f"physical_to_logical must be [layers, slots], found shape {list(rows.shape)}")
        check_num_slots(self.num_logical_experts, rows.shape[1], self.topology.ep_size)
        _check_rows(rows, self.num_logical_experts, self.topology.ep_size)
        rows.setflags(write=False)
        object.__setattr__(self, "physical_to_logical", rows)
        if self.shares is None:
            return
        shares = _integer_array("shares", self.shares, np.uint16, 0, SHARE_TOTAL)
        if shares.shape != rows.shape:
            raise ValueError(
                f"shares must have the shape of physical_to_logical {list(rows.shape)}, "
                f"found {list(shares.shape)}"
            )
        _check_shares(rows, shares, self.num_logical_experts)
        shares.setflags(write=False)
        uneven = normalize_shares(rows, shares)
        object.__setattr__(self, "shares", shares if uneven is not None else None)

    @classmethod
    def initial(
        cls, num_layers: int, num_logical_experts: int, num_slots: int, topology: Topology
    ) -> Placement:
        """Slot p holds expert ``p mod E``: identity, then redundancy round-robin.

        A rank's slots are P / ep_size <= E consecutive ones, so no expert comes twice on it.
        """
        if num_layers < 0:
            raise ValueError(f"num_layers must be >= 0, found {num_layers}")
        require_positive("num_logical_experts", num_logical_experts)
        check_num_slots(num_logical_experts, num_slots, topology.ep_size)
        row = (np.arange(num_slots) % num_logical_experts).astype(np.int32)
        return cls(np.tile(row, (num_layers, 1)), num_logical_experts, topology)

    @classmethod
    def from_rows(
        cls, rows: Sequence[PlacementRow], num_logical_experts: int, topology: Topology
    ) -> Placement:
        """Placement of these layers, in order; raises ValueError like the constructor."""
        if not rows:
            raise ValueError("rows must hold at least one layer, found none")
        lengths = {len(row.slots) for row in rows}
        if len(lengths) != 1:
            raise ValueError(f"rows must have one number of slots, found {sorted(lengths)}")
        shares = None
        if any(row.shares is not None for row in rows):
            shares = np.stack([even_shares(row.slots) if row.shares is None else row.shares for row in rows])
        return cls(np.stack([row.slots for row in rows]), num_logical_experts, topology, shares)

    @property
    def num_layers(self) -> int:
        return int(self.physical_to_logical.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.physical_to_logical.shape[1])

    @property
    def num_local_slots(self) -> int:
        return self.num_slots // self.topology.ep_size

    def row(self, layer: int) -> PlacementRow:
        """Row of one layer; shares is None where that layer is exactly even."""
        slots = self.physical_to_logical[layer]
        shares = None if self.shares is None else normalize_shares(slots, self.shares[layer])
        return PlacementRow(slots, shares)

    def with_row(self, layer: int, row: PlacementRow) -> Placement:
        """A new placement that differs in one layer."""
        rows = [row if i == layer else self.row(i) for i in range(self.num_layers)]
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} is outside [0, num_layers={self.num_layers})")
        return Placement.from_rows(rows, self.num_logical_experts, self.topology)

    def row_digests(self) -> NDArray[np.int64]:
        """``[L] int64``, 62-bit digests of the rows."""
        digests = [row_digest(*self.row(layer)) for layer in range(self.num_layers)]
        return np.asarray(digests, dtype=np.int64)

    def digest(self) -> int:
        return placement_digest(self.row_digests())

    def is_trivial(self) -> bool:
        """True if physical and logical ids are the same in all layers."""
        if self.num_slots != self.num_logical_experts:
            return False
        return bool((self.physical_to_logical == np.arange(self.num_slots, dtype=np.int32)).all())

    def holds(self) -> NDArray[np.bool_]:
        """``[L, R, E]``: does the rank hold the expert."""
        layers, ranks = self.num_layers, self.topology.ep_size
        table = np.zeros((layers, ranks, self.num_logical_experts), dtype=np.bool_)
        rank_of_slot = np.arange(self.num_slots) // self.num_local_slots
        table[np.arange(layers)[:, None], rank_of_slot[None, :], self.physical_to_logical] = True
        return table

    def moved_slots(self, target: Placement) -> NDArray[np.int64]:
        """``[L]``: slots of ``target`` whose expert is not on that rank here.

        Raises:
            ValueError: the two placements differ in layers, experts or ranks.
        """
        mine = (self.num_layers, self.num_logical_experts, self.topology.ep_size)
        other = (target.num_layers, target.num_logical_experts, target.topology.ep_size)
        if mine != other:
            raise ValueError(f"placements differ in (layers, experts, ep_size): {mine} and {other}")
        rank_of_slot = np.arange(target.num_slots) // target.num_local_slots
        layers = np.arange(target.num_layers)[:, None]
        there = self.holds()[layers, rank_of_slot[None, :], target.physical_to_logical]
        return np.asarray((~there).sum(axis=1), dtype=np.int64)
