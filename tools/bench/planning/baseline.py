"""The baselines of the planner benchmark: replicate and pack in plain numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _replicate(
    loads: NDArray[np.float64], num_ranks: int, num_slots: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Experts ``[L, P]`` and load per replica ``[L, P]``, heaviest first; all layers at once."""
    num_layers, num_experts = loads.shape
    layers = np.arange(num_layers)
    counts = np.ones((num_layers, num_experts))
    experts = np.empty((num_layers, num_slots), dtype=np.int64)
    experts[:, :num_experts] = np.arange(num_experts)
    for slot in range(num_experts, num_slots):
        chosen = np.where(counts < num_ranks, loads / counts, -1.0).argmax(axis=1)
        experts[:, slot] = chosen
        counts[layers, chosen] += 1
    pieces = np.take_along_axis(loads / counts, experts, axis=1)
    order = np.argsort(-pieces, axis=1, kind="stable")
    return np.take_along_axis(experts, order, axis=1), np.take_along_axis(pieces, order, axis=1)


def greedy_plan(loads: NDArray[np.float64], num_ranks: int, num_slots: int) -> NDArray[np.int64]:
    """The baseline: full plan ``[L, P]`` of ``loads [L, E]``, packed layer by layer as planners in use do it.

    Every further replica goes to the largest load per replica; then heaviest replica first to the lightest rank
    that has room and, where one is left, not this expert.
    """
    all_experts, all_pieces = _replicate(loads, num_ranks, num_slots)
    num_local = num_slots // num_ranks
    table = np.empty((len(loads), num_ranks, num_local), dtype=np.int64)
    for layer in range(len(loads)):
        rank_load = np.zeros(num_ranks)
        used = np.zeros(num_ranks, dtype=np.int64)
        full = np.zeros(num_ranks)
        last = np.full(loads.shape[1], -1)
        holds = np.zeros((loads.shape[1], num_ranks))
        for expert, piece in zip(all_experts[layer].tolist(), all_pieces[layer].tolist(), strict=True):
            penalty = full if last[expert] < 0 else full + holds[expert]
            rank = int((rank_load + penalty).argmin())
            table[layer, rank, used[rank]] = expert
            used[rank] += 1
            rank_load[rank] += piece
            holds[expert, rank] = 1e300
            last[expert] = rank
            if used[rank] == num_local:
                full[rank] = np.inf
    return table.reshape(len(loads), num_slots)


def greedy_plan_layers_at_once(
    loads: NDArray[np.float64], num_ranks: int, num_slots: int
) -> NDArray[np.int64]:
    """The same plan with numpy calls over all layers: as fast as plain numpy gets; for information."""
    experts, pieces = _replicate(loads, num_ranks, num_slots)
    num_layers, num_local = len(loads), num_slots // num_ranks
    layers = np.arange(num_layers)
    table = np.empty((num_layers, num_ranks, num_local), dtype=np.int64)
    used = np.zeros((num_layers, num_ranks), dtype=np.int64)
    rank_load = np.zeros((num_layers, num_ranks))
    holds = np.zeros((num_layers, loads.shape[1], num_ranks), dtype=bool)
    for slot in range(num_slots):
        expert = experts[:, slot]
        penalty = np.where(holds[layers, expert], 1e300, 0.0)
        penalty[used == num_local] = np.inf
        rank = (rank_load + penalty).argmin(axis=1)
        table[layers, rank, used[layers, rank]] = expert
        used[layers, rank] += 1
        rank_load[layers, rank] += pieces[:, slot]
        holds[layers, expert, rank] = True
    return table.reshape(num_layers, num_slots)
