"""Plants one small fault after another in the code and says which of them no unit test notices.

    cd tests && python -m support.mutants [--files GLOB] [--sample N] [--jobs N] [--results FILE] [--seconds N]

A mutant differs from the source in one operator, constant, condition or statement. It lives in memory only: a forked
process (and each one that it starts) imports the changed module and runs the tests that reach the changed line, quick
ones first. Survivors that `mutants.md` explains (same file, line of source and change) are known; any other makes the
exit status 1. A run that is given its earlier results goes on where they end.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.mutant_faults import ROOT, Mutant, mutants_of
from support.mutant_tests import PLANTED, Reach, plant, reach_of, run_chosen

JUDGED = ROOT / "tests/support/mutants.md"
LEFT_OUT = ("*/__init__.py", "*/warm_up.py")
LEAST_LIMIT_S = 10.0  # a mutant may use four times the CPU that its tests do without it, and this
MOST_TESTS_S = 90.0  # the quickest tests that reach a line, up to so many seconds together


def _start(reach: Reach, tests: Sequence[str], mutant: Mutant) -> tuple[int, float]:
    """Fork a process that runs the tests, and until when it may. No threads here: a lock that one held would stay shut
    there."""
    cpu_s = round(LEAST_LIMIT_S + 4 * sum(reach.seconds[test] for test in tests))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            with tempfile.TemporaryDirectory() as folder:
                os.environ |= {
                    PLANTED: f"{mutant.path}:{mutant.index}",
                    "HYPOTHESIS_STORAGE_DIRECTORY": folder,
                }
                Path(folder, "sitecustomize.py").write_text(
                    f"import sys\nsys.path.append({str(ROOT / 'tests')!r})\n"
                    "from support.mutant_tests import plant\nplant()\n"
                )
                os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
                plant()
                status = run_chosen(reach.group, tests)
        finally:
            os._exit(status)
    return pid, time.monotonic() + 10 * cpu_s


def _wait(running: dict[int, float]) -> tuple[int, bool]:
    """The first of these processes (pid: until when) that is done, and whether its tests passed."""
    while True:
        for pid, until in running.items():
            done, status, _ = os.wait4(pid, os.WNOHANG)
            if done or time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # what its tests left behind, too
                if not done:
                    os.waitpid(pid, 0)
                return pid, bool(done) and os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)


def _verdicts(chosen: Sequence[Mutant], jobs: int, until: float) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant, and whether the tests passed all the same; in the order in which they end."""
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(chosen))
    while running or (waiting and time.monotonic() < until):
        while waiting and len(running) < jobs and time.monotonic() < until:
            mutant = waiting.pop()
            reach = reach_of(mutant.path)
            tests = reach.tests_of(mutant, MOST_TESTS_S)
            if tests:
                pid, limit = _start(reach, tests, mutant)
                running[pid] = (mutant, limit)
            else:
                yield mutant, True
        if running:
            pid, passed = _wait({pid: limit for pid, (_, limit) in running.items()})
            yield running.pop(pid)[0], passed


def judged() -> dict[tuple[str, str, str], str]:
    """The survivors that `mutants.md` explains: (file, line of source, change) -> why."""
    known = {}
    for line in JUDGED.read_text().splitlines():
        cells = [cell.strip() for cell in line.replace("\\|", "\0").split("|")]
        cells = [cell.replace("\0", "|").strip("`") for cell in cells]
        if len(cells) == 6 and cells[1].endswith(".py"):
            known[cells[1], cells[2], cells[3]] = cells[4]
    return known


def _chosen(pattern: str, sample: int, seed: int) -> list[Mutant]:
    """So many of each group (0 = all), drawn evenly over its files' faults; the files that match."""
    found = []
    for paths in Reach.paths():
        kept = [path for path in paths if not any(fnmatch.fnmatch(path, name) for name in LEFT_OUT)]
        every = [mutant for path in kept if fnmatch.fnmatch(path, pattern) for mutant in mutants_of(path)]
        if 0 < sample < len(every):
            every = random.Random(seed).sample(every, sample)
        found += sorted(every, key=lambda m: (m.path, m.index))
    return found


def _table(results: dict[str, bool], every: dict[str, Mutant]) -> int:
    """Print planted, noticed, explained and survived by folder; how many survived."""
    known = judged()
    rows: dict[str, Counter[str]] = {}
    for name, passed in results.items():
        if name not in every:
            continue  # the line is another now
        what = "noticed" if not passed else "explained" if every[name].key in known else "survived"
        for folder in (os.path.dirname(every[name].path), "all"):
            rows.setdefault(folder, Counter())[what] += 1
    total = rows.pop("all", Counter())
    print(f"{'folder':24}{'planted':>9}{'noticed':>9}{'explained':>11}{'survived':>10}")
    for folder, row in [*sorted(rows.items()), ("all", total)]:
        print(
            f"{folder:24}{row.total():9}{row['noticed']:9}{row['explained']:11}{row['survived']:10}"
            f"{row['survived'] / max(row.total(), 1):8.1%}"
        )
    return total["survived"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", default="*", help="only source files that match this glob")
    parser.add_argument(
        "--sample", type=int, default=60, help="so many faults of each group, drawn; 0 = every one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--results", type=Path, help="a file of results: read, then added to")
    parser.add_argument("--again", action="store_true", help="plant the survivors in --results once more")
    parser.add_argument("--seconds", type=float, default=1e9, help="plant nothing new after so long")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    options = parser.parse_args(arguments)
    for name in ("numba", "numpy", "msgspec", "pytest", "hypothesis", "torch"):
        __import__(name)  # once, before the forks
    chosen = _chosen(options.files, options.sample, options.seed)
    results: dict[str, bool] = {}
    if options.results is not None and options.results.exists():
        results = dict(json.loads(line) for line in options.results.read_text().splitlines())
    every = {str(mutant): mutant for mutant in _chosen("*", 0, 0)}
    if options.again:
        chosen = [every[name] for name, passed in results.items() if passed and name in every]
        chosen = [mutant for mutant in chosen if fnmatch.fnmatch(mutant.path, options.files)]
    else:
        chosen = [mutant for mutant in chosen if str(mutant) not in results]
    known = judged()
    began = time.monotonic()
    for number, (mutant, passed) in enumerate(_verdicts(chosen, options.jobs, began + options.seconds), 1):
        results[str(mutant)] = passed
        if options.results is not None:
            with options.results.open("a") as file:
                file.write(json.dumps([str(mutant), passed]) + "\n")
        if passed:
            print(f"{'explained' if mutant.key in known else 'SURVIVED'} {mutant}", flush=True)
        elif number % 20 == 0:
            print(f"{number} of {len(chosen)}, {time.monotonic() - began:.0f} s: {mutant.path}", flush=True)
    return int(_table(results, every) > 0)


if __name__ == "__main__":
    sys.exit(main())
