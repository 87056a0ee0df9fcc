"""Flags of `bench_ep.py`, its cells, and how it starts its ranks where torchrun did not. No torch."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.tools.errors import fail

DISPATCHES = ("static", "dynamic", "weighted")
# What plans for a dispatch: full plans with even shares, as EPLB is commonly used; shares first, then a few moves.
POLICIES = {"static": "global", "dynamic": "global", "weighted": "auto"}

GPU_DEFAULTS = {
    "layers": 3,
    "experts": 256,
    "top_k": 8,
    "hidden": 7168,
    "intermediate": 2048,
    "tokens": 4096,
    "chunk_mib": 704.0,
    "window_steps": 8,
    "windows": 3,
    "after_steps": 24,
    "inputs": 16,
}
CPU_DEFAULTS = {
    "layers": 2,
    "experts": 256,
    "top_k": 8,
    "hidden": 32,
    "intermediate": 16,
    "tokens": 32,
    "chunk_mib": 0.05,
    "window_steps": 4,
    "windows": 2,
    "after_steps": 8,
    "inputs": 4,
}
HELP = {
    "tokens": "rows a rank and step",
    "chunk_mib": "most that a rank sends in a step while experts move",
    "window_steps": "steps between two takes of the counts",
    "windows": "windows to a plan: so many steps come before the rebalance",
    "after_steps": "steps measured after it",
    "inputs": "batches drawn, taken in turn",
}


@dataclass(frozen=True)
class Case:
    """One cell of the table. `loads` None: Zipf popularity."""

    loads: Path | None
    redundant: int
    dispatch: str

    @property
    def source(self) -> str:
        """Name of the traffic."""
        return "zipf" if self.loads is None else self.loads.stem

    @property
    def policy(self) -> str:
        """The planner's."""
        return POLICIES[self.dispatch]

    def __str__(self) -> str:
        return f"{self.source}, {self.redundant} redundant, {self.dispatch}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        fail(f"bench ep: {message}")


def _parser(on_gpu: bool, description: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="evenroute bench ep",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nproc-per-node", type=int, help="ranks (default: one a GPU of this host, else 2)")
    add(
        "--loads",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="traffic beside Zipf; repeatable",
    )
    add("--zipf-exponent", type=float, default=1.2, help="skew of the Zipf traffic (default: 1.2)")
    add("--no-zipf", dest="zipf", action="store_false", help="the files of --loads alone")
    add("--redundant", default="0,8,32", help="redundant experts a layer (default: 0,8,32)")
    add("--dispatch", default=",".join(DISPATCHES), help=f"of {', '.join(DISPATCHES)} (default: all)")
    for name, value in (GPU_DEFAULTS if on_gpu else CPU_DEFAULTS).items():
        text = f"{HELP[name]}; default: {value}" if name in HELP else f"default: {value}"
        add(f"--{name.replace('_', '-')}", type=type(value), default=value, help=text)
    add(
        "--staging-layers",
        type=int,
        default=2,
        help="whole layers that may be in transfer at once (default: 2)",
    )
    add("--agree-every", type=int, default=4, help="steps between two votes (default: 4)")
    add(
        "--limit-s",
        type=float,
        default=180.0,
        help="no cell begins that would end later; counted once the planner is compiled (default: 180)",
    )
    add("--cell-limit-s", type=float, default=15.0, help="a cell's steps end after so long (default: 15)")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--report", type=Path, help="write that object here, too")
    return parser


def parse(argv: list[str], on_gpu: bool, description: str | None) -> argparse.Namespace:
    """The bench's flags; sizes default to DeepSeek's on GPUs and to a toy on the CPU. `args.redundant` is a list of
    int, `args.dispatch` a list of str.

    Wrong ones end the process with status 2 and one line.
    """
    parser = _parser(on_gpu, description)
    args = parser.parse_args(argv)
    try:
        args.redundant = [int(word) for word in str(args.redundant).split(",")]
    except ValueError:
        parser.error(f"--redundant: found {args.redundant!r}, expected numbers with commas between")
    args.dispatch = args.dispatch.split(",")
    for name in args.dispatch:
        if name not in DISPATCHES:
            parser.error(f"--dispatch: found {name!r}, expected of {', '.join(DISPATCHES)}")
    for name in ("layers", "experts", "top_k", "tokens", "window_steps", "windows", "after_steps", "inputs"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: found {getattr(args, name)}, expected at least 1")
    if not args.zipf and not args.loads:
        parser.error("--no-zipf: found without --loads, expected some traffic")
    return args


def check(args: argparse.Namespace, ranks: int) -> None:
    """What the number of ranks and the files allow. ValueError or OSError in one line."""
    for redundant in args.redundant:
        Placement.initial(1, args.experts, args.experts + redundant, Topology(ranks))
    for path in args.loads:
        loads = read_logical_count(path)
        layers = int((loads.sum(axis=1) > 0).sum())
        if loads.shape[1] != args.experts or layers < args.layers:
            raise ValueError(
                f"--loads: {path} has {loads.shape[1]} experts and {layers} layers with load, expected {args.experts} "
                f"experts and at least {args.layers} layers"
            )
    if args.report is not None and (args.report.is_dir() or not args.report.absolute().parent.is_dir()):
        wrong = "is a folder" if args.report.is_dir() else "its folder does not exist"
        raise ValueError(f"--report: {args.report}: {wrong}")


def cases(args: argparse.Namespace) -> list[Case]:
    """All cells, in the order of the table: traffic, redundant experts, dispatch."""
    sources: list[Path | None] = [None] if args.zipf else []
    product = itertools.product([*sources, *args.loads], args.redundant, args.dispatch)
    return [Case(loads, redundant, dispatch) for loads, redundant, dispatch in product]


def launch(argv: list[str], ranks: int) -> int:
    """Run the bench under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*command, "-m", "evenroute.tools.bench.ep", *argv], check=False).returncode
