"""A placement: which logical expert every slot holds, and how its tokens divide over its replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_integer, as_integers, describe, require_instance
from evenroute.eplb._notebook import heat_map, page, slot_frame
from evenroute.eplb.placement.classes import ShareClasses, check_classes, pack_shares, stack_classes
from evenroute.eplb.placement.shares import SHARE_TOTAL as SHARE_TOTAL
from evenroute.eplb.placement.shares import count_replicas, even_shares, share_sums, uneven_or_none
from evenroute.eplb.placement.topology import MAX_LOGICAL_EXPERTS, Topology, check_num_slots

DIGEST_MASK = (1 << 62) - 1
MAX_ENTRIES = 1 << 28  # of a table [L, P] made from numbers alone


class PlacementRow(NamedTuple):
    """One layer: ``slots [P] int32`` (the expert of each slot), ``shares [P] uint16`` or None for even, and further
    sets of shares for small batches."""

    slots: NDArray[np.int32]
    shares: NDArray[np.uint16] | None
    classes: ShareClasses | None = None


def _blake2b62(*parts: bytes) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") & DIGEST_MASK


def _shares(values: Any, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Shares that a caller hands in for slots of this shape."""
    shares = as_integers("shares", values, np.uint16, 0, SHARE_TOTAL)
    if shares.shape != shape:
        raise ValueError(f"shares must have the shape of slots {list(shape)}, found {list(shares.shape)}")
    return shares


def row_digest(slots: NDArray[Any], shares: NDArray[Any] | None, classes: ShareClasses | None = None) -> int:
    """62-bit blake2b of a layer: ``slots [P]`` as little-endian int32, then uneven ``shares [P]`` as uint16.

    With classes: even shares too, then ``rows [C]`` as int32 and the classes' shares as uint16.
    """
    uneven = None if shares is None else uneven_or_none(slots, shares)
    packed = pack_shares(slots, uneven, classes)
    return _blake2b62(np.ascontiguousarray(slots, dtype="<i4").tobytes(), packed or b"")


def placement_digest(row_digests: Sequence[int] | NDArray[np.int64]) -> int:
    """62-bit blake2b over the digests of the rows as little-endian int64."""
    return _blake2b62(np.asarray(row_digests, dtype="<i8").tobytes())


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
    missing = np.argwhere(count_replicas(rows, num_logical_experts) == 0)
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
    sums = share_sums(rows, shares, num_logical_experts)
    bad = np.argwhere(sums != SHARE_TOTAL)
    if len(bad):
        layer, expert = (int(i) for i in bad[0])
        raise ValueError(
            f"shares: layer {layer} expert {expert} sums to {sums[layer, expert]}, expected {SHARE_TOTAL}"
        )


def _checked_row(name: str, row: PlacementRow) -> PlacementRow:
    """A row that a caller hands in, as arrays of one length; the constructor checks the experts."""
    require_instance(name, row, PlacementRow)
    slots = as_integers(f"{name}: slots", row.slots, np.int32, 1 - 2**31, 2**31 - 1)
    if slots.ndim != 1:
        raise ValueError(f"{name}: slots must be [slots], found shape {list(slots.shape)}")
    if row.classes is not None:
        require_instance(f"{name}: classes", row.classes, ShareClasses)
    if row.shares is None:
        return PlacementRow(slots, None, row.classes)
    try:
        return PlacementRow(slots, _shares(row.shares, slots.shape), row.classes)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True, eq=False)
class Placement:
    """Checked, read-only placement of all layers; slot ``p`` lives on rank ``p // (P // ep_size)``.

    Attributes:
        physical_to_logical: ``[L, P] int32``.
        num_logical_experts: E.
        topology: ranks and nodes.
        shares: ``[L, P] uint16`` summing to 65535 an expert, or None where all layers are even.
        classes: further sets of shares for small batches, or None.

    Raises:
        ValueError: an id out of range, an expert without a slot or twice on a rank, slots that do not divide
            over the ranks, shares that do not sum to 65535, classes whose rows do not rise.
    """

    physical_to_logical: NDArray[np.int32]
    num_logical_experts: int
    topology: Topology
    shares: NDArray[np.uint16] | None = None
    classes: ShareClasses | None = None

    def __post_init__(self) -> None:
        require_instance("topology", self.topology, Topology)
        experts = as_integer("num_logical_experts", self.num_logical_experts, 1, MAX_LOGICAL_EXPERTS)
        object.__setattr__(self, "num_logical_experts", experts)
        limit = 2**31 - 1
        rows = as_integers("physical_to_logical", self.physical_to_logical, np.int32, -limit, limit)
        if rows.ndim != 2:
            raise ValueError(f"physical_to_logical must be [layers, slots], found shape {list(rows.shape)}")
        check_num_slots(self.num_logical_experts, rows.shape[1], self.topology.ep_size)
        _check_rows(rows, self.num_logical_experts, self.topology.ep_size)
        rows.setflags(write=False)
        object.__setattr__(self, "physical_to_logical", rows)
        if self.classes is not None:
            classes = check_classes("classes", self.classes, rows, self.num_logical_experts)
            object.__setattr__(self, "classes", classes)
        if self.shares is None:
            return
        shares = as_integers("shares", self.shares, np.uint16, 0, SHARE_TOTAL)
        if shares.shape != rows.shape:
            raise ValueError(
                f"shares must have the shape of physical_to_logical {list(rows.shape)}, "
                f"found {list(shares.shape)}"
            )
        _check_shares(rows, shares, self.num_logical_experts)
        shares.setflags(write=False)
        uneven = uneven_or_none(rows, shares)
        object.__setattr__(self, "shares", shares if uneven is not None else None)

    def __repr__(self) -> str:
        layers, slots = self.physical_to_logical.shape
        shares = "even" if self.shares is None else "uneven"
        sets = "" if self.classes is None else f", {len(self.classes.sizes())} sets for small batches"
        return (
            f"<Placement {layers} layers, {self.num_logical_experts} experts in {slots} slots on "
            f"{self.topology.ep_size} ranks, {shares} shares{sets}>"
        )

    def _repr_html_(self) -> str:
        replicas = count_replicas(self.physical_to_logical, self.num_logical_experts)
        return page(repr(self), heat_map(replicas.astype(np.float64), "replicas", "layers", "experts"))

    def to_dataframe(self) -> Any:
        """A pandas DataFrame by slot: ``layer, rank, slot, expert, share`` (of 1); ImportError without pandas."""
        shares = even_shares(self.physical_to_logical) if self.shares is None else self.shares
        return slot_frame(self.physical_to_logical, shares / SHARE_TOTAL, self.num_local_slots)

    @classmethod
    def initial(
        cls, num_layers: int, num_logical_experts: int, num_slots: int, topology: Topology
    ) -> Placement:
        """Slot p holds expert ``p mod E``: identity, then redundancy round-robin.

        A rank's slots are P / ep_size <= E consecutive ones, so no expert comes twice on it.
        """
        require_instance("topology", topology, Topology)
        num_layers, num_slots = as_integer("num_layers", num_layers, 0), as_integer("num_slots", num_slots)
        experts = as_integer("num_logical_experts", num_logical_experts, 1, MAX_LOGICAL_EXPERTS)
        check_num_slots(experts, num_slots, topology.ep_size)
        if num_layers * num_slots > MAX_ENTRIES:
            raise ValueError(
                f"num_layers={num_layers}, num_slots={num_slots}: a placement has at most {MAX_ENTRIES} entries"
            )
        row = (np.arange(num_slots) % experts).astype(np.int32)
        return cls(np.tile(row, (num_layers, 1)), experts, topology)

    @classmethod
    def from_rows(
        cls, rows: Sequence[PlacementRow], num_logical_experts: int, topology: Topology
    ) -> Placement:
        """Placement of these layers, in order; raises ValueError like the constructor."""
        if not isinstance(rows, Sequence):
            raise ValueError(f"rows must be a list of PlacementRow, found {describe(rows)}")
        if not rows:
            raise ValueError("rows must hold at least one layer, found none")
        rows = [_checked_row(f"rows: layer {layer}", row) for layer, row in enumerate(rows)]
        lengths = {len(row.slots) for row in rows}
        if len(lengths) != 1:
            raise ValueError(f"rows must have one number of slots, found {sorted(lengths)}")
        shares = None
        if any(row.shares is not None for row in rows):
            shares = np.stack([even_shares(row.slots) if row.shares is None else row.shares for row in rows])
        classes = stack_classes([row.classes for row in rows], lengths.pop())
        return cls(np.stack([row.slots for row in rows]), num_logical_experts, topology, shares, classes)

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
        layer = self._layer(layer)
        slots = self.physical_to_logical[layer]
        shares = None if self.shares is None else uneven_or_none(slots, self.shares[layer])
        return PlacementRow(slots, shares, None if self.classes is None else self.classes.of_layer(layer))

    def rows(self) -> list[PlacementRow]:
        """Rows of all layers, as `row` gives each."""
        slots, shares, classes = self.physical_to_logical, self.shares, self.classes
        own: list[NDArray[np.uint16] | None] = [None] * len(slots)
        if shares is not None:
            uneven = (shares != even_shares(slots)).any(axis=1)
            own = [shares[i] if uneven[i] else None for i in range(len(slots))]
        sets = [None if classes is None else classes.of_layer(i) for i in range(len(slots))]
        return [PlacementRow(*parts) for parts in zip(slots, own, sets, strict=True)]

    def all_shares(self) -> NDArray[np.uint16]:
        """A copy of the shares ``[L, P]``, even ones written out."""
        return even_shares(self.physical_to_logical) if self.shares is None else self.shares.copy()

    def _layer(self, layer: int) -> int:
        layer = as_integer("layer", layer)
        if not 0 <= layer < self.num_layers:
            raise ValueError(f"layer={layer} is outside [0, num_layers={self.num_layers})")
        return layer

    def with_row(self, layer: int, row: PlacementRow) -> Placement:
        """A new placement that differs in one layer."""
        layer = self._layer(layer)
        row = _checked_row("row", row)
        if len(row.slots) != self.num_slots:
            raise ValueError(f"row must have num_slots={self.num_slots} slots, found {len(row.slots)}")
        table, shares = self.physical_to_logical.copy(), None
        table[layer] = row.slots
        if self.shares is not None or row.shares is not None:
            shares = self.all_shares()
            shares[layer] = even_shares(row.slots) if row.shares is None else row.shares
        classes = None
        if self.classes is not None or row.classes is not None:
            sets = [each.classes for each in self.rows()]
            sets[layer] = row.classes
            classes = stack_classes(sets, self.num_slots)
        return Placement(table, self.num_logical_experts, self.topology, shares, classes)

    def row_digests(self) -> NDArray[np.int64]:
        """``[L] int64``, 62-bit digests of the rows."""
        return np.asarray([row_digest(*row) for row in self.rows()], dtype=np.int64)

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
        require_instance("target", target, Placement)
        mine = (self.num_layers, self.num_logical_experts, self.topology.ep_size)
        other = (target.num_layers, target.num_logical_experts, target.topology.ep_size)
        if mine != other:
            raise ValueError(f"placements differ in (layers, experts, ep_size): {mine} and {other}")
        rank_of_slot = np.arange(target.num_slots) // target.num_local_slots
        layers = np.arange(target.num_layers)[:, None]
        there = self.holds()[layers, rank_of_slot[None, :], target.physical_to_logical]
        return np.asarray((~there).sum(axis=1), dtype=np.int64)
