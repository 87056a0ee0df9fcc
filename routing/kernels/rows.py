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
def expert_at(place, FORM: tl.constexpr):
    """Expert at a place: ungrouped rows have no other; of groups, padding is left out."""
    if FORM[3] == 0:
        return place
    else:
        return (place // FORM[3]) * (FORM[1] // FORM[2]) + place % FORM[3]


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
def keys_of(x, bias, largest, denominator, SCORE: tl.constexpr):
    """fp32 keys [32, ROWS, 4] of one chunk's clean logits and bias."""
    key = base_key(x, largest[:, :, None], denominator[:, :, None], SCORE[0], SCORE[1])
    if SCORE[2]:
        key += bias
    return key


@triton.jit
def images_of(
    x, bias, chunk, largest, denominator, SHAPE: tl.constexpr, FORM: tl.constexpr, SCORE: tl.constexpr
):
    """Key images [32, ROWS, 4] of one chunk's clean logits and bias; absent experts are EXCLUDED."""
    image = key_image(keys_of(x, bias, largest, denominator, SCORE))
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
def gated_inputs(
    loaded,
    logit_row,
    bias_row,
    marked_ptr,
    marked,
    chunk: tl.constexpr,
    exists,
    ready,
    EARLY: tl.constexpr,
    SHAPE: tl.constexpr,
    FORM: tl.constexpr,
    SCORE: tl.constexpr,
):
    """(logits, bias) of one chunk.

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
    return x, bias


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
    """Key images of one chunk, gated."""
    x, bias = gated_inputs(
        loaded, logit_row, bias_row, marked_ptr, marked, chunk, exists, ready, EARLY, SHAPE, FORM, SCORE
    )
    return images_of(x, bias, chunk, largest, denominator, SHAPE, FORM, SCORE)


@triton.jit
def gated_keys(
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
    """fp32 keys of one chunk, gated; absent experts are not marked."""
    x, bias = gated_inputs(
        loaded, logit_row, bias_row, marked_ptr, marked, chunk, exists, ready, EARLY, SHAPE, FORM, SCORE
    )
    return keys_of(x, bias, largest, denominator, SCORE)
