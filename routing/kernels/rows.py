# ruff: noqa: RUF005
# mypy: ignore-errors
"""A row in chunks of 128 experts, four a lane: loads, key images, payloads."""

import triton
import triton.language as tl

from evenroute.routing.kernels.lists import EXCLUDED
from evenroute.routing.kernels.scores import (
    base_key,
    clean_logit,
    exp_close,
    inverse_image,
    key_image,
    order_image,
)

ID_SHIFT = tl.constexpr(20)  # payload: (2047 - expert) << 20 | what the dispatch tables say of it
LAST_EXPERT = tl.constexpr(2047)


@triton.jit
def expert_of(chunk, LAYOUT: tl.constexpr):
    """Expert and presence at [32, 1, 4] of a chunk. Ungrouped: lanes interleave; grouped: a lane stays in a group."""
    lane = tl.arange(0, 32)[:, None, None]
    inner = tl.arange(0, 4)[None, None, :]
    if LAYOUT.group_pad == 0:
        expert = chunk * 128 + lane * 4 + inner
        present = expert < LAYOUT.experts
    else:
        place = lane * LAYOUT.per_lane + chunk * 4 + inner
        if LAYOUT.group_pad * LAYOUT.groups == LAYOUT.experts:
            expert = place
            present = expert < LAYOUT.experts
        else:
            within = place % LAYOUT.group_pad
            group = place // LAYOUT.group_pad
            expert = group * (LAYOUT.experts // LAYOUT.groups) + within
            present = (within < LAYOUT.experts // LAYOUT.groups) & (group < LAYOUT.groups)
    return expert, present


@triton.jit
def expert_at(place, LAYOUT: tl.constexpr):
    """Expert at a place: ungrouped rows have no other; of groups, padding is left out."""
    if LAYOUT.group_pad == 0:
        return place
    else:
        size: tl.constexpr = LAYOUT.experts // LAYOUT.groups
        return (place // LAYOUT.group_pad) * size + place % LAYOUT.group_pad


@triton.jit
def load_chunk(logits, exists, chunk, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """Clean logits [32, ROWS, 4] of a chunk; absent experts are -inf."""
    expert, present = expert_of(chunk, LAYOUT)
    mask = tl.broadcast_to(exists[:, :, None], [32, LAYOUT.rows, 4])
    if LAYOUT.ragged:
        mask = mask & present
    # Makes the compiler lay lanes out first: see `plan`.
    pointer = tl.max_contiguous(logits[:, :, None] + expert, [2, 1, 4])
    return clean_logit(tl.load(pointer, mask=mask, other=float("-inf")), SCORE)


@triton.jit
def softmax_parts(logits, exists, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """Largest logit and sum of exps of each row, [1, ROWS]; NaN is left out."""
    CHUNKS: tl.constexpr = LAYOUT.chunks
    ROWS: tl.constexpr = LAYOUT.rows
    largest = tl.full([32, ROWS, 4], float("-inf"), tl.float32)
    total = tl.zeros([32, ROWS, 4], tl.float32)
    if CHUNKS <= 8:
        for chunk in tl.static_range(CHUNKS):
            part = load_chunk(logits, exists, chunk, LAYOUT, SCORE)
            largest = tl.maximum(largest, tl.where(part != part, float("-inf"), part))
    else:
        for chunk in range(CHUNKS):
            part = load_chunk(logits, exists, chunk, LAYOUT, SCORE)
            largest = tl.maximum(largest, tl.where(part != part, float("-inf"), part))
    top = inverse_image(tl.max(tl.max(order_image(largest), axis=2), axis=0, keep_dims=True))
    top = tl.where(top == float("-inf"), 0.0, top)
    if CHUNKS <= 8:
        for chunk in tl.static_range(CHUNKS):
            part = load_chunk(logits, exists, chunk, LAYOUT, SCORE)
            total += tl.where(part != part, 0.0, exp_close(part - top[:, :, None]))
    else:
        for chunk in range(CHUNKS):
            part = load_chunk(logits, exists, chunk, LAYOUT, SCORE)
            total += tl.where(part != part, 0.0, exp_close(part - top[:, :, None]))
    total = tl.sum(tl.sum(total, axis=2), axis=0, keep_dims=True)
    return top, tl.where(total > 0, total, 1.0)


@triton.jit
def bias_at(bias, marked_bias, marked, expert, mask, SCORE: tl.constexpr):
    """fp32 bias at `expert`, from the plain or the marked one."""
    if SCORE.plain_bias:
        if len(mask.shape) == 2:
            pointer = tl.max_contiguous(bias + expert, [2, 1])
        else:
            pointer = tl.max_contiguous(bias + expert, [2, 1, 4])
        value = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    else:
        value = tl.zeros(mask.shape, tl.float32)
    if SCORE.marked_bias:
        if len(mask.shape) == 2:
            pointer = tl.max_contiguous(marked_bias + expert, [2, 1])
        else:
            pointer = tl.max_contiguous(marked_bias + expert, [2, 1, 4])
        other = tl.load(pointer, mask=mask & marked, other=0.0).to(tl.float32)
        value = tl.where(marked, other, value)
    return value


@triton.jit
def load_bias(row, chunk, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """Bias [32, ROWS, 4] of one chunk; 0 if there is none."""
    if SCORE.any_bias:
        expert, present = expert_of(chunk, LAYOUT)
        wide = tl.broadcast_to(expert, [32, LAYOUT.rows, 4])
        mask = tl.broadcast_to(present, [32, LAYOUT.rows, 4])
        return bias_at(row.bias[:, :, None], row.marked_bias, row.marked[:, :, None], wide, mask, SCORE)
    else:
        return 0.0


@triton.jit
def load_inputs(row, chunk, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(logits, bias) of one chunk."""
    x = load_chunk(row.logits, row.exists, chunk, LAYOUT, SCORE)
    return x, load_bias(row, chunk, LAYOUT, SCORE)


@triton.jit
def keys_of(row, x, bias, SCORE: tl.constexpr):
    """fp32 keys [32, ROWS, 4] of one chunk's clean logits and bias."""
    key = base_key(x, row.largest[:, :, None], row.denominator[:, :, None], SCORE)
    if SCORE.any_bias:
        key += bias
    return key


@triton.jit
def images_of(row, x, bias, chunk, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """Key images [32, ROWS, 4] of one chunk's clean logits and bias; absent experts are EXCLUDED."""
    image = key_image(keys_of(row, x, bias, SCORE))
    if LAYOUT.ragged:
        present = expert_of(chunk, LAYOUT)[1]
        image = tl.where(tl.broadcast_to(present, [32, LAYOUT.rows, 4]), image, EXCLUDED)
    return image


@triton.jit
def chunk_images(row, chunk, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """Key images [32, ROWS, 4] of one chunk, loads and all."""
    x, bias = load_inputs(row, chunk, LAYOUT, SCORE)
    return images_of(row, x, bias, chunk, LAYOUT, SCORE)


@triton.jit
def payload_of(payloads, expert, mask, SCORE: tl.constexpr):
    """Inverted id above what the tables say of the expert; -1 where masked."""
    if SCORE.payload:
        if len(mask.shape) == 2:
            pointer = tl.max_contiguous(payloads + expert, [2, 1])
        else:
            pointer = tl.max_contiguous(payloads + expert, [2, 1, 4])
        return tl.load(pointer, mask=mask, other=-1)
    else:
        return tl.where(mask, (LAST_EXPERT - expert) << ID_SHIFT, -1)


@triton.jit
def chunk_payloads(row, chunk, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """Payloads [32, ROWS, 4] of one chunk."""
    expert, present = expert_of(chunk, LAYOUT)
    expert = tl.broadcast_to(expert, [32, LAYOUT.rows, 4])
    return payload_of(row.payloads, expert, tl.broadcast_to(present, [32, LAYOUT.rows, 4]), SCORE)


@triton.jit
def split4(x, ROWS: tl.constexpr):
    """[32, ROWS, 4] -> four [32, ROWS], in order."""
    even, odd = tl.split(tl.reshape(x, [32, ROWS, 2, 2]))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def early_loads(row, EARLY: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(logits, bias) of all chunks: a batch of one wave is all latency, so every load is sent before any arithmetic."""
    loaded = ()
    if EARLY:
        for chunk in tl.static_range(tl.constexpr(LAYOUT.chunks)):
            loaded = loaded + (load_inputs(row, chunk, LAYOUT, SCORE),)
    return loaded


@triton.jit
def gated_inputs(row, loaded, chunk: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """(logits, bias) of one chunk, from `early_loads` if it has them.

    Nothing is added to the bias of a row that counts. The compiler would load what `ready` hangs on last of all; the
    first chunk's arithmetic needs it beside loads that are waited for anyway.
    """
    if len(loaded) > 0:
        x, bias = loaded[chunk]
    else:
        x, bias = load_inputs(row, chunk, LAYOUT, SCORE)
    if chunk == 0 and SCORE.any_bias:
        bias += tl.where(row.ready, 0.0, float("nan"))[:, :, None]
    return x, bias


@triton.jit
def gated_images(row, loaded, chunk: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """Key images of one chunk, gated."""
    x, bias = gated_inputs(row, loaded, chunk, LAYOUT, SCORE)
    return images_of(row, x, bias, chunk, LAYOUT, SCORE)


@triton.jit
def gated_keys(row, loaded, chunk: tl.constexpr, LAYOUT: tl.constexpr, SCORE: tl.constexpr):
    """fp32 keys of one chunk, gated; absent experts are not marked."""
    x, bias = gated_inputs(row, loaded, chunk, LAYOUT, SCORE)
    return keys_of(row, x, bias, SCORE)
