"""The baseline of the planner benchmark: replicate and pack in plain numpy, all layers at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def greedy_plan(loads: NDArray[np.float64], num_ranks: int, num_slots: int) -> NDArray[np.int64]:
    """Full plan ``[L, P]`` of ``loads [L, E]``: every further replica to the largest load per replica, then
    heaviest replica first to the lightest rank that has room and, where one is left, not this expert.
    """
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
    experts = np.take_along_axis(experts, order, axis=1)
    pieces = np.take_along_axis(pieces, order, axis=1)
    num_local = num_slots // num_ranks
    table = np.empty((num_layers, num_ranks, num_local), dtype=np.int64)
    used = np.zeros((num_layers, num_ranks), dtype=np.int64)
    rank_load = np.zeros((num_layers, num_ranks))
    holds = np.zeros((num_layers, num_experts, num_ranks), dtype=bool)
    for slot in range(num_slots):
        expert = experts[:, slot]
        # A full rank is out of the question; one that holds this expert is only taken if no other is left.
        penalty = np.where(holds[layers, expert], 1e300, 0.0)
        penalty[used == num_local] = np.inf
        rank = (rank_load + penalty).argmin(axis=1)
        table[layers, rank, used[layers, rank]] = expert
        used[layers, rank] += 1
        rank_load[layers, rank] += pieces[:, slot]
        holds[layers, expert, rank] = True
    return table.reshape(num_layers, num_slots)
