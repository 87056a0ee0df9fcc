"""Real loads, and a plain checker that judges placements without the planner's own code."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"


def real_loads(name: str | None = None) -> dict[str, np.ndarray]:
    """Loads ``[58, 256]`` of the shared files by name; skips the test visibly where they are absent."""
    files = sorted(SHARED_DATA.glob("*.json"))
    if not files:
        pytest.skip(f"real loads are not there: {SHARED_DATA}")
    found = {}
    for path in files:
        if name in (None, path.stem):
            rows = np.asarray(json.loads(path.read_text())["logical_count"])
            found[path.stem] = rows[rows.sum(axis=1) > 0]
    return found


def plain_check(placement, loads, ep_size: int) -> tuple[float, float]:
    """Mean and worst balancedness, recounted with sets and loops; asserts that the placement is valid."""
    figures = []
    shares = placement.shares
    for layer, (slots, load) in enumerate(zip(placement.physical_to_logical.tolist(), loads, strict=True)):
        local = len(slots) // ep_size
        assert local * ep_size == len(slots)
        assert set(slots) == set(range(len(load))), "an expert has no slot"
        total = dict.fromkeys(range(len(load)), 0)
        for p, e in enumerate(slots):
            total[e] += 1 if shares is None else int(shares[layer, p])
        if shares is not None:
            assert set(total.values()) == {65535}
        ranks = [0.0] * ep_size
        for rank in range(ep_size):
            held = slots[rank * local : (rank + 1) * local]
            assert len(set(held)) == local, f"layer {layer} rank {rank} holds an expert twice"
            for p, e in enumerate(held, start=rank * local):
                part = 1 if shares is None else int(shares[layer, p])
                ranks[rank] += float(load[e]) * part / total[e]
        if max(ranks) > 0:
            figures.append(sum(ranks) / ep_size / max(ranks))
    return (sum(figures) / len(figures), min(figures)) if figures else (1.0, 1.0)


def plain_moves(before, after, ep_size: int) -> list[int]:
    """Slots a layer whose expert its rank did not hold, recounted with sets."""
    moved = []
    for old, new in zip(before.physical_to_logical.tolist(), after.physical_to_logical.tolist(), strict=True):
        a, b = len(old) // ep_size, len(new) // ep_size
        moved.append(
            sum(len(set(new[r * b : (r + 1) * b]) - set(old[r * a : (r + 1) * a])) for r in range(ep_size))
        )
    return moved
