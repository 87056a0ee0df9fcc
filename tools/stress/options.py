"""Options of the stress run: parsing, defaults by model, and every check that needs no process. No torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.keys import load_client_keys
from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.file import load_placement
from evenroute.eplb.placement.models import MODEL_SHAPES, ModelShape
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.settings.modes import DISPATCH_MODES, MODES
from evenroute.tools.flags import FlagParser

ROUTINGS = ("fake", "uniform", "round-robin", "zipf", "trace")
DISPATCHES = ("auto", *DISPATCH_MODES, "dynamic-hash")
SHARED_DISPATCHES = ("auto", *dict.fromkeys(mode.dispatch for mode in MODES if "shared" in mode.tokens))
# These follow the shares that a placement carries; the others divide an expert's tokens evenly.
SHARE_DISPATCHES = ("auto", *dict.fromkeys(mode.dispatch for mode in MODES if mode.weighted))
SHARE_POLICIES = ("auto", "weighted")
POLICIES = ("auto", "global", "hierarchical", "incremental", "weighted")
# Fields of settings whose flag has another name, and all that have one.
_FLAGS = {"num_layers": "layers", "num_logical_experts": "num_experts"}
_FIELDS = re.compile(
    r"(?<![-\w])(?:num_(?:layers|logical_experts|experts|groups|redundant_experts|nodes)|top_k|topk_group)\b"
)


@dataclass(frozen=True)
class StressOptions:
    """One stress run. `tokens` are rows a rank and step; `shape` is the model with the flags applied."""

    routing: str
    shape: ModelShape
    router: RouterConfig
    topology: Topology
    steps: int
    tokens: int
    dispatch: str
    token_mode: str
    seed: int
    exponent: float
    loads: Path | None
    reshuffle: bool
    rebalancer: str
    keys: Path | None
    interval_steps: int
    agree_every: int
    policy: str
    init_placement: Path | None
    report: Path | None
    step_delay: float
    check: bool
    moe: bool
    store: Path | None
    backend: str
    record_dir: Path | None = None

    @property
    def window_steps(self) -> int:
        """Steps between two takes of the counts: about three windows to a plan."""
        return max(1, self.interval_steps // 3)


def build_parser() -> FlagParser:
    """The stress run's flags; `--help` is their documentation."""
    parser = FlagParser(
        "evenroute stress",
        "Routes real logits for all layers of a model shape on every rank, streams the counts to a rebalancer,\n"
        "switches placements while it runs, and checks every step. --nproc-per-node N starts N ranks.",
    )
    add = parser.add_argument
    add("--routing", choices=ROUTINGS, default="zipf", help="where the logits come from")
    add("--loads", type=Path, help="with --routing trace: a JSON file with `logical_count`")
    add("--zipf-exponent", type=float, default=1.2, help="skew of --routing zipf")
    add("--steps", type=int, default=300, help="forward passes")
    add("--tokens", type=int, default=128, help="rows a rank and step")
    add("--model", choices=sorted(MODEL_SHAPES), default="dsv3", help="whose shape to route")
    add("--layers", type=int, help="MoE layers (default: the model's)")
    add("--num-experts", type=int, help="logical experts a layer (default: the model's)")
    add("--top-k", type=int, help="experts a token (default: the model's)")
    add("--num-groups", type=int, help="expert groups (default: the model's)")
    add("--topk-group", type=int, help="groups that a token may use (default: the model's)")
    add(
        "--num-redundant-experts",
        "--ep-num-redundant-experts",
        type=int,
        help="slots beyond one per expert (default: the model's)",
    )
    add("--num-nodes", type=int, default=1, help="nodes that hold the ranks")
    add(
        "--dispatch",
        choices=DISPATCHES,
        default="auto",
        help="how a token finds a replica (default: auto, weighted once shares are uneven)",
    )
    add(
        "--token-mode",
        choices=("own", "shared"),
        default="own",
        help="whether each rank has tokens of its own, or all have the same ones",
    )
    add("--seed", type=int, default=0, help="of logits and popularity")
    add("--no-reshuffle", dest="reshuffle", action="store_false", help="keep the popularity all the way")
    add("--rebalancer", default="start", metavar="start|off|ADDR", help="one of our own, none, or this one")
    add("--keys", type=Path, help="this rank's key file (rank.toml), for a --rebalancer with CURVE keys")
    add("--interval-steps", type=int, default=30, help="steps between two plans of our own rebalancer")
    add("--agree-every", type=int, default=4, help="steps between two votes")
    add("--policy", choices=POLICIES, help="default: auto; incremental with a dispatch that takes no shares")
    add("--init-placement", "--init-expert-location", type=Path, help="a placement file to start from")
    add("--report", type=Path, help="write the final table as JSON")
    add("--step-delay", type=float, default=0.0, help="seconds a step takes beside the routing")
    add("--no-check", dest="check", action="store_false", help="leave the per-step checks out")
    add(
        "--moe",
        action="store_true",
        help="run the layers with real weights and migrate them; layers then switch over several steps, and the "
        "predicted balancedness of a `switching` row is that of its first step's placement",
    )
    add("--store", type=Path, help="keep our own rebalancer's history here (default: a temporary folder)")
    add(
        "--record-dir",
        type=Path,
        help="an existing folder, for `evenroute record start --mode per_pass|per_token`",
    )
    add("--backend", choices=("auto", "reference", "triton"), default="auto", help="routing implementation")
    return parser


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"--{name}: found {value}, expected {least:g} to {most:g}")


def _shape(args: argparse.Namespace) -> ModelShape:
    """The model's shape with the flags given over it."""
    base = MODEL_SHAPES[args.model]
    flags = {
        "num_layers": args.layers,
        "num_logical_experts": args.num_experts,
        "top_k": args.top_k,
        "num_groups": args.num_groups,
        "topk_group": args.topk_group,
        "num_redundant_experts": args.num_redundant_experts,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if given.get("num_logical_experts", base.num_logical_experts) != base.num_logical_experts:
        given.setdefault("num_redundant_experts", 0)
    return replace(base, num_shared_experts=0, **given)


@contextmanager
def _flags_named() -> Iterator[None]:
    """Errors of settings name their fields: here by the flags that set them."""
    try:
        yield
    except ValueError as error:
        text = _FIELDS.sub(lambda found: f"--{_FLAGS.get(found[0], found[0]).replace('_', '-')}", str(error))
        raise ValueError(text) from None


def _check_loads(args: argparse.Namespace, shape: ModelShape) -> None:
    if args.routing == "trace" and args.loads is None:
        raise ValueError("--loads: missing, expected a JSON file with `logical_count` for --routing trace")
    if args.routing != "trace" and args.loads is not None:
        raise ValueError(f"--loads: found with --routing {args.routing}, expected only with --routing trace")
    if args.loads is not None:
        loads = read_logical_count(args.loads)
        experts = loads.shape[1]
        layers = int((loads.sum(axis=1) > 0).sum())
        if experts != shape.num_logical_experts:
            raise ValueError(
                f"--loads: {args.loads} has {experts} experts, expected {shape.num_logical_experts} of --model"
            )
        if layers < shape.num_layers:
            raise ValueError(
                f"--loads: {args.loads} has {layers} layers with load, expected at least {shape.num_layers}"
            )


def _check_start(args: argparse.Namespace, shape: ModelShape, topology: Topology) -> None:
    """What the placements and inputs of this shape allow."""
    if args.init_placement is not None:
        placement, _ = load_placement(args.init_placement)
        found = (placement.num_layers, placement.num_logical_experts, placement.num_slots, placement.topology)
        wanted = (shape.num_layers, shape.num_logical_experts, shape.num_slots, topology)
        if found != wanted:
            raise ValueError(
                f"--init-placement: {args.init_placement} has layers, experts, slots, topology {found}, "
                f"expected {wanted}"
            )
    if args.policy == "hierarchical" and shape.num_groups % topology.num_nodes:
        raise ValueError(
            f"--num-nodes: found {topology.num_nodes} with --policy hierarchical, expected a divisor of the "
            f"{shape.num_groups} groups"
        )
    a_rank = shape.num_logical_experts // topology.ep_size
    if args.routing == "round-robin" and -(-shape.top_k // topology.ep_size) > a_rank:
        raise ValueError(
            f"--top-k: found {shape.top_k} with --routing round-robin on {topology.ep_size} ranks, which hold "
            f"{a_rank} experts each"
        )


def _check_rebalancer(args: argparse.Namespace) -> None:
    if args.rebalancer not in ("start", "off"):
        parse_address(args.rebalancer, field="--rebalancer")
        if args.store is not None:
            raise ValueError(f"--store: found with --rebalancer {args.rebalancer}, which has its own")
    elif args.keys is not None:
        raise ValueError(f"--keys: found with --rebalancer {args.rebalancer}, expected only with an address")
    if args.keys is not None:
        load_client_keys(args.keys)


def _policy(args: argparse.Namespace) -> str:
    """The planner's policy; one that plans uneven shares needs a dispatch that follows them."""
    takes_shares = args.dispatch in SHARE_DISPATCHES
    policy: str = args.policy or ("auto" if takes_shares else "incremental")
    if policy in SHARE_POLICIES and not takes_shares:
        raise ValueError(
            f"--policy: found {policy} with --dispatch {args.dispatch}, which takes no shares; expected "
            f"{', '.join(name for name in POLICIES if name not in SHARE_POLICIES)}"
        )
    return policy


def parse_options(argv: list[str], *, ep_size: int) -> StressOptions:
    """Parses and checks all flags for `ep_size` ranks.

    Raises ValueError (one line: flag, found, expected); unknown flags end the process with status 2.
    """
    for word in argv:
        if word.partition("=")[0] in ("--kill-rank", "--join", "--leave"):
            raise ValueError(
                f"{word}: ranks of a stress run stay; expected `evenroute bench elastic {word} ...`"
            )
    args = build_parser().parse_args(argv)
    for name, value, least, most in (
        ("steps", args.steps, 1, 10**9),
        ("tokens", args.tokens, 0, 1 << 24),
        ("zipf-exponent", args.zipf_exponent, 0, 10),
        ("interval-steps", args.interval_steps, 1, 10**9),
        ("agree-every", args.agree_every, 1, 10**6),
        ("step-delay", args.step_delay, 0, 3600),
        ("seed", args.seed, 0, 2**32),
    ):
        _within(name, value, least, most)
    with _flags_named():
        shape = _shape(args)
        router = RouterConfig.of_model(shape)
        topology = Topology(ep_size, args.num_nodes)
        Placement.initial(shape.num_layers, shape.num_logical_experts, shape.num_slots, topology)
    _check_loads(args, shape)
    _check_start(args, shape, topology)
    if args.token_mode == "shared" and args.dispatch not in SHARED_DISPATCHES:
        raise ValueError(
            f"--dispatch: found {args.dispatch} with --token-mode shared, expected {' or '.join(SHARED_DISPATCHES)}"
        )
    _check_rebalancer(args)
    for name in ("report", "store"):
        path = getattr(args, name)
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            wrong = "is a folder" if path.is_dir() else f"folder {path.resolve().parent} does not exist"
            raise ValueError(f"--{name}: {path}: {wrong}, expected a file in an existing folder")
    if args.record_dir is not None and not args.record_dir.is_dir():
        raise ValueError(f"--record-dir: {args.record_dir}: not there, expected an existing folder")
    made: dict[str, Any] = {
        "shape": shape,
        "router": router,
        "topology": topology,
        "exponent": args.zipf_exponent,
        "reshuffle": args.reshuffle and args.routing == "zipf",
        "policy": _policy(args),
    }
    flags = {
        field.name: getattr(args, field.name) for field in fields(StressOptions) if field.name not in made
    }
    return StressOptions(**flags, **made)
