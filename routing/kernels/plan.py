"""How the kernel is laid out for a configuration and a batch size: chunks, list depth, rows and warps a program."""

from __future__ import annotations

import math
from functools import lru_cache

from evenroute.routing.kernels.types import LaunchPlan, Layout
from evenroute.routing.settings.config import RouterConfig

LANES = 32
CLASS_ROWS = (256, 4096)  # the last batch sizes of the first two classes


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def supports_groups(config: RouterConfig) -> bool:
    """The lane lists keep a lane within one group: at most 32 groups."""
    return not config.grouped or config.num_groups <= LANES


def overflow_chance(top_k: int, lanes: int, depth: int) -> float:
    """Chance that some lane holds `depth` or more of a row's top_k if they fall at random (union bound)."""
    share = 1.0 / lanes
    tail = sum(math.comb(top_k, n) * share**n * (1 - share) ** (top_k - n) for n in range(depth, top_k + 1))
    return lanes * tail


def list_depth(top_k: int, per_lane: int, lanes: int, num_tokens: int) -> int:
    """Entries a lane keeps: all of up to 8, else as few as put a row on the slow path in one launch of 10."""
    needed = min(top_k, per_lane)
    if per_lane <= 8:
        return needed
    goal = 0.1 / num_tokens
    depth = 4
    while depth < needed and overflow_chance(top_k, lanes, depth) > goal:
        depth += 1
    return depth


def bound_layout(top_k: int, per_lane: int, lanes: int) -> tuple[int, int]:
    """(segments, slots) of the choice by bound: the expected candidates and four deviations must fit the slots.

    With M maxima the K-th largest of them leaves about -M log(1 - K / M) keys above it.
    """
    chunks = per_lane // 4
    for slots in (1, 2):
        for segments in (2, 4, 8):
            maxima = segments * lanes
            if segments > chunks or maxima <= top_k:
                continue
            expected = -maxima * math.log1p(-top_k / maxima)
            spread = math.sqrt(max(expected - top_k, 0.1) * (1 + top_k / maxima))
            if expected + 4 * spread <= LANES * slots:
                return segments, slots
    return min(8, 1 << (chunks.bit_length() - 1)), 2


def chosen_by_bound(top_k: int, per_lane: int, num_tokens: int) -> bool:
    """Wide rows and many columns: lists would be deep, and slow to compile; of 32 places a lane and more, always."""
    if per_lane > 28:
        return True
    if per_lane <= 8 or top_k <= 4:
        return per_lane > 16
    if top_k > 16 or (per_lane > 16 and top_k > 8):
        return True
    return num_tokens > (256 if per_lane > 16 else 4096)


def fits_codes(config: RouterConfig, chunks: int, group: int, group_lanes: int) -> bool:
    """Up to 256 experts, of which 128 places at most can win."""
    if config.num_experts > 256:
        return False
    return chunks == 1 or (chunks == 2 and group_lanes >= 2 and config.topk_group * group <= 128)


def size_class(num_tokens: int) -> int:
    """0 up to 256 rows, 1 up to 4096, 2 above: all that a launch's form knows of T, so that few are compiled."""
    return (num_tokens > CLASS_ROWS[0]) + (num_tokens > CLASS_ROWS[1])


def plan_launch(config: RouterConfig, num_tokens: int) -> LaunchPlan:
    """Plan for T rows, the same for all of a size class."""
    return _plan_class(config, (*CLASS_ROWS, 8192)[size_class(num_tokens)])


@lru_cache(maxsize=256)
def _plan_class(config: RouterConfig, num_tokens: int) -> LaunchPlan:
    size = 256 if num_tokens <= 256 else 8192
    if config.grouped:
        group = max(4, _power_of_two(config.num_experts // config.num_groups))
        per_lane = max(4, _power_of_two(config.num_groups) * group // LANES)
        group_lanes = group // per_lane
        used = group_lanes * config.topk_group
    else:
        group, group_lanes, used = 0, 1, LANES
        per_lane = 4 * -(-config.num_experts // (4 * LANES))
    depth, segments, slots = list_depth(config.top_k, per_lane, used, size), 2, 1
    if config.grouped:
        depth = max(depth, 2)  # a group's score may need the two largest of a lane
    by_bound = chosen_by_bound(config.top_k, per_lane, num_tokens) or (per_lane > 8 and depth > 6)
    if by_bound:
        depth = 0
        segments, slots = bound_layout(config.top_k, per_lane, used)
    rows, warps, registers = program_shape(per_lane, num_tokens)
    # One wave; and rows by bound of few registers, which wait for reductions either way.
    early = num_tokens <= 4096 or (by_bound and per_lane <= 16)
    layout = Layout(
        experts=config.num_experts,
        groups=config.num_groups if config.grouped else 1,
        kept=config.topk_group if config.grouped else 0,
        top2=config.topk_method == "noaux_tc",
        chunks=per_lane // 4,
        group_pad=group,
        group_lanes=group_lanes,
        rows=rows,
        per_lane=per_lane,
        ragged=per_lane * LANES != config.num_experts,
    )
    return LaunchPlan(
        layout,
        top_k=config.top_k,
        depth=depth,
        segments=segments,
        slots=slots,
        early=early,
        coded=fits_codes(config, per_lane // 4, group, group_lanes),
        sort_bound=by_bound and num_tokens <= 4096 and segments == 2 and config.top_k == 16,
        sort_best=by_bound and slots == 1 and config.top_k > 8,
        warps=warps,
        registers=registers,
    )


def program_shape(per_lane: int, num_tokens: int) -> tuple[int, int, int | None]:
    """(rows, warps, registers a thread) of a program, one row a warp: measured on one H200.

    A row's lanes stay in one warp only if the compiler lays lanes out before rows. From Triton 3.7 on it sorts
    dimensions by contiguity and takes the last of equals first, so loads and atomics say (`tl.max_contiguous`) that
    lanes come before rows; without that its code for sm_90 has 35 to 57 barriers, with it none.
    Several warps a program save launches; lists that can run out, and candidates that may not fit, then have to agree
    across warps, which costs more. More rows a warp, and programs that go on to further rows, never paid.
    """
    if per_lane > 8:
        if 16 < per_lane <= 32:  # by itself the compiler takes a few more than 32 one-warp programs have
            return 1, 1, 255 if num_tokens <= 256 else 64
        return 1, 1, 255 if per_lane > 16 and num_tokens <= 256 else None
    if per_lane <= 4 or num_tokens > 256:
        return 4, 4, 64
    return 2, 2, 64
