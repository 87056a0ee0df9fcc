"""The rows that a membership begins with: pure functions of the rows before it, the same on all members."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.placement import DIGEST_MASK

Rows = NDArray[np.int32]
"""``[L, P] int32``: which expert each slot holds."""


def columns_of(rows: Rows, ep_size: int) -> Rows:
    """``[L, P]`` as ``[L, ep_size, local slots]`` (a view)."""
    return rows.reshape(len(rows), ep_size, -1)


def kept_rows(rows: Rows, before: Sequence[int], after: Sequence[int], added: Rows | None = None) -> Rows:
    """The columns of the members ``after``, from ``rows`` over the members ``before``.

    Members that are not in ``before`` take theirs, in order, from ``added`` ``[joiners, L, local slots]``.
    """
    old = columns_of(rows, len(before))
    place = {member: rank for rank, member in enumerate(before)}
    joined = iter(() if added is None else added)
    parts = [old[:, place[one]] if one in place else next(joined) for one in after]
    return np.concatenate(parts, axis=1).astype(np.int32)


def covers(rows: Rows, num_experts: int) -> bool:
    """Whether every expert has a slot in every layer."""
    return all(len(np.unique(row)) == num_experts for row in rows)


def refilled(rows: Rows, num_experts: int, ep_size: int) -> Rows:
    """Experts without a slot, ascending, each take a slot of the expert with most replicas.

    Ties: the lowest expert, then its lowest slot on a rank that lacks the one to come. Needs ``P >= num_experts`` and
    no expert twice on a rank.
    """
    out = rows.copy()
    local = out.shape[1] // ep_size
    for row in out:
        counts = np.bincount(row, minlength=num_experts)
        for expert in np.flatnonzero(counts == 0).tolist():
            # An expert that is new everywhere fits every rank.
            most = int(counts.argmax())
            assert counts[most] > 1, "fewer slots than experts"
            row[int(np.flatnonzero(row == most)[0])] = expert
            counts[most] -= 1
            counts[expert] = 1
    assert out.shape[1] == local * ep_size
    return out


def joiner_columns(
    loads: NDArray[np.float64], rows: Rows, num_joiners: int, num_local: int
) -> NDArray[np.int32]:
    """Columns ``[joiners, L, local slots]`` for added ranks: again and again the expert with most load a replica that
    the rank lacks. ``loads [L, E]``; ``rows [L, P]``: what there is.
    """
    num_layers, num_experts = loads.shape
    out = np.zeros((num_joiners, num_layers, num_local), dtype=np.int32)
    for layer in range(num_layers):
        counts = np.bincount(rows[layer], minlength=num_experts).astype(np.float64)
        weight = loads[layer] if loads[layer].any() else np.ones(num_experts)
        for place in range(num_local):
            for joiner in range(num_joiners):  # in turn, so that none gets all the heavy ones
                share = weight / np.maximum(counts, 0.5)
                share[out[joiner, layer, :place]] = -1.0
                expert = int(share.argmax())
                out[joiner, layer, place] = expert
                counts[expert] += 1
    return out


def rows_digest(number: int, key: tuple[int, int], step: int, rows: Rows) -> int:
    """62-bit digest of what has to be equal on all members as they begin to serve."""
    head = np.array([number, *key, step, *rows.shape], dtype="<i8").tobytes()
    digest = hashlib.blake2b(head + rows.astype("<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & DIGEST_MASK
