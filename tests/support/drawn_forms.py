"""Kernel forms drawn over the whole range of `RouterConfig`, until every branch of the launch plan has its share."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from unittest import mock

from evenroute.routing.kernels.plan import plan_launch
from evenroute.routing.kernels.types import LaunchPlan
from support.route_checks import FLAVOURS, Pair, Variant, draw_case
from support.route_variants import OPTIONS, build_variant

ROWS = (48, 300, 5000)  # one of each class that `plan_launch` tells apart


def _listed(plan: LaunchPlan) -> bool:
    return not plan.coded and plan.depth > 0


def _bounded(plan: LaunchPlan) -> bool:
    return not plan.coded and plan.depth == 0 and plan.layout.chunks <= 8


def _wide(plan: LaunchPlan) -> bool:
    return plan.layout.chunks > 8


def _grouped(plan: LaunchPlan) -> bool:
    return plan.layout.kept > 0


def _runs_out(plan: LaunchPlan) -> bool:
    return plan.depth < min(plan.layout.per_lane, plan.top_k)


BRANCHES: dict[str, Callable[[LaunchPlan], bool]] = {
    "codes of one chunk": lambda p: p.coded and p.layout.chunks == 1 and not _grouped(p),
    "codes of one chunk in groups": lambda p: p.coded and p.layout.chunks == 1 and _grouped(p),
    "codes, groups dealt out anew": lambda p: p.coded and p.layout.chunks == 2,
    "codes, padded groups dealt out anew": lambda p: p.coded and p.layout.chunks == 2 and p.layout.ragged,
    "lists": lambda p: _listed(p) and not _grouped(p),
    "lists in groups": lambda p: _listed(p) and _grouped(p),
    "lists in groups, one column": lambda p: _listed(p) and _grouped(p) and p.top_k == 1,
    "lists by halves": lambda p: _listed(p) and p.depth >= 8,
    "lists that run out": lambda p: _listed(p) and _runs_out(p),
    "lists in groups that run out": lambda p: _listed(p) and _runs_out(p) and _grouped(p),
    "bound in groups": lambda p: _bounded(p) and _grouped(p),
    **{f"bound of {n} segments": partial(lambda n, p: _bounded(p) and p.segments == n, n) for n in (2, 4, 8)},
    **{f"bound with {n} slots": partial(lambda n, p: _bounded(p) and p.slots == n, n) for n in (1, 2)},
    "bound, sorted": lambda p: _bounded(p) and p.sort_bound,
    "bound, sorted candidates": lambda p: _bounded(p) and p.sort_best,
    "bound, candidates in turns": lambda p: _bounded(p) and not p.sort_best and p.top_k <= 16,
    "bound, candidates in a loop": lambda p: _bounded(p) and not p.sort_best and p.top_k > 16,
    "wide": lambda p: _wide(p) and not _grouped(p),
    "wide in groups": lambda p: _wide(p) and _grouped(p) and p.layout.chunks <= 16,
    "wide, two words": lambda p: p.layout.chunks > 16,
    **{f"wide of {n} segments": partial(lambda n, p: _wide(p) and p.segments == n, n) for n in (2, 4, 8)},
    **{f"wide with {n} slots": partial(lambda n, p: _wide(p) and p.slots == n, n) for n in (1, 2)},
    "wide, one column": lambda p: _wide(p) and p.top_k == 1,
    "a lane a group": lambda p: _grouped(p) and p.layout.group_lanes == 1,
    "lanes a group": lambda p: _grouped(p) and p.layout.group_lanes > 1,
    "padded groups": lambda p: _grouped(p) and p.layout.ragged,
    "all loads first": lambda p: p.early,
    "loads in turn": lambda p: not p.early,
}


@dataclass(frozen=True)
class Form:
    """One drawn form: a variant of the kernel and the rows of its batches."""

    variant: Variant
    rows: int
    branches: tuple[str, ...]


def draw_config(rng: random.Random) -> tuple[int, ...]:
    """(E, K, G, TG): any that RouterConfig allows; powers of two and small columns more often than by chance."""
    groups = rng.choice((1, 1, rng.randint(2, 32), 1 << rng.randint(1, 5)))
    most = 2048 // groups
    size = rng.choice(
        (rng.randint(2, most), rng.randint(2, max(2, most // 8)), 1 << rng.randint(1, most.bit_length() - 1))
    )
    kept = rng.randint(1, groups)
    columns = rng.choice((1, 2, rng.randint(1, 8), rng.randint(1, 16), rng.randint(1, 32)))
    return groups * size, min(columns, 32, kept * size), groups, kept


def draw_forms(least: int, seed: int = 0, draws: int = 100_000) -> list[Form]:
    """Forms of which every branch sees `least`; a draw that helps no branch is passed over."""
    rng = random.Random(seed)
    seen: Counter[str] = Counter()
    forms = []
    for _ in range(draws):
        experts, top_k, groups, kept = draw_config(rng)
        rows = rng.choice(ROWS)
        pick = {name: rng.choice(values) for name, values in OPTIONS.items()}
        pick["mode"] = "choose"
        ranks = rng.choice((2, 4, 8))
        slots = -(-experts * rng.randint(8, 12) // (8 * ranks)) * ranks
        variant = build_variant((experts, top_k, groups, kept, max(slots, ranks), ranks), pick)
        plan = plan_launch(variant.config, rows)
        branches = tuple(name for name, takes in BRANCHES.items() if takes(plan))
        if all(seen[name] >= least for name in branches):
            continue
        seen.update(branches)
        forms.append(Form(variant, rows, branches))
        if len(seen) == len(BRANCHES) and min(seen.values()) >= least:
            break
    return forms


def check_form(form: Form, seed: int, device: str, backend: str) -> str:
    """The kernel against the reference on worst and random rows; what differs, or "".

    The interpreter routes few rows as if they were many: with the plan of the form's number of rows.
    """
    rows = form.rows if device == "cuda" else 2
    as_planned = mock.patch(
        "evenroute.routing.launch.plan_launch", lambda config, _: plan_launch(config, form.rows)
    )
    try:
        pair = Pair(form.variant, device, backend)
        for turn, flavour in enumerate((FLAVOURS[seed % len(FLAVOURS)], "special", "hot", "equal")):
            with as_planned:
                pair.check(draw_case(form.variant, rows, flavour, seed * 10 + turn, device))
    except Exception as error:  # the process goes on with the next form
        found = f"{type(error).__name__}: {str(error)[:500]}"
        return f"{form.variant.config} rows={form.rows} {form.branches}: {found}"
    return ""


def check_numbers(numbers: list[int], least: int, device: str, backend: str) -> dict[int, tuple[str, float]]:
    """Of `draw_forms(least)`, those with these numbers: what differs, and the seconds that each took."""
    forms, found = draw_forms(least), {}
    for number in numbers:
        begin = time.perf_counter()
        failure = check_form(forms[number], number, device, backend)
        found[number] = (failure, time.perf_counter() - begin)
    return found


def check_side_by_side(
    least: int, device: str, backend: str, workers: int = 16
) -> dict[int, tuple[str, float]]:
    """All of `draw_forms(least)`, compiled and checked in `workers` processes."""
    count = len(draw_forms(least))
    shares = [list(range(first, count, 4 * workers)) for first in range(4 * workers)]
    found: dict[int, tuple[str, float]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for part in pool.map(
            check_numbers, shares, [least] * len(shares), *([x] * len(shares) for x in (device, backend))
        ):
            found |= part
    return found
