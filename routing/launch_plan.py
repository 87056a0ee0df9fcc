"""How the kernel is laid out for a configuration and a batch size: chunks, list depth, rows and warps a program."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from evenroute.routing.config import RouterConfig

LANES = 32


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True)
class LaunchPlan:
    """chunks of four experts a lane; depth of the lists (0: by bound); lanes and padded size of a group."""

    chunks: int
    depth: int
    group_pad: int
    group_lanes: int
    rows: int
    warps: int


def supports_groups(config: RouterConfig) -> bool:
    """The lane lists keep a lane within one group: at most 32 groups."""
    return not config.grouped or config.num_groups <= LANES


def overflow_chance(top_k: int, lanes: int, depth: int) -> float:
    """Chance that some lane holds `depth` or more of a row's top_k if they fall at random (union bound)."""
    share = 1.0 / lanes
    tail = sum(math.comb(top_k, n) * share**n * (1 - share) ** (top_k - n) for n in range(depth, top_k + 1))
    return lanes * tail


def list_depth(top_k: int, per_lane: int, lanes: int, num_tokens: int) -> int:
    """Entries a lane keeps: all that can be needed up to 8, else so many that one launch in 100 takes the slow path."""
    needed = min(top_k, per_lane)
    if per_lane <= 8:
        return needed
    goal = 0.02 / max(min(num_tokens, 8192), 64)
    depth = 4
    while depth < needed and overflow_chance(top_k, lanes, depth) > goal:
        depth += 1
    return depth


def bound_pays(config: RouterConfig, per_lane: int) -> bool:
    """Wide ungrouped rows, and so few columns that the candidates above the bound fit one warp."""
    return not config.grouped and 16 < per_lane <= 32 and config.top_k <= 20


@lru_cache(maxsize=256)
def plan_launch(config: RouterConfig, num_tokens: int) -> LaunchPlan:
    """Plan for T rows; only the class of T matters, so that few variants are compiled."""
    size = 256 if num_tokens <= 256 else 8192
    if config.grouped:
        group = max(4, _power_of_two(config.num_experts // config.num_groups))
        per_lane = max(4, _power_of_two(config.num_groups) * group // LANES)
        group_lanes = group // per_lane
        used = group_lanes * config.topk_group
    else:
        group, group_lanes, used = 0, 1, LANES
        per_lane = 4 * -(-config.num_experts // (4 * LANES))
    depth = list_depth(config.top_k, per_lane, used, size)
    if size > 256 and bound_pays(config, per_lane):
        depth = 0
    rows, warps = rows_and_warps(per_lane, num_tokens)
    return LaunchPlan(per_lane // 4, depth, group, group_lanes, rows, warps)


def rows_and_warps(per_lane: int, num_tokens: int) -> tuple[int, int]:
    """Rows and warps of a program (measured on one H200, see the router's benchmark)."""
    if num_tokens <= 256:
        return (4, 4) if per_lane <= 8 else (1, 1)
    if per_lane <= 4:
        return (4, 4) if num_tokens <= 4096 else (8, 4)
    if per_lane <= 8:
        return (4, 2)
    return (1, 1) if num_tokens <= 4096 or per_lane > 16 else (2, 1)
