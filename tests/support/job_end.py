"""The step at which all ranks of a test's job end: one that none of them can have passed when it is told."""

from __future__ import annotations

from pathlib import Path

AHEAD = 150  # votes keep ranks within a few steps of each other


class AgreedEnd:
    """Asked once a step by each rank. `stop`: the file by which the test asks for the end ("": there is none)."""

    def __init__(self, stop: str | Path, rank: int) -> None:
        self._stop = Path(stop) if stop else None
        self._rank = rank
        self.step: int | None = None

    def reached(self, step: int) -> bool:
        """Whether the job ends before `step`. Rank 0 sees the file, names the step and goes on; the others read it."""
        if self._stop is None:
            return False
        if self.step is None:
            agreed = self._stop.with_suffix(".agreed")
            if self._rank == 0 and self._stop.exists():
                partial = self._stop.with_suffix(".partial")
                partial.write_text(str(step + AHEAD))
                partial.rename(agreed)
            if agreed.exists():
                self.step = int(agreed.read_text())
                assert step <= self.step, "a rank was far ahead of rank 0"
        return step == self.step
