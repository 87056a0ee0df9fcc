"""Flags of `evenroute bench dispatch` and `bench experts`. No torch here."""

from __future__ import annotations

import argparse
from pathlib import Path

from evenroute.eplb.placement.models import MODEL_SHAPES
from evenroute.eplb.placement.topology import Topology, check_num_slots
from evenroute.tools.bench.parser import BenchParser

DISPATCH = """How even each deal makes single batches, and what the rank that takes longest needs for its experts.

    evenroute bench dispatch                                   # examples/data of a source tree
    evenroute bench dispatch --data decode.json --cells 8/320,32/512 --tokens 32,128

For every number of ranks and slots a plan for the mean of the loads; batches drawn from them: independent tokens
(iid), or prompts that differ in the experts they like (prompts). Deals: even (dynamic), static, hash (planned shares
at random), weighted (planned shares by tickets), batch (those corrected for the batch), auto (weighted by batch-size
class: what a Router does by default). A rank's time is that of its experts: see --expert-us. On a GPU the cost of
each deal's launch stands beside it.

Exit status: 0, or 1 if auto takes over 1 % longer than even dealing in any cell.
"""
EXPERTS = """What an expert touched costs on this GPU, and a token beyond that: grouped GEMMs of SwiGLU experts.

    evenroute bench experts --model dsv3 -o experts.json       # then: bench dispatch --experts experts.json

Needs a GPU (--device cpu runs a small fp32 form, for tests). bf16, or fp8 where the hardware has it.
"""
CELLS = "8/288,8/320,32/288,32/320,32/512,72/360"
TOKENS = "8,32,128,512,2048"
TRAFFICS = ("iid", "prompts")


def _numbers(parser: BenchParser, flag: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        parser.error(f"{flag}: found {text!r}, expected numbers of at least 1 with commas between")
    return [int(word) for word in words]


def parse_dispatch(argv: list[str]) -> argparse.Namespace:
    """`args.cells` is a list of (ranks, slots), `args.tokens` a list of int, `args.traffic` of names."""
    parser = BenchParser("dispatch", DISPATCH)
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="loads (default: examples/data)",
    )
    add("--cells", default=CELLS, help=f"RANKS/SLOTS with commas between (default: {CELLS})")
    add("--tokens", default=TOKENS, help=f"tokens a rank (default: {TOKENS})")
    add("--traffic", default=",".join(TRAFFICS), help=f"of {', '.join(TRAFFICS)} (default: both)")
    add("--top-k", type=int, default=8, help="experts a token (default: 8)")
    add("--layers", type=int, default=8, help="layers with load to draw from, evenly spaced (default: 8)")
    add("--repeats", type=int, default=2, help="batches of a layer (default: 2)")
    add("--experts", type=Path, help="times that `bench experts` wrote")
    add(
        "--expert-us",
        type=float,
        help="microseconds of an expert touched (default: 10.2, an H200's roofline)",
    )
    add("--token-us", type=float, help="of a token, where they take longer (default: .073)")
    add("--seed", type=int, default=1, help="of the batches (default: 1)")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    args = parser.parse_args(argv)
    args.tokens = _numbers(parser, "--tokens", args.tokens)
    cells = []
    for word in args.cells.split(","):
        ranks, _, slots = word.partition("/")
        if not (ranks.strip().isdigit() and slots.strip().isdigit()):
            parser.error(f"--cells: found {word!r}, expected RANKS/SLOTS")
        cells.append((int(ranks), int(slots)))
    args.cells = cells
    args.traffic = args.traffic.split(",")
    for name in args.traffic:
        if name not in TRAFFICS:
            parser.error(f"--traffic: found {name!r}, expected of {', '.join(TRAFFICS)}")
    for name in ("top_k", "layers", "repeats"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: found {getattr(args, name)}, expected at least 1")
    if args.experts is not None and (args.expert_us or args.token_us):
        parser.error("--experts: found beside --expert-us or --token-us, expected one of them")
    return args


def check_cells(cells: list[tuple[int, int]], num_experts: int) -> None:
    """ValueError for a cell in which the loads' experts have no place."""
    for ranks, slots in cells:
        Topology(ranks)
        check_num_slots(num_experts, slots, ranks)


def parse_experts(argv: list[str]) -> argparse.Namespace:
    """`args.touched` and `args.tokens` are lists of int, `args.dtype` one of names."""
    parser = BenchParser("experts", EXPERTS)
    add = parser.add_argument
    add("--model", default="dsv3", choices=tuple(MODEL_SHAPES), help="sizes of its experts")
    add("--device", default="cuda", choices=("cuda", "cpu"), help="where the experts run")
    add("--dtype", default="bf16", choices=("bf16", "fp8"), help="on a GPU")
    add("--touched", default="8,16,32", help="experts touched")
    add("--tokens", default="1,8,16,32,64,128,256,512", help="tokens an expert")
    add("-o", "--output", type=Path, help="write the times here (JSON)")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    args = parser.parse_args(argv)
    args.touched = _numbers(parser, "--touched", args.touched)
    args.tokens = _numbers(parser, "--tokens", args.tokens)
    if len(set(args.touched)) < 2 or len(set(args.tokens)) < 3:
        parser.error(
            "--touched, --tokens: found too few, expected two and three numbers to fit a line through"
        )
    return args
