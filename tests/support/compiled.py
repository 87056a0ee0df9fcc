"""The planner's kernels, compiled before a test waits for a plan: on a fresh machine that takes longer than a plan."""

from __future__ import annotations

import functools

from evenroute.eplb.planner.warm_up import warm_up


@functools.cache
def compile_planner() -> None:
    """Fill numba's cache on disk, which the rebalancer's planner process reads."""
    warm_up()
