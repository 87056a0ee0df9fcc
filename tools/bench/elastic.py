"""Ranks come and go under traffic: kills, stops, joins, leaves; every output is checked. No torch in this process."""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from evenroute.tools.bench.options import parse_elastic
from evenroute.tools.elastic.drive import ElasticRun, HangError, Recovered


@dataclass(frozen=True)
class Act:
    """Something to be done once a step is reached."""

    step: int
    what: str
    rank: int = -1


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
    args = parse_elastic(argv)
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
