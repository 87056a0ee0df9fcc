"""Flags of the benches whose ranks or kernels need torch. No torch here: `--help` and wrong flags do without it.

Wrong flags end the process with status 2 and one line. Sizes default to DeepSeek's on GPUs and to a toy on the CPU.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.models import MODEL_SHAPES
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.tools.bench.dispatch_options import parse_dispatch, parse_experts
from evenroute.tools.bench.parser import BenchParser
from evenroute.tools.run.launch import count_gpus

ROUTER = """Times the routing launch: whole, in parts, under PDL and on worst inputs, beside its floor and torch steps.

    evenroute bench router [--model dsv3] [--json]          python -m evenroute.tools.bench.router --rows 1,256,8192

On CUDA every figure is the median of 15 replays of a graph of 40 calls, in microseconds a call, fp32 logits in L2; but
for `host`: microseconds of CPU that an eager call takes to enqueue, outputs given or fresh.
On CPU (reference path) it is the median of single calls.
"""
MIGRATION = """What a migration costs while serving, and that it never hangs (NCCL on GPUs, gloo on the CPU).

    evenroute bench migration --report out.json          # or under torchrun, on every rank

Parts: `steps` (step time before, during, after a rebalance, a blocking migration beside it, bandwidth against a plain
exchange of the same bytes), `throughput` (large batches, before and after, with the balancedness), `endurance` (many
steps with random delays on every rank and migrations throughout). Outputs are checked in all of them. Failures on
purpose, one a run: `kill` (the last rank dies in a migration), `stall` (it stands still: the watchdog ends the others),
`damage` (with --verify: damaged weights are refused, live ones stay).
"""
EP = """What a rebalance brings and costs, on all GPUs of a host (NCCL), or as a toy on the CPU (gloo).

    evenroute bench ep --nproc-per-node 8 --loads a.json --loads b.json --report out.json

Every cell is a job of its own: a stack of MoE layers with real weights under traffic (Zipf, and each file of --loads),
with so many redundant experts and one dispatch, its agent, its rebalancer. It measures step time, throughput and
balancedness before, during and after one rebalance, the migration's bandwidth beside a plain exchange of the same
bytes, and what agreement and switch cost the host. Each step's output is compared with logical experts in one process.
Static and dynamic dispatch get full plans (`global`), weighted dispatch shares first, then few moves (`auto`).

Exit status: 0 all outputs right, 1 one was wrong, 2 wrong use.
"""

ELASTIC = """Kills, stops, adds and removes ranks of a real MoE that is served meanwhile (gloo on the CPU, NCCL where
each rank has a GPU). Every output is compared with one process that holds all experts.

    evenroute bench elastic --ranks 4 --kill-rank 1@100 --join 200 --leave 0@300
    evenroute bench elastic --ranks 4 --kills 50

R is a rank's place at that time, STEP a step's number. Exit status: 0 all outputs right and all who lived served on,
1 not so, 2 wrong use.
"""

DISPATCHES = ("static", "dynamic", "weighted")
# What plans for a dispatch: full plans with even shares, as EPLB is commonly used; shares first, then a few moves.
POLICIES = {"static": "global", "dynamic": "global", "weighted": "auto"}

# Sizes by flag: on GPUs (DeepSeek's), on the CPU (a toy), help.
EP_SIZES: dict[str, tuple[float, float, str]] = {
    "layers": (3, 2, "MoE layers"),
    "experts": (256, 256, "logical experts a layer"),
    "top_k": (8, 8, "experts a token"),
    "hidden": (7168, 32, "hidden size"),
    "intermediate": (2048, 16, "experts' intermediate size"),
    "tokens": (4096, 32, "rows a rank and step"),
    "chunk_mib": (704.0, 0.05, "most that a rank sends in a step while experts move"),
    "window_steps": (8, 4, "steps between two takes of the counts"),
    "windows": (3, 2, "windows to a plan: so many steps come before the rebalance"),
    "after_steps": (24, 8, "steps measured after it"),
    "inputs": (16, 4, "batches drawn, taken in turn"),
}
MIGRATION_SIZES: dict[str, tuple[float, float, str]] = {
    "layers": (3, 3, "MoE layers"),
    "experts": (256, 32, "logical experts a layer"),
    "slots": (288, 36, "physical experts a layer"),
    "top_k": (8, 4, "experts a token"),
    "hidden": (7168, 64, "hidden size"),
    "intermediate": (2048, 32, "experts' intermediate size"),
    "tokens": (128, 16, "rows a rank and step"),
    "steps": (200, 30, "of the part `steps`: before, during and after"),
    "large_tokens": (8192, 256, "rows a rank and step of the part `throughput`"),
    "large_steps": (10, 3, "its steps"),
    "endurance_steps": (10000, 200, "of the part `endurance`"),
    "check_every": (500, 20, "its steps between two checks of the output"),
    "chunk_mib": (176.0, 0.05, "most that a rank sends in a step while experts move"),
}
PARTS = ("steps", "throughput", "endurance", "kill", "stall", "damage")


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


def parse_router(argv: list[str]) -> argparse.Namespace:
    """`args.model` is a list of names of `MODEL_SHAPES`, `args.rows` a list of int."""
    parser = BenchParser("router", ROUTER)
    add = parser.add_argument
    add("--model", action="append", help=f"of {', '.join(MODEL_SHAPES)}; repeatable (default: all)")
    add("--rows", default="1,32,256,2048,8192", help="rows of the launches")
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: a GPU if there is one",
    )
    add("--compile", action="store_true", help="time the torch steps under torch.compile, too")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    args = parser.parse_args(argv)
    args.model = args.model or list(MODEL_SHAPES)
    parser.require_each("--model", args.model, list(MODEL_SHAPES))
    words = args.rows.split(",")
    if not all(word.strip().isdigit() and int(word) for word in words):
        parser.error(f"--rows: found {args.rows!r}, expected numbers of at least 1 with commas between")
    args.rows = [int(word) for word in words]
    if args.device == "cuda" and not count_gpus():
        parser.error("--device: found cuda, but torch sees no CUDA device")
    return args


def parse_migration(argv: list[str], on_gpu: bool | None = None) -> argparse.Namespace:
    """`args.parts` is a list of names of `PARTS`. `on_gpu` None: as this host is."""
    on_gpu = count_gpus() > 0 if on_gpu is None else on_gpu
    parser = BenchParser("migration", MIGRATION)
    add = parser.add_argument
    add("--parts", default="steps,throughput,endurance", help=f"of {', '.join(PARTS)}")
    add("--ranks", type=int, help="without torchrun: start so many (default: one a GPU, else 2)")
    parser.sizes(MIGRATION_SIZES, on_gpu)
    add("--staging-layers", type=int, default=2, help="whole layers that may be in transfer at once")
    add("--zipf-exponent", type=float, default=1.2, help="skew of the traffic")
    add("--policy", default="global", help="of the planner")
    add("--limit-s", type=float, default=300.0, help="of the process groups' collectives")
    add("--verify", action="store_true", help="compare checksums of every moved expert")
    add("--transfer-limit-s", type=float, default=30.0, help="a chunk that takes longer ends the job")
    add("--report", type=Path, help="write the JSON object here, too")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    parser.require_each("--parts", args.parts, PARTS)
    if "damage" in args.parts and not args.verify:
        parser.error("--parts: found 'damage' without --verify, which is what notices it")
    return args


def parse_ep(argv: list[str], on_gpu: bool | None = None) -> argparse.Namespace:
    """`args.redundant` is a list of int, `args.dispatch` a list of str. `on_gpu` None: as this host is."""
    on_gpu = count_gpus() > 0 if on_gpu is None else on_gpu
    parser = BenchParser("ep", EP)
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
    add("--zipf-exponent", type=float, default=1.2, help="skew of the Zipf traffic")
    add("--no-zipf", dest="zipf", action="store_false", help="the files of --loads alone")
    add("--redundant", default="0,8,32", help="redundant experts a layer")
    add("--dispatch", default=",".join(DISPATCHES), help=f"of {', '.join(DISPATCHES)} (default: all)")
    parser.sizes(EP_SIZES, on_gpu)
    add(
        "--staging-layers",
        type=int,
        default=2,
        help="whole layers that may be in transfer at once",
    )
    add("--agree-every", type=int, default=4, help="steps between two votes")
    add(
        "--limit-s",
        type=float,
        default=180.0,
        help="no cell begins that would end later; counted once the planner is compiled",
    )
    add("--cell-limit-s", type=float, default=15.0, help="a cell's steps end after so long")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--report", type=Path, help="write that object here, too")
    args = parser.parse_args(argv)
    try:
        args.redundant = [int(word) for word in str(args.redundant).split(",")]
    except ValueError:
        parser.error(f"--redundant: found {args.redundant!r}, expected numbers with commas between")
    args.dispatch = args.dispatch.split(",")
    parser.require_each("--dispatch", args.dispatch, DISPATCHES)
    parser.require_some(args, "layers", "experts", "top_k", "tokens")
    parser.require_some(args, "window_steps", "windows", "after_steps", "inputs")
    if not args.zipf and not args.loads:
        parser.error("--no-zipf: found without --loads, expected some traffic")
    return args


def check_ep(args: argparse.Namespace, ranks: int) -> None:
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


def ep_cases(args: argparse.Namespace) -> list[Case]:
    """All cells, in the order of the table: traffic, redundant experts, dispatch."""
    sources: list[Path | None] = [None] if args.zipf else []
    product = itertools.product([*sources, *args.loads], args.redundant, args.dispatch)
    return [Case(loads, redundant, dispatch) for loads, redundant, dispatch in product]


def rank_at_step(text: str) -> tuple[int, int]:
    rank, at, step = text.partition("@")
    if not (at and rank.isdigit() and step.isdigit()):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected RANK@STEP")
    return int(rank), int(step)


def elastic_parser() -> BenchParser:
    """Of `evenroute bench elastic`."""
    parser = BenchParser("elastic", ELASTIC)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes at the start")
    add(
        "--kill-rank",
        type=rank_at_step,
        action="append",
        default=[],
        metavar="R@STEP",
        help="kill -9 of a rank",
    )
    add(
        "--stop-rank",
        type=rank_at_step,
        action="append",
        default=[],
        metavar="R@STEP",
        help="SIGSTOP of a rank",
    )
    add("--join", type=int, action="append", default=[], metavar="STEP", help="a rank joins")
    add(
        "--leave",
        type=rank_at_step,
        action="append",
        default=[],
        metavar="R@STEP",
        help="a rank leaves as announced",
    )
    add(
        "--kills",
        type=int,
        default=0,
        help="so many random kills, one after the other; a rank joins after each",
    )
    add("--seed", type=int, default=1, help="of the random kills")
    add("--steps", type=int, default=50, help="steps after the last act")
    add("--experts", type=int, default=8, help="logical experts")
    add("--slots", type=int, default=4, help="slots of a rank")
    add("--layers", type=int, default=3, help="MoE layers")
    add("--limit", type=float, default=2.0, help="seconds after which a collective has failed")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--report", type=Path, help="write that object here, too")
    return parser


def parse_elastic(argv: list[str]) -> argparse.Namespace:
    """`args.kill_rank`, `args.stop_rank` and `args.leave` are lists of (rank, step)."""
    parser = elastic_parser()
    args = parser.parse_args(argv)
    parser.require_some(args, "ranks", "steps", "experts", "slots", "layers")
    if args.ranks * args.slots < args.experts:
        parser.error(
            f"--ranks: {args.ranks} ranks with {args.slots} slots each found, expected room for {args.experts} experts"
        )
    if args.slots > args.experts:
        parser.error(f"--slots: found {args.slots}, expected at most the {args.experts} experts")
    return args


PARSERS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "router": parse_router,
    "migration": parse_migration,
    "ep": parse_ep,
    "elastic": parse_elastic,
    "dispatch": parse_dispatch,
    "experts": parse_experts,
}
