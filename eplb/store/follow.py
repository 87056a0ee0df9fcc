"""What a live view reads again and again from a store that is being written: only what is new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from evenroute.eplb.store.reader import WINDOWS, StoreReader
from evenroute.eplb.store.schema import IN_USE_EVENT, EventRow, WindowRow


@dataclass(frozen=True)
class PlacementNote:
    """A published placement without its slots; `moved_slots` over all layers, balancedness None where not known."""

    time: float
    epoch: int
    version: int
    balancedness_before: float | None
    balancedness_predicted: float | None
    moved_slots: int
    layers_changed: int
    policy: str
    reason: str


class StoreFollower(StoreReader):
    """A reader for one who comes back."""

    def __enter__(self) -> StoreFollower:
        return self

    def rolled_up(self, before: float) -> Iterator[WindowRow]:
        """Spans that retention summed up, with time < before, by time; and windows alone in theirs before the last."""
        newest = "(SELECT max(time) FROM windows WHERE rolled_up > 0)"
        return self._window_rows(f"{WINDOWS} WHERE time < ? AND time <= {newest} ORDER BY time", (before,))

    def newest_window_time(self) -> float | None:
        """Seconds since 1970; None in a store without windows."""
        return next((time for (time,) in self._rows("SELECT max(time) FROM windows")), None)  # type: ignore[return-value]

    def in_use_after(self, number: int) -> Iterator[tuple[int, EventRow]]:
        """(number, event) of what the ranks route with (`decode_in_use`), those above ``number``, in order."""
        query = "SELECT id, time, epoch, kind, text FROM events WHERE id > ? AND kind = ? ORDER BY id"
        for number_of, *row in self._rows(query, (number, IN_USE_EVENT)):
            yield number_of, EventRow(*row)  # type: ignore[arg-type, misc]

    def placement_notes(self, last: int) -> list[PlacementNote]:
        """The newest ``last`` published placements, oldest first."""
        query = (
            "SELECT time, epoch, version, balancedness_before, balancedness_predicted, moves, policy, reason "
            "FROM placements ORDER BY epoch DESC, version DESC LIMIT ?"
        )
        found = []
        for time, epoch, version, before, predicted, moves, policy, reason in self._rows(query, (last,)):
            moved = np.frombuffer(moves, dtype="<i8")  # type: ignore[call-overload]
            about = (before, predicted, int(moved.sum()), int((moved > 0).sum()), policy, reason)
            found.append(PlacementNote(time, epoch, version, *about))  # type: ignore[arg-type]
        return found[::-1]
