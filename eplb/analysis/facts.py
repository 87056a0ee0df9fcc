"""The facts `evenroute inspect` shows, as plain values: from a `History` to a JSON object, and the diff of two."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._fields import named
from evenroute.eplb._io import shown
from evenroute.eplb.analysis.history import Achieved, History, as_json_points
from evenroute.eplb.loads.balance import Balancedness
from evenroute.eplb.loads.skew import Floats, skew
from evenroute.eplb.loads.source import LoadSource
from evenroute.eplb.loads.total import exact_sum
from evenroute.eplb.placement.classes import told

TOP = 10
HOT = 2.0  # an expert is hot while its load is at least this many times its layer's mean


def named_balancedness(balance: Balancedness, source: LoadSource) -> dict[str, Any]:
    """`Balancedness.as_dict` with the model's layer index; per_layer holds None for "no data"."""
    values = balance.as_dict()
    worst = values["worst_layer"]
    values["worst_layer"] = None if worst is None else source.layer_name(worst)
    return values


def source_facts(source: LoadSource) -> dict[str, Any]:
    """What is known without reading a window."""
    shape = ("num_layers", "num_logical_experts", "num_slots", "ep_size", "num_nodes", "top_k")
    return {
        "path": shown(source.path),
        **named(("key", "kind", "scope", "model", "phase", *shape), source),
        "ranks": list(source.ranks),
        "layer_ids": None if source.layer_ids is None else list(source.layer_ids),
        "notes": list(source.notes),
    }


def history_facts(history: History, *, top: int = TOP) -> dict[str, Any]:
    """Everything about a history of loads."""
    source = history.source
    facts = source_facts(source)
    balance = history.balancedness()
    using = history.using
    routed = exact_sum(history.counted)
    facts |= {
        "num_windows": history.num_windows,
        "num_incomplete_windows": history.num_incomplete,
        "num_windows_without_placement": history.num_unplaced,
        "routed": int(routed) if routed % 1 == 0 else routed,
        "tokens": history.tokens if history.tokens is not None else derived_tokens(history),
        **named(("first_step", "last_step", "first_time", "last_time"), history),
        "layers_without_load": [
            source.layer_name(int(row)) for row in np.flatnonzero(~history.total.any(axis=1))
        ],
    }
    if using is not None:
        facts |= {"ep_size": using.ep_size, "num_slots": using.num_slots, "placement": using.origin}
    facts["balancedness"] = None if balance is None else named_balancedness(balance, source)
    facts["balancedness_over_time"] = as_json_points(history)
    facts["skew"] = skew(history.total).as_dict(source.layer_name)
    facts["hottest_experts"] = hottest_experts(history, top)
    facts["coldest_experts"] = coldest_experts(history, top)
    facts["hottest_ranks"] = hottest_ranks(history, top)
    facts["placements_are"] = source.placements_are
    facts["placements"] = [placement_facts(found) for found in history.achieved]
    return facts


def derived_tokens(history: History) -> int | None:
    """Tokens of a history whose windows do not state them: a layer's load / top-k; None if top-k is unknown."""
    if not history.source.top_k:
        return None
    return int(max(exact_sum(row) for row in history.counted) // history.source.top_k)


def _relative(loads: Floats) -> Floats:
    """Loads over their layer's mean; 0 in layers without load."""
    means = loads.mean(axis=1, keepdims=True)
    return np.asarray(np.divide(loads, means, out=np.zeros_like(loads), where=means > 0))


def hot_since(history: History, layer: int, expert: int) -> dict[str, Any] | None:
    """The window (and step, time) from which the expert has been hot without a break until the end."""
    since = None
    for found in reversed(history.bins):
        row = found.counts[layer]
        if row[expert] < HOT * row.mean() or row[expert] == 0:
            break
        since = found
    if since is None:
        return None
    return {"window": since.first, "step": since.first_step, "time": since.time}


def _smallest(values: Floats, top: int) -> Iterator[tuple[int, int]]:
    """(row, column) of the ``top`` smallest finite values, rising."""
    for flat in np.argsort(values, axis=None, kind="stable")[:top]:
        row, column = divmod(int(flat), values.shape[1])
        if np.isfinite(values[row, column]):
            yield row, column


def _load_facts(history: History, relative: Floats, layer: int, expert: int) -> dict[str, Any]:
    """The load of one expert of a layer, exact and over the layer's mean."""
    return {
        "layer": history.source.layer_name(layer),
        "expert": expert,
        "load": history.counted[layer, expert].item(),
        "times_mean": float(relative[layer, expert]),
    }


def hottest_experts(history: History, top: int) -> list[dict[str, Any]]:
    """The experts with the most load over their layer's mean, over all layers."""
    relative = _relative(history.total)
    return [
        _load_facts(history, relative, layer, expert)
        | {
            "share_of_layer": float(history.total[layer, expert] / history.total[layer].sum()),
            "hot_since": hot_since(history, layer, expert),
        }
        for layer, expert in _smallest(np.where(relative > 0, -relative, np.inf), top)
    ]


def coldest_experts(history: History, top: int) -> list[dict[str, Any]]:
    """The experts with the least load over their layer's mean, in layers with load."""
    relative = _relative(history.total)
    relative[~history.total.any(axis=1)] = np.inf
    pairs = _smallest(relative, top)
    return [_load_facts(history, relative, layer, expert) for layer, expert in pairs]


def hottest_ranks(history: History, top: int) -> list[dict[str, Any]]:
    """(layer, rank) pairs with the most load over the layer's mean rank."""
    if history.rank_total is None:
        return []
    relative = _relative(history.rank_total)
    return [
        {
            "layer": history.source.layer_name(layer),
            "rank": rank,
            "load": float(history.rank_total[layer, rank]),
            "times_mean": float(relative[layer, rank]),
        }
        for layer, rank in _smallest(np.where(relative > 0, -relative, np.inf), top)
    ]


def placement_facts(found: Achieved) -> dict[str, Any]:
    """One published placement: before, predicted and achieved balancedness (mean over layers)."""
    event = found.event
    return {
        **named(("epoch", "version", "time", "step", "policy", "reason", "moves"), event),
        "before": event.balancedness_before,
        "predicted": event.balancedness_predicted,
        "achieved": found.mean,
        "num_windows": found.num_windows,
        "small_batches": told(event.placement.physical_to_logical, event.placement.classes),
    }


def layer_facts(history: History, layer_name: int, *, top: int = TOP) -> dict[str, Any]:
    """One layer in detail, by the model's index; ValueError if there is no such layer."""
    source = history.source
    names = list(source.layer_ids) if source.layer_ids is not None else list(range(source.num_layers))
    if layer_name not in names:
        raise ValueError(f"{source.path}: no layer {layer_name}, expected {_span(names)}")
    layer = names.index(layer_name)
    loads = history.counted[layer]
    order = np.argsort(-loads, kind="stable")
    total = exact_sum(loads)
    using = history.using
    experts = [
        {
            "expert": int(expert),
            "load": loads[expert].item(),
            "share": float(loads[expert] / total) if total else 0.0,
            "times_mean": float(loads[expert]) * len(loads) / total if total else 0.0,
            "hot_since": hot_since(history, layer, int(expert)),
            "ranks": [] if using is None else _ranks_of(history, layer, int(expert)),
        }
        for expert in order[:top]
    ]
    ranks = [] if history.rank_total is None else history.rank_total[layer].tolist()
    balance = history.balancedness()
    known = balance is not None and bool(balance.has_load[layer])
    return {
        "layer": layer_name,
        "load": total,
        "balancedness": float(balance.per_layer[layer]) if balance is not None and known else None,
        "skew": skew(history.total[layer : layer + 1]).as_dict(lambda _: layer_name),
        "experts": experts,
        "rank_loads": ranks,
        "expert_loads": loads.tolist(),
    }


def _ranks_of(history: History, layer: int, expert: int) -> list[int]:
    """Ranks that hold the expert in the placement used last."""
    using = history.using
    placement = history.achieved[-1].event.placement if history.achieved else None
    if placement is None:
        placement = using.placement if using is not None else None
    if placement is None:
        return []
    slots = np.flatnonzero(placement.physical_to_logical[layer] == expert)
    return sorted({int(slot) // placement.num_local_slots for slot in slots})


def _span(names: list[int]) -> str:
    whole = names == list(range(names[0], names[-1] + 1))
    return f"{names[0]} .. {names[-1]}" if whole else ", ".join(map(str, names[:20]))


def diff_facts(first: History, second: History, *, top: int = TOP) -> dict[str, Any]:
    """What changed from one history to another: shares of layers, not raw counts.

    `shift` of a layer is the total variation between its two distributions over experts: 0 = the same popularity,
    1 = disjoint.
    """
    if first.source.shape != second.source.shape:
        raise ValueError(
            f"{second.source.path}: {list(second.source.shape)} (layers, experts), "
            f"{first.source.path} has {list(first.source.shape)}: they cannot be compared"
        )
    source = first.source
    shares = []
    for history in (first, second):
        sums = history.total.sum(axis=1, keepdims=True)
        shares.append(np.divide(history.total, sums, out=np.zeros_like(history.total), where=sums > 0))
    both: NDArray[np.bool_] = np.asarray(first.total.any(axis=1) & second.total.any(axis=1))
    change = shares[1] - shares[0]
    shift = 0.5 * np.abs(change).sum(axis=1)
    changed = both[:, None] & (change != 0)
    experts = [
        {
            "layer": source.layer_name(layer),
            "expert": expert,
            "share_before": float(shares[0][layer, expert]),
            "share_after": float(shares[1][layer, expert]),
        }
        for layer, expert in _smallest(np.where(changed, -np.abs(change), np.inf), top)
    ]
    balances = [history.balancedness() for history in (first, second)]
    worst = int(np.where(both, shift, -1.0).argmax())
    return {
        "first": shown(first.source.path),
        "second": shown(second.source.path),
        "layers_in_both": int(both.sum()),
        "shift": {
            "mean": float(shift[both].mean()) if both.any() else None,
            "worst": float(shift[worst]) if both.any() else None,
            "worst_layer": source.layer_name(worst) if both.any() else None,
            "per_layer": [float(v) if known else None for v, known in zip(shift, both, strict=True)],
        },
        "balancedness": [None if b is None else b.mean for b in balances],
        "tokens": [h.tokens if h.tokens is not None else derived_tokens(h) for h in (first, second)],
        "moved_experts": experts,
    }


def placement_only_facts(source: LoadSource) -> dict[str, Any]:
    """A file that holds a placement and no loads."""
    facts = source_facts(source)
    known = source.placement_map
    assert known is not None
    rows = known.physical_to_logical
    counts = np.stack([np.bincount(row, minlength=known.num_logical_experts) for row in rows])
    values, layers = np.unique(counts, return_counts=True)
    facts["replicas"] = ", ".join(
        f"{number / len(rows):.1f} experts a layer with {value}"
        for value, number in zip(values, layers, strict=True)
    )
    facts["small_batches"] = "" if known.placement is None else told(rows, known.placement.classes)
    if known.ep_size is not None and rows.shape[1] % known.ep_size == 0:
        by_rank = np.sort(rows.reshape(len(rows), known.ep_size, -1), axis=2)
        twice = int((by_rank[:, :, 1:] == by_rank[:, :, :-1]).sum())
        if twice:
            facts["notes"].append(f"{twice} slots repeat an expert that its rank already holds: wasted")
    return facts


def diff_placements(first: LoadSource, second: LoadSource, *, ep_size: int | None = None) -> dict[str, Any]:
    """What changes from one placement to another, in the form of `diff_facts` where it applies."""
    before, after = (
        source.placement_map.to_placement(ep_size or source.ep_size or first.ep_size or second.ep_size)
        for source in (first, second)
        if source.placement_map is not None
    )
    moves = before.moved_slots(after)
    return {
        "first": shown(first.path),
        "second": shown(second.path),
        "num_slots": [before.num_slots, after.num_slots],
        "moves": int(moves.sum()),
        "moves_per_layer": moves.tolist(),
    }
