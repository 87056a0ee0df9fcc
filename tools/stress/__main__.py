"""The main job: `torchrun --nproc-per-node N -m evenroute.tools.stress --routing zipf --steps 300`.

Every rank routes real logits for all layers of a model, streams its counts to a rebalancer, and
switches placements with the others while it runs; the run checks itself at every step. Started without
torchrun (`evenroute stress --nproc-per-node N ...`) it checks its flags first and then starts torchrun.

Exit status: 0 all invariants held, 1 one was broken, 2 wrong use.
"""

from __future__ import annotations

import os
import sys

from evenroute.tools.errors import fail, one_line_errors
from evenroute.tools.run.launch import launch, require_torch
from evenroute.tools.stress.options import parse_options

LAUNCHER_FLAG = "--nproc-per-node"


def split_launcher_flag(argv: list[str]) -> tuple[int, list[str]]:
    """Takes `--nproc-per-node N` out of `argv`; returns N (default 2) and the other flags."""
    rest: list[str] = []
    ranks = "2"
    words = iter(argv)
    for word in words:
        name, _, value = word.partition("=")
        if name.replace("_", "-") == LAUNCHER_FLAG:
            ranks = value or next(words, "")
        else:
            rest.append(word)
    if not ranks.isdigit() or int(ranks) < 1:
        raise ValueError(f"{LAUNCHER_FLAG}: found {ranks!r}, expected a whole number of at least 1")
    return int(ranks), rest


def _start_torchrun(ranks: int, argv: list[str]) -> None:
    parse_options(argv, ep_size=ranks)
    require_torch("stress")
    launch("evenroute.tools.stress", argv, ranks)


def _check_hosts(rebalancer: str, world_size: int) -> None:
    """The run's own rebalancer listens on this host alone: ranks of another would never be heard."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if rebalancer == "start" and here < world_size:
        raise ValueError(
            f"--rebalancer: found start with {here} of {world_size} ranks on this host, which alone would reach it; "
            "expected an address (evenroute rebalancer --bind tcp://...) or off"
        )


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Runs one rank (under torchrun) or starts torchrun itself; ends the process with the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None:
        ranks, rest = split_launcher_flag(arguments)
        _start_torchrun(ranks, rest)
        return
    try:
        options = parse_options(arguments, ep_size=int(world_size))
        _check_hosts(options.rebalancer, int(world_size))
    except (ValueError, OSError) as error:
        if os.environ.get("RANK") != "0":  # one line, not one a rank
            raise SystemExit(2) from None
        fail(str(error))
    from evenroute.tools.stress.run import run_rank  # torch is imported only once the flags are right

    sys.exit(run_rank(options))


if __name__ == "__main__":
    main()
