"""The seeded fault simulator: the protocol's own cores under loss, delay, duplication, reordering, stops, crashes,
lost stores, two masters, full disks, slow transfers, bad content, skewed clocks and a hostile peer.

    cd tests && python -m support.simulator --seeds 0:1000          # prints failing seeds; exit status 1 if any
    cd tests && python -m support.simulator --seeds 4711:4712 --trace   # exact replay, every event
    cd tests && python -m support.simulator --mutation no-pin       # seeds until the planted fault is caught
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from support.simulator_world import Parts, World


def run_seed(seed: int, parts: Parts | None = None, *, trace: bool = False) -> list[str]:
    """Violations of one schedule."""
    return World(seed, parts, trace=trace).run()


def main(arguments: list[str] | None = None) -> int:
    """Command line: see the module's docstring."""
    from support.simulator_mutations import MUTATIONS

    parser = argparse.ArgumentParser(prog="support.simulator", description="seeded fault simulator")
    parser.add_argument("--seeds", default="0:1000", help="first:last, last excluded")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS))
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args(arguments)
    first, last = (int(part) for part in options.seeds.split(":"))
    parts = MUTATIONS[options.mutation] if options.mutation else None
    begun = time.monotonic()
    if options.mutation or options.trace or options.jobs == 1:
        totals = [_run_block((first, last, parts, options.trace, options.mutation is not None))]
    else:
        blocks = [(start, min(start + 250, last), parts, False, False) for start in range(first, last, 250)]
        with multiprocessing.Pool(options.jobs) as pool:
            totals = list(pool.imap_unordered(_run_block, blocks))
    schedules, events, failed = (sum(column) for column in zip(*totals, strict=True))
    seconds = time.monotonic() - begun
    print(f"{schedules} schedules, {events} events, {seconds:.1f} s, {failed} with violations")
    return 1 if failed else 0


def _run_block(block: tuple[int, int, Parts | None, bool, bool]) -> tuple[int, int, int]:
    """Schedules, events and failures of a range of seeds; each failure is printed with its seed."""
    first, last, parts, trace, stop_at_failure = block
    schedules = events = failed = 0
    for seed in range(first, last):
        world = World(seed, parts, trace=trace)
        found = world.run()
        schedules, events = schedules + 1, events + world.num_events
        if found:
            failed += 1
            print(f"seed {seed}: {len(found)} violations; first: {found[0]}", flush=True)
            if stop_at_failure:
                break
    return schedules, events, failed


if __name__ == "__main__":
    sys.exit(main())
