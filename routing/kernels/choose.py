# ruff: noqa: RUF005, SIM102
# mypy: ignore-errors
"""From logits to the K best pairs of each row: by lane lists, by bound, and the exact fallback of both."""

import triton
import triton.language as tl

from evenroute.routing.kernels.bound import choose_by_bound
from evenroute.routing.kernels.codes import choose_by_codes
from evenroute.routing.kernels.groups import kept_lanes
from evenroute.routing.kernels.lists import (
    EXCLUDED,
    EXHAUSTED,
    merge,
    merge_halves,
    replaced,
    sort4,
    take_best,
)
from evenroute.routing.kernels.rows import (
    ID_SHIFT,
    LAST_EXPERT,
    chunk_images,
    chunk_payloads,
    early_loads,
    expert_at,
    gated_images,
    payload_of,
    split4,
)
from evenroute.routing.kernels.wide import choose_in_order, choose_wide

FARTHEST = tl.constexpr(1 << 20)


@triton.jit
def choose_again(row, kept, PLAN: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """K rounds over whole rows, held in registers: exact for every input, and slow.

    Places rise with ids; a place is its lane's first one and a constant of the register that holds it.
    """
    lane = row.lane
    CHUNKS: tl.constexpr = LAYOUT.chunks
    STEP: tl.constexpr = 128 if LAYOUT.group_pad == 0 else 4
    first = lane * (4 if LAYOUT.group_pad == 0 else LAYOUT.per_lane)
    inner = tl.arange(0, 4)[None, None, :]
    images = ()
    for chunk in tl.static_range(CHUNKS):
        image = chunk_images(row, chunk, LAYOUT, SCORE)
        images = images + (tl.where(kept[:, :, None], image, EXCLUDED),)
    best_key = tl.full([32, LAYOUT.rows], EXCLUDED, tl.int32)
    best_place = tl.full([32, LAYOUT.rows], 0, tl.int32)
    for k in range(PLAN.top_k):
        most = images[0]
        for chunk in tl.static_range(1, CHUNKS):
            most = tl.maximum(most, images[chunk])
        top = tl.max(tl.max(most, axis=2), axis=0, keep_dims=True)
        within = tl.full([32, LAYOUT.rows, 4], FARTHEST, tl.int32)
        for i in tl.static_range(CHUNKS):
            within = tl.where(
                images[CHUNKS - 1 - i] == top[:, :, None], (CHUNKS - 1 - i) * STEP + inner, within
            )
        place = tl.min(tl.min(within, axis=2) + first, axis=0, keep_dims=True)
        gone = (place - first)[:, :, None]
        rest = ()
        for chunk in tl.static_range(CHUNKS):
            rest = rest + (tl.where(gone == chunk * STEP + inner, EXCLUDED, images[chunk]),)
        images = rest
        best_key = tl.where(lane == k, top, best_key)
        best_place = tl.where(lane == k, place, best_place)
    expert = tl.minimum(expert_at(best_place, LAYOUT), LAYOUT.experts - 1)
    return best_key, payload_of(row.payloads, expert, lane < PLAN.top_k, SCORE)


@triton.jit
def choose_by_lists(row, PLAN: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(image, payload) [32, ROWS]: lane k holds the k-th best pair of its row; and which rows' lists ran out."""
    lane = row.lane
    loaded = early_loads(row, PLAN.early, LAYOUT, SCORE)
    payloads = ()
    if PLAN.early:
        for chunk in tl.static_range(tl.constexpr(LAYOUT.chunks)):
            payloads = payloads + (chunk_payloads(row, chunk, LAYOUT, SCORE),)
    keys = ()
    pays = ()
    for chunk in tl.static_range(tl.constexpr(LAYOUT.chunks)):
        image = gated_images(row, loaded, chunk, LAYOUT, SCORE)
        if PLAN.early:
            new_pays = split4(payloads[chunk], LAYOUT.rows)
        else:
            new_pays = split4(chunk_payloads(row, chunk, LAYOUT, SCORE), LAYOUT.rows)
        new_keys, new_pays = sort4(split4(image, LAYOUT.rows), new_pays)
        if chunk == 0:
            keys = new_keys
            pays = new_pays
        elif len(keys) == 4 and PLAN.depth >= 8:
            keys, pays = merge_halves(keys, pays, new_keys, new_pays)
        else:
            keys, pays = merge(keys, pays, new_keys, new_pays, PLAN.depth)
    COMPLETE: tl.constexpr = len(keys) >= LAYOUT.per_lane or len(keys) >= PLAN.top_k
    kept = lane >= 0
    if LAYOUT.kept > 0:
        kept = kept_lanes(keys[0], keys[1], lane, LAYOUT)
    if not SCORE.any_bias:
        kept &= row.ready
    if LAYOUT.kept > 0 or not SCORE.any_bias:
        keys = replaced(keys, 0, tl.where(kept, keys[0], EXCLUDED))
    best_key, best_pay = take_best(keys, pays, lane, PLAN.top_k, COMPLETE)
    failed = tl.max(tl.where(lane < PLAN.top_k, best_pay, -1)) == EXHAUSTED
    return best_key, best_pay, kept, failed


@triton.jit
def choose_best(row, PLAN: tl.constexpr, SCORE: tl.constexpr):
    """(image, payload, expert) [32, ROWS]: lane k holds the k-th best of its row."""
    LAYOUT: tl.constexpr = PLAN.layout
    if PLAN.coded:
        best_key, best_pay, expert = choose_by_codes(row, PLAN, LAYOUT, SCORE)
    else:
        if LAYOUT.chunks > 8:
            best_key, best_pay = choose_wide(row, PLAN, LAYOUT, SCORE)
        elif PLAN.depth == 0:
            best_key, best_pay, kept, failed = choose_by_bound(row, PLAN, LAYOUT, SCORE)
        else:
            best_key, best_pay, kept, failed = choose_by_lists(row, PLAN, LAYOUT, SCORE)
        if LAYOUT.chunks <= 8 and PLAN.depth < LAYOUT.per_lane and PLAN.depth < PLAN.top_k:
            if failed:
                if LAYOUT.chunks == 8:  # unrolled, most of the compiler's time
                    best_key, best_pay = choose_in_order(row, kept, PLAN, LAYOUT, SCORE)
                else:
                    best_key, best_pay = choose_again(row, kept, PLAN, LAYOUT, SCORE)
        expert = LAST_EXPERT - (best_pay >> ID_SHIFT)
    return best_key, best_pay, expert
