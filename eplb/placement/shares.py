"""Arithmetic on rows of slots that are known to be good; `evenroute.eplb.placement.placement` checks them first."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SHARE_TOTAL = 65535


def count_replicas(rows: NDArray[Any], num_logical_experts: int) -> NDArray[np.int64]:
    """Slots of every expert: ``[L, P]`` -> ``[L, E]``, all entries in [0, E)."""
    keys = rows + np.arange(len(rows), dtype=np.int64)[:, None] * num_logical_experts
    counts = np.bincount(keys.ravel(), minlength=len(rows) * num_logical_experts)
    return counts.reshape(len(rows), num_logical_experts)


def logical_to_physical(
    rows: NDArray[Any], counts: NDArray[np.int64], width: int | None = None
) -> NDArray[np.int64]:
    """Slots of every expert, rising and padded with -1: ``[L, P]``, counts ``[L, E]`` -> ``[L, E, width]``.

    The width is that of the expert with the most replicas unless given.
    """
    most = int(counts.max(initial=1)) if width is None else width
    slots = np.full((*counts.shape, most), -1, dtype=np.int64)
    for layer, row in enumerate(rows):
        order = np.argsort(row, kind="stable")
        starts = np.cumsum(counts[layer]) - counts[layer]
        slots[layer, row[order], np.arange(row.size) - starts[row[order]]] = order
    return slots


def even_shares(slots: NDArray[Any]) -> NDArray[np.uint16]:
    """Equal shares ``[P]`` or ``[L, P]``: 65535 an expert, left-over units to its lowest slots."""
    rows = np.atleast_2d(slots).astype(np.int64)
    if rows.size == 0:
        return np.zeros(slots.shape, dtype=np.uint16)
    keys = rows + np.arange(len(rows))[:, None] * (int(rows.max()) + 1)
    flat = keys.ravel()
    counts = np.bincount(flat)
    order = np.argsort(flat, kind="stable")
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    replica = np.empty(flat.size, dtype=np.int64)
    replica[order] = np.arange(flat.size) - starts[flat[order]]
    count = counts[flat]
    shares: NDArray[np.uint16] = (SHARE_TOTAL // count + (replica < SHARE_TOTAL % count)).astype(np.uint16)
    return shares.reshape(slots.shape)


def uneven_or_none(slots: NDArray[Any], shares: NDArray[Any]) -> NDArray[np.uint16] | None:
    """``shares`` as uint16, or None where they are exactly the even ones."""
    return None if np.array_equal(shares, even_shares(slots)) else np.asarray(shares, dtype=np.uint16)


def share_sums(rows: NDArray[Any], shares: NDArray[Any], num_logical_experts: int) -> NDArray[np.int64]:
    """Sum of an expert's shares: ``[L, P]``, ``[L, P]`` -> ``[L, E]``."""
    keys = rows + np.arange(len(rows), dtype=np.int64)[:, None] * num_logical_experts
    cells = len(rows) * num_logical_experts
    sums = np.bincount(keys.ravel(), weights=shares.ravel().astype(np.float64), minlength=cells)
    return sums.astype(np.int64).reshape(len(rows), num_logical_experts)
