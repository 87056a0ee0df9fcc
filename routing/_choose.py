# ruff: noqa: RUF005, SIM102
# mypy: ignore-errors
"""From logits to the K best pairs of each row: loads, keys, groups, lists, and the exact fallback."""

import triton
import triton.language as tl

from evenroute.routing._candidates import count_bits, nth_candidate, reached_bound, segment_maxima
from evenroute.routing._lists import (
    EXCLUDED,
    EXHAUSTED,
    exchange,
    merge,
    merge_halves,
    replaced,
    sort4,
    take_best,
    take_best_looped,
)
from evenroute.routing._scores import (
    NAN_KEY,
    base_key,
    clean_logit,
    exp_close,
    inverse_image,
    inverse_key,
    key_image,
    order_image,
)

ID_SHIFT = tl.constexpr(20)  # payload: (2047 - expert) << 20 | what the dispatch tables say of it
LAST_EXPERT = tl.constexpr(2047)


@triton.jit
def expert_of(chunk, PER_LANE: tl.constexpr, E: tl.constexpr, G: tl.constexpr, GROUP_PAD: tl.constexpr):
    """Expert and presence at [32, 1, 4] of a chunk. Ungrouped: lanes interleave; grouped: a lane stays in a group."""
    lane = tl.arange(0, 32)[:, None, None]
    inner = tl.arange(0, 4)[None, None, :]
    if GROUP_PAD == 0:
        expert = chunk * 128 + lane * 4 + inner
        present = expert < E
    else:
        place = lane * PER_LANE + chunk * 4 + inner
        if GROUP_PAD * G == E:
            expert = place
            present = expert < E
        else:
            within = place % GROUP_PAD
            group = place // GROUP_PAD
            expert = group * (E // G) + within
            present = (within < E // G) & (group < G)
    return expert, present


@triton.jit
def load_chunk(logit_row, chunk, exists, SHAPE: tl.constexpr, FORM: tl.constexpr):
    """Clean logits [32, ROWS, 4] of a chunk; absent experts are -inf."""
    expert, present = expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])
    mask = tl.broadcast_to(exists[:, :, None], SHAPE)
    if FORM[4]:
        mask = mask & present
    pointer = logit_row[:, :, None] + expert
    return clean_logit(tl.load(pointer, mask=mask, other=float("-inf")), FORM[6], FORM[5])


@triton.jit
def softmax_parts(logit_row, exists, CHUNKS: tl.constexpr, SHAPE: tl.constexpr, FORM: tl.constexpr):
    """Largest logit and sum of exps of each row, [1, ROWS]; NaN is left out."""
    largest = tl.full(SHAPE, float("-inf"), tl.float32)
    total = tl.zeros(SHAPE, tl.float32)
    if CHUNKS <= 8:
        for chunk in tl.static_range(CHUNKS):
            part = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
            largest = tl.maximum(largest, tl.where(part != part, float("-inf"), part))
    else:
        for chunk in range(CHUNKS):
            part = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
            largest = tl.maximum(largest, tl.where(part != part, float("-inf"), part))
    top = inverse_image(tl.max(tl.max(order_image(largest), axis=2), axis=0, keep_dims=True))
    top = tl.where(top == float("-inf"), 0.0, top)
    if CHUNKS <= 8:
        for chunk in tl.static_range(CHUNKS):
            part = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
            total += tl.where(part != part, 0.0, exp_close(part - top[:, :, None]))
    else:
        for chunk in range(CHUNKS):
            part = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
            total += tl.where(part != part, 0.0, exp_close(part - top[:, :, None]))
    total = tl.sum(tl.sum(total, axis=2), axis=0, keep_dims=True)
    return top, tl.where(total > 0, total, 1.0)


@triton.jit
def row_bias(bias_row, marked_ptr, marked, expert, mask, HAS_MARKED: tl.constexpr, HAS_PLAIN: tl.constexpr):
    """fp32 bias at `expert`, from the plain or the marked one."""
    if HAS_PLAIN:
        bias = tl.load(bias_row + expert, mask=mask, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(mask.shape, tl.float32)
    if HAS_MARKED:
        other = tl.load(marked_ptr + expert, mask=mask & marked, other=0.0).to(tl.float32)
        bias = tl.where(marked, other, bias)
    return bias


@triton.jit
def load_bias(
    bias_row, marked_ptr, marked, chunk, SHAPE: tl.constexpr, FORM: tl.constexpr, SCORE: tl.constexpr
):
    """Bias [32, ROWS, 4] of one chunk; 0 if there is none."""
    if SCORE[2]:
        expert, present = expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])
        wide = tl.broadcast_to(expert, SHAPE)
        mask = tl.broadcast_to(present, SHAPE)
        return row_bias(bias_row[:, :, None], marked_ptr, marked[:, :, None], wide, mask, SCORE[3], SCORE[4])
    else:
        return 0.0


@triton.jit
def images_of(
    x, bias, chunk, largest, denominator, SHAPE: tl.constexpr, FORM: tl.constexpr, SCORE: tl.constexpr
):
    """Key images [32, ROWS, 4] of one chunk's clean logits and bias; absent experts are EXCLUDED."""
    key = base_key(x, largest[:, :, None], denominator[:, :, None], SCORE[0], SCORE[1])
    if SCORE[2]:
        key += bias
    image = key_image(key)
    if FORM[4]:
        present = expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])[1]
        image = tl.where(tl.broadcast_to(present, SHAPE), image, EXCLUDED)
    return image


@triton.jit
def chunk_images(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    chunk,
    exists,
    largest,
    denominator,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """Key images [32, ROWS, 4] of one chunk, loads and all."""
    x = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
    bias = load_bias(bias_row, marked_ptr, marked, chunk, SHAPE, FORM, SCORE)
    return images_of(x, bias, chunk, largest, denominator, SHAPE, FORM, SCORE)


@triton.jit
def payload_of(payload_ptr, expert, mask, PAYLOAD: tl.constexpr):
    """Inverted id above what the tables say of the expert; -1 where masked."""
    if PAYLOAD:
        return tl.load(payload_ptr + expert, mask=mask, other=-1)
    else:
        return tl.where(mask, (LAST_EXPERT - expert) << ID_SHIFT, -1)


@triton.jit
def chunk_payloads(payload_ptr, chunk, SHAPE: tl.constexpr, FORM: tl.constexpr, SCORE: tl.constexpr):
    """Payloads [32, ROWS, 4] of one chunk."""
    expert, present = expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])
    return payload_of(payload_ptr, tl.broadcast_to(expert, SHAPE), tl.broadcast_to(present, SHAPE), SCORE[5])


@triton.jit
def split4(x, ROWS: tl.constexpr):
    """[32, ROWS, 4] -> four [32, ROWS], in order."""
    even, odd = tl.split(tl.reshape(x, [32, ROWS, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _top_two(a_first, a_second, b_first, b_second):
    return tl.maximum(a_first, b_first), tl.maximum(
        tl.minimum(a_first, b_first), tl.maximum(a_second, b_second)
    )


@triton.jit
def kept_lanes(
    first,
    second,
    lane,
    G: tl.constexpr,
    TG: tl.constexpr,
    LANES: tl.constexpr,
    TOP2: tl.constexpr,
    ROWS: tl.constexpr,
):
    """[32, ROWS] bool: lanes of the TG best groups, from the lanes' two largest images. LANES lanes make a group."""
    first = tl.where(first <= NAN_KEY, float("-inf"), inverse_key(first))
    second = tl.where(second <= NAN_KEY, float("-inf"), inverse_key(second))
    # Butterflies over the lanes of a group: every lane ends with its group's two largest.
    for step in tl.static_range(5):
        if (1 << step) < LANES:
            other = tl.gather(first, lane ^ (1 << step), axis=0)
            if TOP2:
                another = tl.gather(second, lane ^ (1 << step), axis=0)
                second = tl.maximum(tl.minimum(first, other), tl.maximum(second, another))
            first = tl.maximum(first, other)
    score = first
    if TOP2:
        score = first + second
    group = lane // LANES
    image = tl.where(group < G, key_image(score), EXCLUDED)
    if G <= 16:
        # Rank of the own group: how many others are larger, or equal and earlier.
        # A pair's order is that of the highest bit in which the two groups differ.
        rank = tl.zeros([32, ROWS], tl.int32)
        for step in tl.static_range(1, 32 // LANES):
            other = tl.gather(image, lane ^ (step * LANES), axis=0)
            rank += (
                other
                > image
                - (
                    (
                        group
                        >> (
                            0
                            if step < 2
                            else (1 if step < 4 else (2 if step < 8 else (3 if step < 16 else 4)))
                        )
                    )
                    & 1
                )
            ).to(tl.int32)
        return (rank < TG) & (group < G)
    kept = lane < 0
    for _ in tl.static_range(TG):
        top = tl.max(image, axis=0, keep_dims=True)
        lowest = tl.max(tl.where(image == top, 31 - group, -1), axis=0, keep_dims=True)
        won = (31 - group) == lowest
        kept = kept | won
        image = tl.where(won, EXCLUDED, image)
    return kept


@triton.jit
def choose_again(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    exists,
    largest,
    denominator,
    kept,
    lane,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """K rounds over whole rows, held in registers: exact for every input, and slow."""
    ROWS: tl.constexpr = SHAPE[1]
    images = ()
    for chunk in tl.static_range(CHUNKS):
        image = chunk_images(
            logit_row, bias_row, marked_ptr, marked, chunk, exists, largest, denominator, SHAPE, FORM, SCORE
        )
        images = images + (tl.where(kept[:, :, None], image, EXCLUDED),)
    best_key = tl.full([32, ROWS], EXCLUDED, tl.int32)
    best_order = tl.full([32, ROWS], 0, tl.int32)
    for k in range(K):
        most = images[0]
        for chunk in tl.static_range(1, CHUNKS):
            most = tl.maximum(most, images[chunk])
        top = tl.max(tl.max(most, axis=2), axis=0, keep_dims=True)
        found = tl.full(SHAPE, -1, tl.int32)
        for chunk in tl.static_range(CHUNKS):
            order = LAST_EXPERT - expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])[0]
            found = tl.maximum(found, tl.where(images[chunk] == top[:, :, None], order, -1))
        found = tl.max(tl.max(found, axis=2), axis=0, keep_dims=True)
        rest = ()
        for chunk in tl.static_range(CHUNKS):
            order = LAST_EXPERT - expert_of(chunk, FORM[0], FORM[1], FORM[2], FORM[3])[0]
            rest = rest + (tl.where(order == found[:, :, None], EXCLUDED, images[chunk]),)
        images = rest
        best_key = tl.where(lane == k, top, best_key)
        best_order = tl.where(lane == k, found, best_order)
    best_pay = payload_of(payload_ptr, LAST_EXPERT - best_order, lane < K, SCORE[5])
    return best_key, best_pay


@triton.jit
def early_loads(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    exists,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(logits, bias) of all chunks: a batch of one wave is all latency, so every load is sent before any arithmetic."""
    loaded = ()
    if EARLY:
        for chunk in tl.static_range(CHUNKS):
            x = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
            bias = load_bias(bias_row, marked_ptr, marked, chunk, SHAPE, FORM, SCORE)
            loaded = loaded + ((x, bias),)
    return loaded


@triton.jit
def gated_images(
    loaded,
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    chunk: tl.constexpr,
    exists,
    ready,
    largest,
    denominator,
    EARLY: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """Key images of one chunk.

    Nothing is added to the bias of a row that counts. The compiler would load what `ready` hangs on last of all; the
    first chunk's arithmetic needs it beside loads that are waited for anyway.
    """
    if EARLY:
        x, bias = loaded[chunk]
    else:
        x = load_chunk(logit_row, chunk, exists, SHAPE, FORM)
        bias = load_bias(bias_row, marked_ptr, marked, chunk, SHAPE, FORM, SCORE)
    if chunk == 0 and SCORE[2]:
        bias += tl.where(ready, 0.0, float("nan"))[:, :, None]
    return images_of(x, bias, chunk, largest, denominator, SHAPE, FORM, SCORE)


@triton.jit
def choose_by_lists(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    exists,
    largest,
    denominator,
    lane,
    ready,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    TG: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP2: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(image, payload) [32, ROWS]: lane k holds the k-th best pair of its row; and which rows' lists ran out."""
    ROWS: tl.constexpr = SHAPE[1]
    loaded = early_loads(logit_row, bias_row, marked_ptr, marked, exists, CHUNKS, EARLY, SHAPE, FORM, SCORE)
    payloads = ()
    if EARLY:
        for chunk in tl.static_range(CHUNKS):
            payloads = payloads + (chunk_payloads(payload_ptr, chunk, SHAPE, FORM, SCORE),)
    keys = ()
    pays = ()
    for chunk in tl.static_range(CHUNKS):
        image = gated_images(
            loaded,
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            chunk,
            exists,
            ready,
            largest,
            denominator,
            EARLY,
            SHAPE,
            FORM,
            SCORE,
        )
        if EARLY:
            payload = payloads[chunk]
        else:
            payload = chunk_payloads(payload_ptr, chunk, SHAPE, FORM, SCORE)
        new_keys, new_pays = sort4(split4(image, ROWS), split4(payload, ROWS))
        if chunk == 0:
            keys = new_keys
            pays = new_pays
        elif len(keys) == 4 and DEPTH >= 8:
            keys, pays = merge_halves(keys, pays, new_keys, new_pays)
        else:
            keys, pays = merge(keys, pays, new_keys, new_pays, DEPTH)
    COMPLETE: tl.constexpr = len(keys) >= CHUNKS * 4 or len(keys) >= K
    kept = lane >= 0
    if TG > 0:
        kept = kept_lanes(keys[0], keys[1], lane, FORM[2], TG, GROUP_LANES, TOP2, ROWS)
    if not SCORE[2]:
        kept &= ready
    if TG > 0 or not SCORE[2]:
        keys = replaced(keys, 0, tl.where(kept, keys[0], EXCLUDED))
    best_key, best_pay = take_best(keys, pays, lane, K, COMPLETE)
    failed = tl.max(tl.where(lane < K, best_pay, -1)) == EXHAUSTED
    return best_key, best_pay, kept, failed


@triton.jit
def choose_by_bound(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    exists,
    largest,
    denominator,
    lane,
    ready,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    EARLY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TG: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP2: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """The same for wide rows: a bound that K keys reach, then the few above it, SLOTS a lane.

    The K-th largest of 32 * SEGMENTS maxima bounds the K-th key from below. The keys that reach it (18 of 896 for
    K = 16 as a rule) are dealt out by a prefix sum over the lanes' bit masks; more than 32 * SLOTS of them: failed.
    """
    ROWS: tl.constexpr = SHAPE[1]
    loaded = early_loads(logit_row, bias_row, marked_ptr, marked, exists, CHUNKS, EARLY, SHAPE, FORM, SCORE)
    images = ()
    first = tl.full(SHAPE, EXCLUDED, tl.int32)
    second = tl.full(SHAPE, EXCLUDED, tl.int32)
    for chunk in tl.static_range(CHUNKS):
        image = gated_images(
            loaded,
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            chunk,
            exists,
            ready,
            largest,
            denominator,
            EARLY,
            SHAPE,
            FORM,
            SCORE,
        )
        images = images + (image,)
        if TG > 0:
            second = tl.maximum(second, tl.minimum(first, image))
            first = tl.maximum(first, image)
    kept = lane >= 0
    if TG > 0:
        first, second = tl.reduce((first, second), 2, _top_two)
        kept = kept_lanes(first, second, lane, FORM[2], TG, GROUP_LANES, TOP2, ROWS)
    maxima = segment_maxima(images, kept, CHUNKS, SEGMENTS)
    bound = reached_bound(maxima, K)
    bound = tl.where(kept, tl.maximum(bound, NAN_KEY), EXHAUSTED)
    inner = tl.arange(0, 4)[None, None, :]
    low = tl.zeros([32, ROWS], tl.int32)
    high = tl.zeros([32, ROWS], tl.int32)
    for chunk in tl.static_range(CHUNKS):
        reached = images[chunk] >= bound[:, :, None]
        part = tl.sum(tl.where(reached, 1 << (inner + 4 * (chunk % 8)), 0), axis=2)
        if chunk < 8:
            low += part
        else:
            high += part
    if CHUNKS > 8:
        bits = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
        amount = count_bits(low) + count_bits(high)
    else:
        bits = low
        amount = count_bits(low)
    upto = tl.cumsum(amount, axis=0)
    total = tl.max(upto, axis=0, keep_dims=True)
    keys = ()
    pays = ()
    for slot in tl.static_range(SLOTS):
        taken = lane + 32 * slot < total
        source, place = nth_candidate(bits, amount, upto, lane + 32 * slot, taken)
        if FORM[3] == 0:
            expert = (place >> 2) * 128 + source * 4 + (place & 3)
        else:
            position = source * FORM[0] + place
            expert = (position // FORM[3]) * (FORM[1] // FORM[2]) + position % FORM[3]
        expert = tl.where(taken, expert, 0)
        x = clean_logit(
            tl.load(logit_row + expert, mask=taken & exists, other=float("-inf")), FORM[6], FORM[5]
        )
        key = base_key(x, largest, denominator, SCORE[0], SCORE[1])
        if SCORE[2]:
            key += row_bias(bias_row, marked_ptr, marked, expert, taken, SCORE[3], SCORE[4])
        keys = keys + (tl.where(taken, key_image(key), EXCLUDED),)
        pays = pays + (payload_of(payload_ptr, expert, taken, SCORE[5]),)
    if SLOTS == 2:
        keys, pays = exchange(keys, pays, 0, 1)
    if K <= 16:
        best_key, best_pay = take_best(keys, pays, lane, K, True)
    else:
        best_key, best_pay = take_best_looped(keys, pays, lane, K)
    return best_key, best_pay, kept, tl.max(total) > 32 * SLOTS


@triton.jit
def choose_best(
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    payload_ptr,
    exists,
    largest,
    denominator,
    lane,
    ready,
    K: tl.constexpr,
    CHUNKS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLOTS: tl.constexpr,
    TG: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    TOP2: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(image, payload) [32, ROWS]: lane k holds the k-th best pair of its row. DEPTH 0: by bound, else by lists."""
    if DEPTH == 0:
        best_key, best_pay, kept, failed = choose_by_bound(
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            payload_ptr,
            exists,
            largest,
            denominator,
            lane,
            ready,
            K,
            CHUNKS,
            EARLY and CHUNKS <= 8,
            SEGMENTS,
            SLOTS,
            TG,
            GROUP_LANES,
            TOP2,
            SHAPE,
            FORM,
            SCORE,
        )
    else:
        best_key, best_pay, kept, failed = choose_by_lists(
            logit_row,
            bias_row,
            marked_ptr,
            marked,
            payload_ptr,
            exists,
            largest,
            denominator,
            lane,
            ready,
            K,
            CHUNKS,
            DEPTH,
            EARLY,
            TG,
            GROUP_LANES,
            TOP2,
            SHAPE,
            FORM,
            SCORE,
        )
    if DEPTH < CHUNKS * 4 and DEPTH < K:
        if failed:
            best_key, best_pay = choose_again(
                logit_row,
                bias_row,
                marked_ptr,
                marked,
                payload_ptr,
                exists,
                largest,
                denominator,
                kept,
                lane,
                K,
                CHUNKS,
                SHAPE,
                FORM,
                SCORE,
            )
    return best_key, best_pay
