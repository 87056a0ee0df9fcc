"""Order in which an expert's tickets go to its replicas when more than four of them have uneven shares.

The j-th ticket of a replica with share s may be any of the tickets floor((j - 1) / s) .. ceil(j / s) - 1 (from 0): kept
to by all replicas, after every n tickets each has less than one more or less than s * n. Shares sum to one, so serving
the earliest end first keeps all of them (Baruah, Cohen, Plaxton, Varvel 1996, "Proportionate progress", one processor).
The order repeats after 65535 tickets, the sum of the shares.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._compiled import kernel
from evenroute.eplb.placement.placement import SHARE_TOTAL

TREE_REPLICAS = 4
"""Up to this many replicas `dispatch.split_shares` needs no table."""
_MAX_REPLICAS = 1 << 10
_CACHED = 1024  # orders, 32 KiB each up to 16 replicas


def entry_bits(replicas: int) -> int:
    """Bits of an entry: 4 up to 16 replicas, 8 up to 256, else 16."""
    return 4 if replicas <= 16 else 8 if replicas <= 256 else 16


def sequence_words(replicas: int) -> int:
    """int32 words of one expert's order; 0 if it needs none."""
    return 0 if replicas <= TREE_REPLICAS else (SHARE_TOTAL + 1) * entry_bits(replicas) // 32


def sequence_capacity(num_experts: int, num_slots: int, ep_size: int) -> int:
    """Words that hold the orders of one layer in any placement of this shape.

    An expert with k > 4 replicas takes k - 1 of the P - E redundant slots, and at most 8192 words for every four.
    """
    if ep_size <= TREE_REPLICAS:
        return 0
    by_slots = (num_slots - num_experts) // TREE_REPLICAS * sequence_words(TREE_REPLICAS + 1)
    return min(by_slots, num_experts * sequence_words(ep_size))


@kernel
def _deal(shares, bits, words):  # type: ignore[no-untyped-def]
    """words [sequence_words] uint32, all 0: replica of each ticket in `bits` bits; shares [k] int32 sum to 65535."""
    total, none = 65535, np.int32(1 << 30)
    replicas = len(shares)
    begin = np.full(replicas, none, np.int32)  # first ticket that may be the replica's next one
    key = np.full(replicas, none, np.int32)  # ticket before which it has to come << 10 | replica
    quotient = np.zeros(replicas, np.int32)  # j * total / share, for the next ticket j
    rest = np.zeros(replicas, np.int32)
    step = np.zeros(replicas, np.int32)
    step_rest = np.zeros(replicas, np.int32)
    for i in range(replicas):
        if shares[i] > 0:
            step[i], step_rest[i] = total // shares[i], total % shares[i]
            quotient[i], rest[i] = step[i], step_rest[i]
            begin[i] = 0
            key[i] = ((quotient[i] + (1 if rest[i] > 0 else 0)) << 10) | i
    for ticket in range(total):
        best = none
        for i in range(replicas):
            best = min(best, key[i] if begin[i] <= ticket else none)
        i = int(best & 1023)
        words[ticket * bits >> 5] |= np.uint32(i) << np.uint32(ticket * bits & 31)
        begin[i] = quotient[i]
        quotient[i] += step[i]
        rest[i] += step_rest[i]
        if rest[i] >= shares[i]:
            quotient[i] += 1
            rest[i] -= shares[i]
        key[i] = ((quotient[i] + (1 if rest[i] > 0 else 0)) << 10) | i


def compile_orders() -> None:
    """Compile (or read from the cache on disk) what the first update to uneven shares would else wait for."""
    packed_order(np.array([SHARE_TOTAL], dtype=np.int32).tobytes())


@lru_cache(maxsize=_CACHED)
def packed_order(shares: bytes) -> NDArray[np.int32]:
    """The order of shares (int32 bytes) as [sequence_words] int32, low entries in low bits. About 1 ms; thread-safe."""
    units = np.frombuffer(shares, dtype=np.int32)
    assert int(units.sum()) == SHARE_TOTAL, units
    assert len(units) <= _MAX_REPLICAS, len(units)
    bits = entry_bits(len(units))
    words = np.zeros((SHARE_TOTAL + 1) * bits // 32, np.uint32)
    _deal(units, bits, words)
    packed = words.view(np.int32)
    packed.setflags(write=False)
    return packed
