"""The simulator's store: in memory, with a record of who wrote what."""

from collections.abc import Sequence
from typing import Any

from evenroute.dist.protocol.store import PublishedPlacement, RankWindowRow, Receipt
from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.placement.placement import PlacementRow
from support.memory_store import MemoryStore
from support.simulator_history import History, SealRecord, WriteRecord


class SimStore(MemoryStore):
    """``contents``: (run, rank, seq) of all windows that were ever inserted."""

    def __init__(self, number: int, history: History, job: JobShape) -> None:
        super().__init__()
        self.number = number
        self.contents: set[tuple[int, int, int]] = set()
        self._history = history

    def _wrote(self, epoch: int | None, what: str) -> None:
        if epoch is not None:
            self._history.writes.append(WriteRecord(self.number, epoch, self.last_epoch(), what))

    def add_windows(self, windows: Sequence[RankWindowRow], *, epoch: int, **other: Any) -> list[Receipt]:
        receipts = super().add_windows(windows, epoch=epoch, **other)
        for receipt in receipts:
            if receipt.stored:
                w = receipt.window
                content = (w.first_step, w.last_step, w.tokens, w.counts.tobytes())
                self._history.stored.append((self.number, SealRecord(w.run, w.rank, w.seq, content)))
                self.contents.add((w.run, w.rank, w.seq))
        self._wrote(epoch, "windows")
        return receipts

    def add_placement(self, published: PublishedPlacement) -> None:
        super().add_placement(published)
        self._wrote(published.epoch, "a placement")

    def keep_row(self, digest: int, row: PlacementRow, *, epoch: int | None) -> None:
        super().keep_row(digest, row, epoch=epoch)
        self._wrote(epoch, "a row")
