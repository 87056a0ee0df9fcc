"""Batches by their counts of logical experts, drawn from a layer's load."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PROMPT_TOKENS = 2048
PROMPT_SPREAD = 1.0  # of the lognormal by which a prompt likes an expert more or less
MOST_SINGLE = 4096  # tokens drawn one by one, so that none has an expert twice; a larger sum hides it

Counts = NDArray[np.int64]


def draw_batches(
    load: NDArray[np.float64], ranks: int, tokens: int, top_k: int, kind: str, rng: np.random.Generator
) -> Counts:
    """Counts ``[R, E]`` of a batch of so many tokens on every rank, for a layer's load ``[E]``; iid or prompts."""
    chance = load / load.sum()
    found = np.zeros((ranks, len(load)), np.int64)
    for rank in range(ranks):
        parts = [tokens]
        if kind == "prompts":
            parts = [min(PROMPT_TOKENS, tokens - begin) for begin in range(0, tokens, PROMPT_TOKENS)]
        for part in parts:
            liked = chance
            if kind == "prompts":
                liked = chance * np.exp(PROMPT_SPREAD * rng.standard_normal(len(chance)))
                liked = liked / liked.sum()
            if tokens * ranks <= MOST_SINGLE:
                found[rank] += _tokens(liked, part, top_k, rng)
            else:
                found[rank] += rng.multinomial(part * top_k, liked)
    return found


def _tokens(chance: NDArray[np.float64], tokens: int, top_k: int, rng: np.random.Generator) -> Counts:
    """Counts ``[E]`` of tokens with `top_k` different experts: systematic sampling in random order (Madow 1949)."""
    part = chance * top_k
    while (part > 1 + 1e-9).any():  # who would be chosen twice is chosen once, and the others more often
        sure = part >= 1
        rest = part[~sure].sum()
        part = np.where(sure, 1.0, part * ((top_k - sure.sum()) / rest if rest > 0 else 0.0))
    order = rng.random((tokens, len(chance))).argsort(axis=1)
    upto = part[order].cumsum(axis=1)
    upto[:, -1] = top_k
    picks = np.floor(upto + rng.random((tokens, 1))).astype(np.int64)
    chosen = np.diff(picks, axis=1, prepend=0) > 0
    return np.bincount(order[chosen], minlength=len(chance))
