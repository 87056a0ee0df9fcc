# ruff: noqa: RUF005
# mypy: ignore-errors
"""Lane lists: every lane keeps its largest (key, payload) pairs sorted, in registers.

A list is a pair of tuples of [32, ROWS] int32 tensors, best first. Pairs compare by key, then payload; payloads are
unique within a row and larger for lower expert ids, so ties fall to the lowest id.
"""

import triton
import triton.language as tl

EXCLUDED = tl.constexpr(-(2**31))
EXHAUSTED = tl.constexpr(
    2**31 - 1
)  # a truncated list ran out: above every key, so that the row is recognised


@triton.jit
def pair_less(key_a, pay_a, key_b, pay_b):
    """(key_a, pay_a) < (key_b, pay_b) as one 64-bit comparison."""
    a = (key_a.to(tl.int64) << 32) | pay_a.to(tl.uint32, bitcast=True).to(tl.int64)
    b = (key_b.to(tl.int64) << 32) | pay_b.to(tl.uint32, bitcast=True).to(tl.int64)
    return a < b


@triton.jit
def replaced(values, INDEX: tl.constexpr, value):
    """The tuple with one entry exchanged."""
    out = ()
    for i in tl.static_range(len(values)):
        if i == INDEX:
            out = out + (value,)
        else:
            out = out + (values[i],)
    return out


@triton.jit
def exchange(keys, pays, A: tl.constexpr, B: tl.constexpr, IN_ORDER: tl.constexpr = False):
    """Order entries A < B of a list, the larger first. IN_ORDER: the payload of A is known to be the larger."""
    if IN_ORDER:
        swap = keys[A] < keys[B]
    else:
        swap = pair_less(keys[A], pays[A], keys[B], pays[B])
    key_a, key_b = tl.where(swap, keys[B], keys[A]), tl.where(swap, keys[A], keys[B])
    pay_a, pay_b = tl.where(swap, pays[B], pays[A]), tl.where(swap, pays[A], pays[B])
    keys = replaced(replaced(keys, A, key_a), B, key_b)
    pays = replaced(replaced(pays, A, pay_a), B, pay_b)
    return keys, pays


@triton.jit
def sort4(keys, pays):
    keys, pays = exchange(keys, pays, 0, 1, True)
    keys, pays = exchange(keys, pays, 2, 3, True)
    keys, pays = exchange(keys, pays, 0, 2, True)
    keys, pays = exchange(keys, pays, 1, 3, True)
    keys, pays = exchange(keys, pays, 1, 2)
    return keys, pays


@triton.jit
def shifted(values, won, MOST: tl.constexpr, last: tl.constexpr):
    """The tuple without its head where `won`, `last` behind, as far as it matters: a lane gives at most MOST more."""
    out = ()
    for i in tl.static_range(len(values)):
        if i < MOST:
            if i + 1 < len(values):
                out = out + (tl.where(won, values[i + 1], values[i]),)
            else:
                out = out + (tl.where(won, last, values[i]),)
    return out


@triton.jit
def by_lane(values, lane):
    """[32, ROWS]: lane i holds entry i of a tuple of [1, ROWS]; lanes beyond repeat."""
    for step in tl.static_range(5):
        if len(values) > 1:
            odd = ((lane >> step) & 1) != 0
            half = ()
            for i in tl.static_range((len(values) + 1) // 2):
                if 2 * i + 1 < len(values):
                    half = half + (tl.where(odd, values[2 * i + 1], values[2 * i]),)
                else:
                    half = half + (values[2 * i],)
            values = half
    return tl.broadcast_to(values[0], lane.shape)


@triton.jit
def merge_halves(keys, pays, new_keys, new_pays):
    """Two sorted lists of four into one of eight: Batcher's odd-even merger. The new entries are later experts."""
    keys = keys + new_keys
    pays = pays + new_pays
    for i in tl.static_range(4):
        keys, pays = exchange(keys, pays, i, i + 4, True)
    keys, pays = exchange(keys, pays, 2, 4)
    keys, pays = exchange(keys, pays, 3, 5)
    keys, pays = exchange(keys, pays, 1, 2)
    keys, pays = exchange(keys, pays, 3, 4)
    keys, pays = exchange(keys, pays, 5, 6)
    return keys, pays


@triton.jit
def merge(keys, pays, new_keys, new_pays, DEPTH: tl.constexpr):
    """The best DEPTH of a sorted list and four sorted new entries.

    The list and the reversed new entries form a valley; a bitonic merger sorts it. In front of it one thinks
    enough larger entries to fill a power of two: comparators that touch those do nothing and are left out.
    """
    LENGTH: tl.constexpr = len(keys)
    SIZE: tl.constexpr = DEPTH if DEPTH < LENGTH + 4 else LENGTH + 4
    out_keys = ()
    out_pays = ()
    for i in tl.static_range(SIZE):
        if SIZE - 1 - i >= 4:
            out_keys = out_keys + (keys[i],)
            out_pays = out_pays + (pays[i],)
        elif i >= LENGTH:
            out_keys = out_keys + (new_keys[SIZE - 1 - i],)
            out_pays = out_pays + (new_pays[SIZE - 1 - i],)
        else:
            # Later chunks hold later experts of the lane: on equal keys the list's entry stays.
            less = keys[i] < new_keys[SIZE - 1 - i]
            out_keys = out_keys + (tl.where(less, new_keys[SIZE - 1 - i], keys[i]),)
            out_pays = out_pays + (tl.where(less, new_pays[SIZE - 1 - i], pays[i]),)
    POWER: tl.constexpr = 4 if SIZE <= 4 else (8 if SIZE <= 8 else (16 if SIZE <= 16 else 32))
    FRONT: tl.constexpr = POWER - SIZE
    for step in tl.static_range(5):
        if (POWER >> (step + 1)) > 0:
            for a in tl.static_range(POWER):
                # The lower end of a comparator: its distance bit is clear.
                if (a & (POWER >> (step + 1))) == 0 and a >= FRONT:
                    out_keys, out_pays = exchange(
                        out_keys, out_pays, a - FRONT, a + (POWER >> (step + 1)) - FRONT
                    )
    return out_keys, out_pays


@triton.jit
def take_best_looped(keys, pays, lane, K: tl.constexpr):
    """`take_best` for complete short lists and many rounds, as a loop: compile time."""
    best_key = tl.full(lane.shape, EXCLUDED, tl.int32)
    best_pay = tl.full(lane.shape, -1, tl.int32)
    for k in range(K):
        top = tl.max(keys[0], axis=0, keep_dims=True)
        pay = tl.max(tl.where(keys[0] == top, pays[0], -1), axis=0, keep_dims=True)
        best_key = tl.where(lane == k, top, best_key)
        best_pay = tl.where(lane == k, pay, best_pay)
        won = pays[0] == pay
        next_keys = ()
        next_pays = ()
        for i in tl.static_range(len(keys)):
            if i + 1 < len(keys):
                next_keys = next_keys + (tl.where(won, keys[i + 1], keys[i]),)
                next_pays = next_pays + (tl.where(won, pays[i + 1], pays[i]),)
            else:
                next_keys = next_keys + (tl.where(won, EXCLUDED, keys[i]),)
                next_pays = next_pays + (tl.where(won, -1, pays[i]),)
        keys = next_keys
        pays = next_pays
    return best_key, best_pay


@triton.jit
def take_best(keys, pays, lane, K: tl.constexpr, COMPLETE: tl.constexpr):
    """K rounds over the heads of the lists: lane k of the results holds the k-th best pair of its row.

    With lists that are not COMPLETE a lane that gave all its entries shows EXHAUSTED, which then wins every round.
    """
    tops = ()
    heads = ()
    for k in tl.static_range(K):
        top = tl.max(keys[0], axis=0, keep_dims=True)
        pay = tl.max(tl.where(keys[0] == top, pays[0], -1), axis=0, keep_dims=True)
        tops = tops + (top,)
        heads = heads + (pay,)
        if k + 1 < K:
            won = pays[0] == pay
            keys = shifted(keys, won, K - 1 - k, EXCLUDED if COMPLETE else EXHAUSTED)
            pays = shifted(pays, won, K - 1 - k, -1 if COMPLETE else 0x7FFFFFFF)
    return by_lane(tops, lane), by_lane(heads, lane)
