"""Ranks come and go under traffic: kills, stops, joins, leaves; every output is checked. No torch in this process."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evenroute.tools.bench.options import BenchParser
from evenroute.tools.elastic.drive import ElasticRun, HangError, Recovered

ABOUT = """Kills, stops, adds and removes ranks of a real MoE that is served meanwhile (gloo on the CPU, NCCL where each
rank has a GPU). Every output is compared with one process that holds all experts.

    evenroute bench elastic --ranks 4 --kill-rank 1@100 --join 200 --leave 0@300
    evenroute bench elastic --ranks 4 --kills 50

R is a rank's place at that time, STEP a step's number. Exit status: 0 all outputs right and all who lived served on,
1 not so, 2 wrong use.
"""


@dataclass(frozen=True)
class Act:
    """Something to be done once a step is reached."""

    step: int
    what: str
    rank: int = -1


def _at(text: str) -> tuple[int, int]:
    rank, at, step = text.partition("@")
    if not (at and rank.isdigit() and step.isdigit()):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected RANK@STEP")
    return int(rank), int(step)


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags; wrong ones end the process with status 2."""
    parser = BenchParser("elastic", ABOUT)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes at the start (default: 4)")
    add("--kill-rank", type=_at, action="append", default=[], metavar="R@STEP", help="kill -9 of a rank")
    add("--stop-rank", type=_at, action="append", default=[], metavar="R@STEP", help="SIGSTOP of a rank")
    add("--join", type=int, action="append", default=[], metavar="STEP", help="a rank joins")
    add("--leave", type=_at, action="append", default=[], metavar="R@STEP", help="a rank leaves as announced")
    add(
        "--kills",
        type=int,
        default=0,
        help="so many random kills, one after the other; a rank joins after each",
    )
    add("--seed", type=int, default=1, help="of the random kills (default: 1)")
    add("--steps", type=int, default=50, help="steps after the last act (default: 50)")
    add("--experts", type=int, default=8, help="logical experts (default: 8)")
    add("--slots", type=int, default=4, help="slots of a rank (default: 4)")
    add("--layers", type=int, default=3, help="MoE layers (default: 3)")
    add("--limit", type=float, default=2.0, help="seconds after which a collective has failed (default: 2)")
    add("--json", action="store_true", help="one JSON object on stdout and nothing else")
    add("--report", type=Path, help="write that object here, too")
    args = parser.parse_args(argv)
    for name in ("ranks", "steps", "experts", "slots", "layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: found {getattr(args, name)}, expected at least 1")
    if args.ranks * args.slots < args.experts:
        parser.error(
            f"--ranks: {args.ranks} ranks with {args.slots} slots each found, expected room for {args.experts} experts"
        )
    if args.slots > args.experts:
        parser.error(f"--slots: found {args.slots}, expected at most the {args.experts} experts")
    return args


def acts_of(args: argparse.Namespace) -> list[Act]:
    """What the flags ask for, by step."""
    acts = [Act(step, "kill", rank) for rank, step in args.kill_rank]
    acts += [Act(step, "stop", rank) for rank, step in args.stop_rank]
    acts += [Act(step, "join") for step in args.join]
    acts += [Act(step, "leave", rank) for rank, step in args.leave]
    return sorted(acts, key=lambda act: act.step)


def perform(run: ElasticRun, act: Act) -> Recovered:
    """Do it, and wait until all who live serve again. Raises HangError."""
    run.until(lambda: run.last_step() >= act.step, 120.0, f"step {act.step}")
    ranks = run.newest()[1]
    if act.what == "join":
        at = time.monotonic()
        run.launcher.join()
        return run.grown(ranks + 1, at, 60.0)
    by_rank = {event["rank"]: event["member"] for event in run.serving(run.newest()[0])}
    if act.rank not in by_rank:
        raise HangError(f"{act.what} {act.rank}@{act.step}: there are {ranks} ranks then")
    child = run.members()[by_rank[act.rank]]
    if act.what == "leave":
        at = time.monotonic()
        (run.folder / f"leave-{by_rank[act.rank]}").touch()
        return run.grown(ranks - 1, at, 60.0)
    at = run.kill(child, signal.SIGKILL if act.what == "kill" else signal.SIGSTOP)
    return run.recovered([child], at, 30.0)


def random_kills(run: ElasticRun, kills: int, seed: int, say: Any) -> list[Recovered]:
    """Kills of random ranks at random moments; after each a rank joins."""
    rng, found = random.Random(seed), []
    for number in range(kills):
        time.sleep(rng.uniform(0.0, 0.3))
        child = rng.choice(list(run.members().values()))
        at = run.kill(child)
        back = run.recovered([child], at, 30.0)
        found.append(back)
        run.launcher.join()
        run.grown(back.ranks + 1, time.monotonic(), 60.0)
        say(f"kill {number + 1} of {kills}: {back.ranks} ranks serve again after {back.seconds:.2f} s")
    return found


def main(argv: list[str]) -> int:
    """Run it; the exit status."""
    args = parse(argv)
    flags = [f"--{name}={getattr(args, name)}" for name in ("experts", "slots", "layers", "limit")]

    def say(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    found: dict[str, Any] = {"ranks": args.ranks, "acts": [], "problem": ""}
    try:
        with ElasticRun(args.ranks, flags=flags, say=say, quiet=True) as run:
            for act in acts_of(args):
                back = perform(run, act)
                who = f" rank {act.rank}" if act.rank >= 0 else ""
                say(
                    f"{act.what}{who} at step {act.step}: {back.ranks} ranks serve in membership {back.membership} "
                    f"after {back.seconds:.2f} s, paused {max(back.paused):.2f} s at most"
                )
                found["acts"].append({**asdict(act), **asdict(back)})
            for back in random_kills(run, args.kills, args.seed, say):
                found["acts"].append({"what": "kill", **asdict(back)})
            run.go_on(args.steps)
            ends = run.stop()
            found["ends"] = [{k: v for k, v in end.items() if k != "routed"} for end in ends]
            found["problem"] = _judge(ends)
    except HangError as error:
        found["problem"] = str(error)
    if args.report is not None:
        args.report.write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))
    elif found["problem"]:
        print(f"evenroute: {found['problem']}", file=sys.stderr)
    else:
        worst = max(end["worst"] for end in found["ends"])
        done = sum(end["done"] for end in found["ends"])
        say(f"{done} steps of those who lived to the end are done, largest relative error {worst:.1e}")
    return 1 if found["problem"] else 0


def _judge(ends: list[dict[str, Any]]) -> str:
    """What is wrong with how the processes that lived ended; empty = nothing."""
    for end in ends:
        who = f"member {end.get('member')}"
        if not end["finished"]:
            return f"{who} ended: {end['text']}"
        if end["twice"]:
            return f"{who}: {end['twice']} batches are done twice"
        if not end["stored"]:
            return f"{who}: not all counts are stored"
    return ""
