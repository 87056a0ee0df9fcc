"""Shares by batch-size class: a placement's further sets, for batches that are small.

A small batch's time is the weights of the experts it touches, so it had better use few replicas; a large one's is its
tokens. A launch takes the set of its class: the first whose `rows` its batch does not exceed, else the placement's own
shares.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_integers, require_instance
from evenroute.eplb.placement.shares import SHARE_TOTAL, even_shares, share_sums

MAX_CLASSES = 2  # beside the placement's own shares
MAX_CLASS_ROWS = 1 << 30
UNEVEN_REPLICAS = 4  # tables have no room for a longer uneven order in a further set


class ShareClasses(NamedTuple):
    """Up to `MAX_CLASSES` further sets of shares, the smallest batches first.

    rows    ``[L, C] int32``: the largest batch that goes by the set, in tokens a rank; rising, but for a 0 where a
            layer has fewer sets
    shares  ``[L, C, P] uint16``: as a placement's own, 0 where rows is; an expert's tokens go to four slots at most, or
            to more of them evenly

    Of one layer (in a `PlacementRow`): ``[C]`` and ``[C, P]``, without zeros in rows.
    """

    rows: NDArray[np.int32]
    shares: NDArray[np.uint16]

    def sizes(self) -> list[int]:
        """The batch sizes that sets of any layer are for."""
        return [int(size) for size in np.unique(self.rows) if size]

    def of_layer(self, layer: int) -> ShareClasses | None:
        """The sets of one layer; None where it has none."""
        known = self.rows[layer] > 0
        return ShareClasses(self.rows[layer][known], self.shares[layer][known]) if known.any() else None


def default_class_rows(
    num_logical_experts: int, top_k: int, ep_size: int, crossover: float = 140.0
) -> list[int]:
    """Largest small and medium batch, in tokens a rank; powers of two.

    crossover: tokens of an expert whose arithmetic takes as long as its weights (140: fp8 on an H200, roofline). The
    mean expert reaches it at the end of the medium class, one with four times the mean load at the end of the small.
    """
    mean = crossover * num_logical_experts / (top_k * ep_size)
    medium = 1 << max(0, round(float(np.log2(mean))))
    return sorted({max(1, medium // 4), medium})


def check_classes(
    name: str, classes: Any, slots: NDArray[np.int32], num_logical_experts: int
) -> ShareClasses | None:
    """Classes of the layers `slots` ``[L, P]``, read-only arrays; None where no layer has a set. ValueError."""
    require_instance(name, classes, ShareClasses)
    rows = as_integers(f"{name}.rows", classes.rows, np.int32, 0, MAX_CLASS_ROWS)
    shares = as_integers(f"{name}.shares", classes.shares, np.uint16, 0, SHARE_TOTAL)
    sets = rows.shape[1] if rows.ndim == 2 else 0
    if (
        not 1 <= sets <= MAX_CLASSES
        or shares.shape != (len(slots), sets, slots.shape[1])
        or len(rows) != len(slots)
    ):
        raise ValueError(
            f"{name}: rows must be [{len(slots)}, 1 to {MAX_CLASSES}] and shares [{len(slots)}, as many, "
            f"{slots.shape[1]}], found {list(rows.shape)} and {list(shares.shape)}"
        )
    before = np.maximum.accumulate(rows, axis=1)[:, :-1]
    falling = np.argwhere((rows[:, 1:] > 0) & (rows[:, 1:] <= before))
    if len(falling):
        raise ValueError(f"{name}: rows must rise, layer {falling[0][0]} has {rows[falling[0][0]].tolist()}")
    for number in range(sets):
        _check_set(f"{name} {number}", slots, rows[:, number], shares[:, number], num_logical_experts)
    for part in (rows, shares):
        part.setflags(write=False)
    return ShareClasses(rows, shares) if rows.any() else None


def _check_set(
    name: str,
    slots: NDArray[np.int32],
    rows: NDArray[np.int32],
    shares: NDArray[np.uint16],
    num_logical_experts: int,
) -> None:
    sums = share_sums(slots, shares, num_logical_experts)
    expected = np.where(rows > 0, SHARE_TOTAL, 0)[:, None]
    bad = np.argwhere(sums != expected)
    if len(bad):
        layer, expert = (int(i) for i in bad[0])
        raise ValueError(
            f"{name}: shares of layer {layer} expert {expert} sum to {int(sums[layer, expert])}, "
            f"expected {int(expected[layer, 0])}"
        )
    used = share_sums(slots, shares > 0, num_logical_experts)
    uneven = share_sums(slots, shares != shares_of(slots, shares > 0), num_logical_experts)
    bad = np.argwhere((used > UNEVEN_REPLICAS) & (uneven > 0))
    if len(bad):
        layer, expert = (int(i) for i in bad[0])
        raise ValueError(
            f"{name}: layer {layer} expert {expert} has uneven shares on {int(used[layer, expert])} slots, "
            f"allowed: {UNEVEN_REPLICAS}, or even ones"
        )


def shares_of(slots: NDArray[Any], used: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Shares ``[L, P]`` that divide each expert evenly over those of its slots that are `used` ``[L, P]``."""
    least = int(slots.max(initial=0)) + 1  # slots not in use as experts of their own
    apart = np.where(used, slots, least + np.arange(slots.shape[-1]))
    return np.where(used, even_shares(apart), 0).astype(np.uint16)


def stack_classes(classes: list[ShareClasses | None], num_slots: int) -> ShareClasses | None:
    """Sets of several layers from those of each."""
    most = max((len(one.rows) for one in classes if one is not None), default=0)
    if most == 0:
        return None
    rows = np.zeros((len(classes), most), np.int32)
    shares = np.zeros((len(classes), most, num_slots), np.uint16)
    for layer, one in enumerate(classes):
        if one is not None:
            first = most - len(one.rows)
            rows[layer, first:], shares[layer, first:] = one
    return ShareClasses(rows, shares)


def told(slots: NDArray[np.int32], classes: ShareClasses | None) -> str:
    """The sets of a placement ``slots [L, P]`` in one line; empty without any."""
    if classes is None:
        return ""
    experts = int(slots.max()) + 1
    parts = []
    for size in classes.sizes():
        has = classes.rows == size
        used = (classes.shares[has] > 0).sum() / (experts * has.sum())
        parts.append(f"up to {size} tokens a rank {used:.2f} slots an expert ({has.sum()} layers)")
    return ", ".join(parts)


def pack_shares(
    slots: NDArray[Any], shares: NDArray[Any] | None, classes: ShareClasses | None
) -> bytes | None:
    """Bytes of shares ``[..., P]`` (little-endian uint16), then of classes: rows (int32), shares (uint16).

    None where shares are even and there are no classes.
    """
    if classes is None:
        return None if shares is None else shares.astype("<u2").tobytes()
    own = even_shares(slots) if shares is None else shares
    return b"".join(
        (
            own.astype("<u2").tobytes(),
            classes.rows.astype("<i4").tobytes(),
            classes.shares.astype("<u2").tobytes(),
        )
    )


def packed_lengths(shape: tuple[int, ...]) -> list[int]:
    """Lengths that the bytes of shares of this shape ``[..., P]`` may have: by number of further sets."""
    cells = int(np.prod(shape))
    one = 2 * cells + 4 * (cells // max(1, shape[-1]))
    return [2 * cells + number * one for number in range(MAX_CLASSES + 1)]


def unpack_shares(
    data: bytes | memoryview | None, shape: tuple[int, ...]
) -> tuple[NDArray[np.uint16] | None, ShareClasses | None]:
    """Shares and classes from the bytes of `pack_shares`; ValueError for another length."""
    if data is None:
        return None, None
    lengths, cells = packed_lengths(shape), int(np.prod(shape))
    if len(data) not in lengths:
        raise ValueError(f"shares of {len(data)} bytes, expected {' or '.join(map(str, lengths))}")
    shares = np.frombuffer(data, "<u2", cells).reshape(shape).astype(np.uint16)
    sets = lengths.index(len(data))
    if not sets:
        return shares, None
    above = (*shape[:-1], sets)
    number = int(np.prod(above))
    rows = np.frombuffer(data, "<i4", number, 2 * cells).reshape(above).astype(np.int32)
    further = np.frombuffer(data, "<u2", offset=2 * cells + 4 * number).reshape(*above, shape[-1])
    return shares, ShareClasses(rows, further.astype(np.uint16))
