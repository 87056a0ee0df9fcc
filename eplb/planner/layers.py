"""What all planners share: loads made comparable, and layers planned side by side."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb._checks import as_integer

LOAD_UNIT = 2.0**40


def normalized(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """``[L, E]`` in [0, 1] of each layer's largest, as multiples of 2**-40; layers without load stay 0.

    Sums of such numbers are exact, so plans depend neither on the order of adding nor on the scale of loads.
    """
    largest = loads.max(axis=1, keepdims=True) if loads.size else np.ones((len(loads), 1))
    scaled = loads / np.where(largest > 0, largest, 1.0)
    return np.ascontiguousarray(np.rint(scaled * LOAD_UNIT) / LOAD_UNIT)


def check_num_threads(num_threads: int | None) -> None:
    """ValueError unless it is None (all cores) or an integer >= 1."""
    if num_threads is not None:
        as_integer("num_threads", num_threads, 1)


def planner_threads(num_layers: int, num_threads: int | None = None) -> int:
    """Threads to plan with: the cores this process may use, at most one a layer."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_threads or cores, num_layers))


def over_layers(
    work: Callable[[int, int], None], num_layers: int, num_threads: int | None = None, block: int = 0
) -> None:
    """Call ``work(first, last)`` for blocks of layers, in threads (kernels hold no interpreter lock).

    Layers are independent, so the outcome does not depend on the number of threads.
    """
    threads = planner_threads(num_layers, num_threads)
    size = block or -(-num_layers // threads) if num_layers else 1
    blocks = [(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
    if threads == 1 or len(blocks) == 1:
        for first, last in blocks:
            work(first, last)
        return
    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, *each) for each in blocks]:
            future.result()
