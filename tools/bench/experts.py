"""`evenroute bench experts`: what an expert touched costs on this device, and a token beyond that.

Grouped products of SwiGLU experts, by experts touched and tokens an expert. With few tokens the weights are the time:
the slope over experts touched is an expert's. With many it is arithmetic: the time of the largest cell by its tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evenroute.eplb._io import write_beside_and_rename
from evenroute.eplb.placement.models import MODEL_SHAPES
from evenroute.eplb.planner.classes.times import TIMES_FORMAT
from evenroute.tools.bench.dispatch_options import parse_experts
from evenroute.tools.bench.router import time_call
from evenroute.tools.errors import check_output, fail
from evenroute.tools.run.launch import count_gpus

TOY = (64, 32)  # hidden and intermediate size on the CPU
FP8 = torch.float8_e4m3fn


class Fit(NamedTuple):
    """Microseconds: of a launch whatever it does, of an expert touched, of a token where they take longer."""

    fixed_us: float
    expert_us: float
    token_us: float


class Experts:
    """SwiGLU experts with random weights: [n, H, 2 I] and [n, I, H], in fp32, bf16 or fp8 (a scale a row)."""

    def __init__(self, number: int, hidden: int, intermediate: int, dtype: str, device: torch.device) -> None:
        self.fp8 = dtype == "fp8"
        self.dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        sizes = ((2 * intermediate, hidden), (hidden, intermediate))
        self.weights = [self._weights(number, *size, device) for size in sizes]
        self.scales = [torch.ones((number, rows), device=device) for rows, _ in sizes]
        self.number, self.hidden, self.device = number, hidden, device

    def _weights(self, number: int, rows: int, columns: int, device: torch.device) -> Tensor:
        made = torch.empty((number, rows, columns), dtype=FP8 if self.fp8 else self.dtype, device=device)
        for one in made:
            one.copy_(torch.randn((rows, columns), device=device) / columns**0.5)
        return made.transpose(1, 2)

    def call(self, tokens: int) -> Callable[[], Tensor]:
        """The experts' work on so many tokens each."""
        rows = torch.randn((self.number * tokens, self.hidden), device=self.device).to(self.dtype)
        ends = torch.arange(1, self.number + 1, device=self.device, dtype=torch.int32) * tokens

        def run() -> Tensor:
            gate, up = self._multiply(rows, 0, ends).chunk(2, dim=1)
            return self._multiply(functional.silu(gate) * up, 1, ends)

        return run

    def _multiply(self, rows: Tensor, which: int, ends: Tensor) -> Tensor:
        weights = self.weights[which]
        if not self.fp8:
            return torch._grouped_mm(rows.contiguous(), weights, offs=ends)
        largest = rows.abs().amax(dim=1).float().clamp(min=1e-6)
        scale = largest / torch.finfo(FP8).max
        small = (rows / scale[:, None]).to(FP8)
        return torch._scaled_grouped_mm(
            small,
            weights,
            scale,
            self.scales[which],
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


def fit_times(cells: list[dict[str, Any]]) -> Fit:
    """A line over experts touched at the fewest tokens, then the largest cell's time beyond it, by its tokens."""
    fewest = min(cell["tokens"] for cell in cells)
    few = [cell for cell in cells if cell["tokens"] == fewest]
    slope, fixed = np.polyfit([cell["touched"] for cell in few], [cell["us"] for cell in few], 1)
    most = max(cells, key=lambda cell: (cell["touched"] * cell["tokens"], cell["tokens"]))
    expert = max(float(slope), 1e-3)
    token = (most["us"] - float(fixed)) / (most["touched"] * most["tokens"])
    return Fit(float(fixed), expert, max(token, 1e-6))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times of all cells, and what they come to."""
    device = torch.device(args.device)
    shape = MODEL_SHAPES[args.model]
    hidden, intermediate = (shape.hidden_size, shape.moe_intermediate_size) if args.device == "cuda" else TOY
    dtype = args.dtype if args.device == "cuda" else "fp32"
    cells = []
    for touched in args.touched:
        experts = Experts(touched, hidden, intermediate, dtype, device)
        cells += [
            {"touched": touched, "tokens": tokens, "us": time_call(experts.call(tokens), device)}
            for tokens in args.tokens
        ]
        del experts  # before the next ones are made
    fit = fit_times(cells)
    return {
        "format": TIMES_FORMAT,
        "model": args.model,
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "dtype": dtype,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        **fit._asdict(),
        "crossover_tokens": fit.expert_us / fit.token_us,
        "cells": cells,
    }


def _print(found: dict[str, Any], args: argparse.Namespace) -> None:
    size = f"{found['hidden_size']} x {found['moe_intermediate_size']}"
    print(f"{found['device']}, {found['dtype']}, experts of {found['model']} ({size}), us:")
    times = {(cell["touched"], cell["tokens"]): cell["us"] for cell in found["cells"]}
    print("experts touched | tokens an expert: " + " ".join(f"{tokens:>8}" for tokens in args.tokens))
    for touched in args.touched:
        print(f"{touched:>34}  " + " ".join(f"{times[touched, tokens]:8.0f}" for tokens in args.tokens))
    print(
        f"{found['fixed_us']:.1f} us + {found['expert_us']:.3g} us an expert touched, {found['token_us']:.3g} us a "
        f"token from {found['crossover_tokens']:.0f} tokens an expert on"
    )


def _refused(args: argparse.Namespace) -> str:
    """Why this host can't measure what was asked; empty if it can."""
    if args.device == "cuda" and not count_gpus():
        return "torch sees no CUDA device; --device cpu runs a small form that says nothing about a GPU"
    if args.device == "cuda" and args.dtype == "fp8" and torch.cuda.get_device_capability() < (9, 0):
        return f"--dtype: found fp8, which {torch.cuda.get_device_name()} does not multiply in groups"
    return ""


def main(argv: list[str] | None = None) -> int:
    """`evenroute bench experts`."""
    args = parse_experts(sys.argv[1:] if argv is None else argv)
    check_output("-o", args.output)
    if refused := _refused(args):
        fail(f"bench experts: {refused}")
    found = measure(args)
    if args.output is not None:
        write_beside_and_rename(args.output, json.dumps(found, indent=1).encode() + b"\n")
    if args.json:
        print(json.dumps(found))
    else:
        _print(found, args)
        if list(product(args.touched, args.tokens))[-1][1] < found["crossover_tokens"]:
            print("note: the crossover lies beyond the tokens measured: give larger --tokens")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
