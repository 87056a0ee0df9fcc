"""What the API answers, as plain values for JSON. Times in seconds since 1970, keys as text (epoch in hex/version)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np

from evenroute.dist.web.bins import Loads, TimeBin
from evenroute.dist.web.history import LoadSnapshot
from evenroute.dist.wire.control import RebalancerStatus
from evenroute.eplb._fields import named
from evenroute.eplb.loads.balance import balancedness

HOTTEST = 32  # experts of a layer that are named


def key_text(key: tuple[int, int]) -> str | None:
    """(epoch, version) as `status` writes it; None before the first."""
    return None if key == (0, 0) else f"{key[0]:x}/{key[1]}"


def status_answer(status: RebalancerStatus) -> dict[str, Any]:
    """As `evenroute status --json`."""
    return {"healthy": status.healthy, **msgspec.to_builtins(status)}


def loads_answer(found: LoadSnapshot, moment: float | None) -> dict[str, Any] | None:
    """Rank loads of every layer, over their layer's mean, now or in the span around ``moment``; None without any."""
    span = found.now if moment is None else _at(found, moment)
    if span is None:
        return None
    balanced = balancedness(span.loads)
    return {
        **_span(span),
        "layers": len(span.loads),
        "ranks": span.loads.shape[1],
        "balancedness": balanced.as_dict(),
        "without": balancedness(span.without).total,
        "relative": _relative(span.loads),
        "rank_relative": _relative(span.loads.sum(axis=0, keepdims=True))[0],
    }


def history_answer(found: LoadSnapshot, detail: str) -> dict[str, Any]:
    """Balancedness over time, with and without evenroute; ``detail`` layers or ranks: a value for each of them too."""
    answer: dict[str, Any] = {
        "reading": found.reading,
        "problem": found.problem,
        "points": [asdict(point) for point in found.points],
    }
    if detail == "layers":
        rows = [balancedness(span.loads).as_dict()["per_layer"] for span in found.bins]
        answer["detail"] = [[None if value is None else round(value, 3) for value in row] for row in rows]
    elif detail == "ranks":
        answer["detail"] = [_relative(span.loads.sum(axis=0, keepdims=True))[0] for span in found.bins]
    if detail:
        answer["times"] = [span.start for span in found.bins]
    return answer


def placements_answer(found: LoadSnapshot) -> dict[str, Any]:
    """The newest placements with their reasons and prices; ``achieved``: what they came to while in use."""
    since = dict(reversed([(key, moment) for moment, key in found.in_use]))  # the first time of each
    placements = []
    for note in found.placements:
        key = (note.epoch, note.version)
        began = since.get(key)
        placements.append(
            {
                "key": key_text(key),
                **named(("time", "policy", "reason", "moved_slots", "layers_changed"), note),
                "before": note.balancedness_before,
                "predicted": note.balancedness_predicted,
                "in_use_since": began,
                "achieved": None if began is None else _achieved(found, began),
            }
        )
    return {"placements": placements}


def layer_answer(found: LoadSnapshot, layer: int) -> dict[str, Any] | None:
    """One layer now: its ranks' loads, and its hottest experts with where they lie; None where there is none."""
    span, placement = found.now, found.placement
    if span is None or not 0 <= layer < len(span.loads):
        return None
    experts: list[dict[str, Any]] = []
    if span.counts is not None:
        counts = span.counts[layer]
        total = float(counts.sum())
        hottest = np.argsort(-counts, kind="stable")[:HOTTEST].tolist()
        experts = [{"expert": one, "load": float(counts[one]) / total} for one in hottest if counts[one] > 0]
    if placement is not None and placement.num_layers == len(span.loads):
        row = placement.physical_to_logical[layer]
        width = len(row) // placement.topology.ep_size
        for one in experts:
            slots = np.flatnonzero(row == one["expert"])
            one["slots"] = slots.tolist()
            one["ranks"] = (slots // width).tolist()
    return {
        **_span(span),
        "layer": layer,
        "balancedness": balancedness(span.loads[layer : layer + 1]).total,
        "without": balancedness(span.without[layer : layer + 1]).total,
        "ranks": _relative(span.loads[layer : layer + 1])[0],
        "experts": experts,
    }


def _span(span: TimeBin) -> dict[str, Any]:
    return {"time": span.start, **named(("seconds", "tokens", "first_step", "last_step"), span)}


def _relative(loads: Loads) -> list[list[float] | None]:
    """Loads ``[L, R]`` over the mean of their layer; None for a layer without load."""
    means = loads.mean(axis=1, keepdims=True)
    values = np.round(loads.astype(np.float64) / np.where(means > 0, means, 1.0), 3).tolist()
    return [row if mean > 0 else None for row, mean in zip(values, means[:, 0].tolist(), strict=True)]


def _at(found: LoadSnapshot, moment: float) -> TimeBin | None:
    return next((span for span in found.bins if span.start <= moment < span.start + span.seconds), None)


def _achieved(found: LoadSnapshot, began: float) -> float | None:
    """Mean over the whole spans until the next placement came into use, weighted by tokens."""
    ended = min((moment for moment, _ in found.in_use if moment > began), default=float("inf"))
    spans = [p for p in found.points if p.time >= began and p.time + p.seconds <= ended and p.balancedness]
    tokens = sum(point.tokens for point in spans)
    return sum((point.balancedness or 0.0) * point.tokens for point in spans) / tokens if tokens else None
