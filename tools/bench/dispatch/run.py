"""`evenroute bench dispatch`: every deal in every cell, and which takes the least time."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.classes.times import ExpertTimes, given_times, read_times
from evenroute.eplb.planner.plan import plan_placement
from evenroute.tools.bench.dispatch.cost import deal_costs
from evenroute.tools.bench.dispatch.deals import DEALS, Dealer
from evenroute.tools.bench.dispatch.traffic import draw_batches
from evenroute.tools.bench.dispatch_options import check_cells, parse_dispatch
from evenroute.tools.errors import fail

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/data"
ALLOWED = 1.01  # auto may take so much longer than even dealing: the noise of a sample
LAUNCHES = {"even": "exact", "hash": "hash", "weighted": "weighted", "batch": "batch", "auto": "weighted"}
Loads = NDArray[np.float64]


class Figure(NamedTuple):
    """Means over layers and batches: us of the longest rank, its experts touched, balance of tokens."""

    us: float
    touched: float
    balance: float


def read_loads(paths: list[Path], layers: int) -> Loads:
    """Frequencies ``[L, E]`` of evenly spaced layers with load: the mean over files."""
    paths = paths or sorted(EXAMPLES.glob("*.json"))
    if not paths:
        raise ValueError("--data: none given, and this is no source tree with examples/data")
    files = [read_logical_count(path).astype(np.float64) for path in paths]
    shapes = {loads.shape for loads in files}
    if len(shapes) != 1:
        raise ValueError(f"--data: files of one shape expected, found {sorted(shapes)}")
    total = [np.maximum(loads.sum(axis=1, keepdims=True), 1.0) for loads in files]
    mean = np.mean([loads / each for loads, each in zip(files, total, strict=True)], axis=0)
    busy = np.flatnonzero(mean.any(axis=1))
    if not len(busy):
        raise ValueError(f"--data: {paths[0]} holds no load")
    places = np.linspace(0, len(busy) - 1, min(layers, len(busy))).round().astype(int)
    return np.asarray(mean[busy[places]])


def measure(args: argparse.Namespace, loads: Loads, times: ExpertTimes) -> Iterator[dict[str, Any]]:
    """A row for every traffic, number of ranks and slots, and batch size: figures by deal."""
    for ranks, slots in args.cells:
        made = plan_placement(
            loads,
            topology=Topology(ranks),
            num_slots=slots,
            policy="joint",
            top_k=args.top_k,
            expert_times=times,
        )
        dealer = Dealer(made.placement, args.top_k)
        for kind in args.traffic:
            for tokens in args.tokens:
                yield {
                    "traffic": kind,
                    "ep_size": ranks,
                    "num_slots": slots,
                    "tokens": tokens,
                    "deals": {
                        name: figure._asdict()
                        for name, figure in _cell(args, dealer, loads, kind, ranks, tokens, times).items()
                    },
                }


def _cell(
    args: argparse.Namespace,
    dealer: Dealer,
    loads: Loads,
    kind: str,
    ranks: int,
    tokens: int,
    times: ExpertTimes,
) -> dict[str, Figure]:
    rng = np.random.default_rng([args.seed, ranks, tokens])
    found: dict[str, list[Figure]] = {name: [] for name in DEALS}
    for layer, load in enumerate(loads):
        for _ in range(args.repeats):
            counts = torch.from_numpy(draw_batches(load, ranks, tokens, args.top_k, kind, rng))
            seed = int(rng.integers(1 << 30))
            for name in DEALS:
                by_slot = dealer.deal(name, layer, counts, tokens, seed).numpy()
                by_rank, of_ranks = by_slot.reshape(ranks, -1), times.of_ranks(by_slot, ranks)
                longest = int(of_ranks.argmax())
                total = by_rank.sum(axis=1)
                figures = (of_ranks[longest], (by_rank > 0).sum(axis=1).max(), total.mean() / total.max())
                found[name].append(Figure(*(float(figure) for figure in figures)))
    return {name: Figure(*np.mean(figures, axis=0).tolist()) for name, figures in found.items()}


def _longer(row: dict[str, Any]) -> bool:
    deals = row["deals"]
    return bool(deals["auto"]["us"] > ALLOWED * deals["even"]["us"])


def _print(rows: list[dict[str, Any]], costs: dict[int, dict[str, float]], times: ExpertTimes) -> None:
    print(
        f"us a layer on the longest rank (experts touched there at most / balance of tokens); {times.told()}"
    )
    for row in rows:
        print(f"{row['traffic']}, EP{row['ep_size']}/{row['num_slots']}, {row['tokens']} tokens a rank:")
        least = min(deal["us"] for deal in row["deals"].values())
        for name, deal in row["deals"].items():
            cost = costs.get(row["tokens"], {}).get(LAUNCHES.get(name, ""))
            launch = "" if cost is None else f", launch {cost:.2f} us"
            best = " *" if deal["us"] <= ALLOWED * least else ""
            print(
                f"  {name:9s}{deal['us']:8.1f} ({deal['touched']:.1f} / {deal['balance']:.3f}){launch}{best}"
            )
    print("* the least time, within 1 %")


def main(argv: list[str] | None = None) -> int:
    """`evenroute bench dispatch`."""
    args = parse_dispatch(sys.argv[1:] if argv is None else argv)
    try:
        times = (
            given_times(args.expert_us, args.token_us) if args.experts is None else read_times(args.experts)
        )
        loads = read_loads(args.data, args.layers)
        check_cells(args.cells, loads.shape[1])
        if args.top_k > loads.shape[1]:
            raise ValueError(f"--top-k: found {args.top_k}, the loads have {loads.shape[1]} experts")
    except (OSError, ValueError) as error:
        fail(f"bench dispatch: {error}")
    costs = deal_costs("dsv3", args.tokens, torch.device("cuda")) if torch.cuda.is_available() else {}
    rows = list(measure(args, loads, times))
    longer = [row for row in rows if _longer(row)]
    if args.json:
        print(json.dumps({"times": vars(times), "launch_us": costs, "cells": rows, "longer": len(longer)}))
    else:
        _print(rows, costs, times)
        print(f"auto takes over 1 % longer than even dealing in {len(longer)} of {len(rows)} cells")
    return 1 if longer else 0


if __name__ == "__main__":
    raise SystemExit(main())
