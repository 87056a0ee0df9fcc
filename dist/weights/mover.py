"""What moves a layer from its live row to a target row: the interface that the rank agent drives, and the version that
moves tables only. No torch here: the agreement and its simulator import this file in the base install."""

from dataclasses import dataclass
from typing import Protocol

from evenroute.eplb._checks import MAX_INTEGER, require_int, require_parts
from evenroute.eplb.placement.placement import Placement, PlacementRow


@dataclass
class MoveTotals:
    """What a mover has done so far: chunks enqueued here, seconds that they took here (once seen done), slots moved in
    the whole job, bytes of one expert of one layer (mean over layers)."""

    chunks: int = 0
    seconds: float = 0.0
    slots: int = 0
    slot_bytes: int = 0


class LayerMover(Protocol):
    """Driven by the rank agent on the forward thread, on every rank with the same calls in the same order.

    A target's life: `discard()` (always, as the target starts: nothing is open then, and the count of `staged` begins
    anew), `commit_layer` for the layers that need no transfer, then `open_layer` / `advance` / `commit_layer` until all
    its layers are committed, or `discard()` when it has failed. At most `num_buffers` layers are open at a time; layers
    are committed in the order in which they were opened. One that has `totals` (`MoveTotals`) has its moves priced.
    """

    num_buffers: int
    """How many layers may be opened beyond the committed ones. Equal on all ranks."""

    def load(self, placement: Placement) -> None:
        """Job start: make tables (and weights) hold `placement`, or raise."""

    def open_layer(self, layer: int, live: PlacementRow, target: PlacementRow) -> None:
        """Queue the transfer of `layer` from the row in use to `target`. What moves, and from where, follows from the
        two rows alone."""

    def advance(self) -> None:
        """Once a step, after the layers of this step are opened: enqueue the next chunk, the same on all ranks.
        Raises RuntimeError, naming operation and layer, when a transfer fails or outlasts its limit."""

    def staged(self) -> int:
        """How many of the layers opened since the last `discard()` have all their weights here, counted as a prefix of
        the order of opening; committed ones are included. Never falls between two calls of `discard()`."""

    def error(self) -> str | None:
        """What is wrong with the content staged since the last `discard()`, or None. The rank goes on taking part in
        all transfers that are open."""

    def commit_layer(self, layer: int, row: PlacementRow) -> None:
        """Weights of the moved slots if the layer is open, then tables. Enqueued on the forward stream."""

    def discard(self) -> None:
        """Drop what is opened and not committed; live weights and tables stay. Called when all of it is staged on all
        ranks or nothing is open. Clears `staged` and `error`."""

    def in_flight(self) -> str | None:
        """The transfer under way, operation and layer, for messages about a failure meanwhile; None if idle."""


class TableUpdater(Protocol):
    """The part of `routing.tables.DispatchTables` that a mover needs."""

    def update_layer(self, layer: int, row: PlacementRow) -> None: ...

    def load(self, placement: Placement) -> None: ...


class TablesOnly:
    """A `LayerMover` for engines without weights here (routing alone, or weights moved elsewhere): staged at once."""

    def __init__(self, tables: TableUpdater, *, num_buffers: int = 4) -> None:
        require_parts("tables", tables, "DispatchTables", ("update_layer", "load"))
        require_int("num_buffers", num_buffers, 1, MAX_INTEGER)
        self.num_buffers = num_buffers
        self._tables = tables
        self._opened: list[int] = []  # open and not committed, in the order of opening
        self._num_committed = 0

    def __repr__(self) -> str:
        return f"<TablesOnly {self._tables!r}>"

    def load(self, placement: Placement) -> None:
        """Write `placement` into the tables."""
        self._tables.load(placement)

    def open_layer(self, layer: int, live: PlacementRow, target: PlacementRow) -> None:
        """Note the layer; there is nothing to transfer."""
        assert layer not in self._opened, f"layer {layer} is open already"
        assert len(self._opened) < self.num_buffers, "more layers open than buffers"
        self._opened.append(layer)

    def advance(self) -> None:
        """Nothing to enqueue."""

    def staged(self) -> int:
        """All opened layers."""
        return self._num_committed + len(self._opened)

    def error(self) -> str | None:
        """Tables alone have no content to go wrong."""
        return None

    def commit_layer(self, layer: int, row: PlacementRow) -> None:
        """Write `row` into the tables."""
        if layer in self._opened:
            assert self._opened[0] == layer, f"layer {layer} committed before layer {self._opened[0]}"
            self._opened.pop(0)
            self._num_committed += 1
        self._tables.update_layer(layer, row)

    def discard(self) -> None:
        """Forget the opened layers and start a new count."""
        self._opened.clear()
        self._num_committed = 0

    def in_flight(self) -> str | None:
        """Never anything."""
        return None
