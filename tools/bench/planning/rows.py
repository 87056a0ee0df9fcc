"""Rows of the planner benchmark: one figure each, with what was promised of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure; ``ok`` is None where nothing was promised."""

    name: str
    value: float
    wanted: str
    ok: bool | None


def at_least(name: str, value: float, least: float | None) -> Row:
    """A promised lower bound; None: nothing is promised."""
    return note(name, value) if least is None else Row(name, value, f">= {least}", value >= least)


def at_most(name: str, value: float, most: float) -> Row:
    return Row(name, value, f"<= {most}", value <= most)


def note(name: str, value: float) -> Row:
    return Row(name, value, "", None)


@dataclass
class Clock:
    """CPU time of all threads and wall time of repeated calls, in seconds."""

    cpu: list[float]
    wall: list[float]

    @classmethod
    def new(cls) -> Clock:
        return cls([], [])

    def time(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        result = call(*arguments, **named)
        self.cpu.append(time.process_time() - cpu)
        self.wall.append(time.perf_counter() - wall)
        return result

    def ms(self, name: str) -> Iterator[Row]:
        yield note(f"{name}, CPU ms", median(self.cpu) * 1e3)
        yield note(f"{name}, wall ms", median(self.wall) * 1e3)

    def ratio(self, name: str, base: Clock, most: float) -> Row:
        return at_most(f"{name}: CPU time / baseline", median(self.cpu) / median(base.cpu), most)


def show(row: Row) -> None:
    """Print a row."""
    mark = "" if row.ok is None else "ok" if row.ok else "MISSED"
    digits = f"{row.value:.3g}" if row.value < 1e-3 or row.value >= 100 else f"{row.value:.4f}"
    print(f"{row.name:<62} {digits:>10}  {row.wanted:<22} {mark}", flush=True)
