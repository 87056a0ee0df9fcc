"""Compiling what a server will need before it serves."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from evenroute.eplb._checks import describe, require_bool, require_int
from evenroute.routing.call_checks import LOGIT_DTYPES, check_call
from evenroute.routing.kernels.plan import CLASS_ROWS, size_class, supports_groups
from evenroute.routing.output import RouteCall, RouterPlan, allocate_output

if TYPE_CHECKING:
    from evenroute.routing.direct import DirectLaunch


class WarmUp(NamedTuple):
    """seconds it took; compiled: one line a form that was compiled (or read from Triton's cache on disk)."""

    seconds: float
    compiled: tuple[str, ...]


def warm_up(
    plan: RouterPlan,
    direct: DirectLaunch | None,
    rows: int | Iterable[int],
    dtype: torch.dtype,
    bias: Tensor | None,
    padding: bool,
    *,
    compiles: bool,
    pdl: bool,
) -> WarmUp:
    """`Router.warm_up`. compiles: the router has a compiled kernel; direct: where its forms are kept."""
    numbers = _row_numbers(rows)
    if dtype not in LOGIT_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, LOGIT_DTYPES))}, found {describe(dtype)}")
    require_bool("padding", padding)
    device = plan.seed.device
    begin, compiled = time.perf_counter(), []
    forms = {(size_class(number), plan.mode_of(number).name): number for number in sorted(numbers)}
    for number in forms.values():
        logits = torch.zeros((number, plan.config.num_experts), dtype=dtype, device=device)
        valid = torch.zeros(1, dtype=torch.int32, device=device) if padding else None
        out = allocate_output(plan, number, device)
        for count in (True, False):
            call = RouteCall(number, 0, logits, bias, num_valid_tokens=valid, count=count)
            check_call(plan, call)
            if not compiles or not supports_groups(plan.config):
                continue
            from evenroute.routing.launch import compile_kernel

            launched = compile_kernel(plan, call, out, pdl=pdl)
            if direct is not None:
                direct.learn(call, out, launched)
            deal = plan.mode_of(number).name
            compiled.append(f"{deal} deal, {_words(number, dtype, bias, padding, count)}")
    return WarmUp(time.perf_counter() - begin, tuple(compiled))


def _row_numbers(rows: Any) -> list[int]:
    numbers = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str | Tensor) else [rows]
    for number in numbers:
        require_int("rows", number, 1)
    if not numbers:
        raise ValueError("rows is empty: name the batch sizes that will be served")
    return numbers


def _words(number: int, dtype: torch.dtype, bias: Tensor | None, padding: bool, count: bool) -> str:
    sizes = (f"1 to {CLASS_ROWS[0]}", f"{CLASS_ROWS[0] + 1} to {CLASS_ROWS[1]}", f"over {CLASS_ROWS[1]}")
    parts = [f"{sizes[size_class(number)]} rows", str(dtype).removeprefix("torch.")]
    parts += [f"{str(bias.dtype).removeprefix('torch.')} bias"] if bias is not None else []
    parts += ["padding"] if padding else []
    return ", ".join([*parts, "counting" if count else "not counting"])
