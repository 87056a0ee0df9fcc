"""Plants one small fault after another in the code and says which of them no unit test notices.

    cd tests && python -m support.mutants [--files GLOB] [--sample N] [--jobs N]

A mutant differs from the source in one operator, constant, condition or statement. It lives in memory only: a forked
process imports the changed module and runs the tests that TARGETS names for it. Survivors that `mutants.md` explains
(same file, line of source and change) are known; any other makes the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.abc
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.mutant_faults import ROOT, Mutant, mutants_of, mutated

JUDGED = ROOT / "tests/support/mutants.md"

_PROTOCOL = "tests/dist/protocol/test_"
_PLANNER = "tests/eplb/planner/test_"
# Source files (a glob) and the tests that have to notice a fault in them, quick ones first.
TARGETS: dict[str, tuple[str, ...]] = {
    "dist/protocol/agreement.py": (_PROTOCOL + "agreement.py", _PROTOCOL + "protocol_cases.py"),
    "dist/protocol/*.py": (_PROTOCOL + "re*.py", _PROTOCOL + "*.py"),
    "dist/wire/placement.py": ("tests/dist/wire/test_messages.py", _PROTOCOL + "rank.py"),
    "dist/wire/messages.py": ("tests/dist/wire/test_messages.py", _PROTOCOL + "re*.py"),
    "dist/wire/received.py": ("tests/dist/wire/test_messages.py", _PROTOCOL + "re*.py"),
    "dist/weights/transfer.py": ("tests/dist/weights/test_transfer.py",),
    "eplb/store/*.py": ("tests/eplb/store/test_*.py",),
    "eplb/planner/history/*.py": ("tests/eplb/planner/history/test_*.py", _PLANNER + "*.py"),
    "eplb/planner/*.py": (_PLANNER + "*.py", "tests/eplb/planner/history/test_*.py"),
}
LEFT_OUT = ("*/__init__.py", "*/warm_up.py", _PROTOCOL + "fuzz.py", _PROTOCOL + "simulator.py",
            _PROTOCOL + "agreement_exhaustive.py", _PLANNER + "deepseek_tensors.py")  # fmt: skip
LEAST_LIMIT_S = 3.0  # a mutant may use twice the CPU that its tests do, and this


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the changed module in place of the one on disk."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = "evenroute." + mutant.path.removesuffix(".py").replace("/", ".")
        self._path = str(ROOT / mutant.path)
        self._code = compile(mutated(mutant), self._path, "exec")

    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != self._name:
            return None
        spec = importlib.util.spec_from_loader(name, self, origin=self._path)
        assert spec is not None
        spec.origin, spec.has_location = self._path, True
        return spec

    def get_source(self, fullname: str) -> str:
        return Path(self._path).read_text()

    def get_code(self, fullname: str):  # type: ignore[no-untyped-def]
        return self._code


def _tests_of(path: str) -> list[str]:
    for pattern, tests in TARGETS.items():
        if fnmatch.fnmatch(path, pattern):
            found = [str(file.relative_to(ROOT)) for test in tests for file in sorted(ROOT.glob(test))]
            own = [file for file in found if Path(file).stem == "test_" + Path(path).stem]
            return [file for file in dict.fromkeys(own + found) if not _left_out(file)]
    raise ValueError(f"{path}: no tests are named for it")


def _left_out(path: str) -> bool:
    return any(fnmatch.fnmatch(path, pattern) for pattern in LEFT_OUT)


def _run_tests(tests: Sequence[str], mutant: Mutant | None) -> int:
    """In this process, which ends with it."""
    import pytest

    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    if mutant is not None:
        sys.meta_path.insert(0, _Planted(mutant))
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow and not gpu and not multigpu",
    ]
    return int(pytest.main([*options, "--rootdir", str(ROOT), *(str(ROOT / test) for test in tests)]))


def _start(tests: Sequence[str], mutant: Mutant | None, cpu_s: int) -> int:
    """Fork a process that runs the tests; its pid. No threads here: a lock that one held would stay shut there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            status = _run_tests(tests, mutant)
        finally:
            os._exit(status)
    return pid


def _wait(running: dict[int, float]) -> tuple[int, bool, float]:
    """The first of these processes (pid: until when) that is done, whether its tests passed, its CPU seconds."""
    while True:
        for pid, until in running.items():
            done, status, used = os.wait4(pid, os.WNOHANG)
            if done:
                return pid, os.waitstatus_to_exitcode(status) == 0, used.ru_utime + used.ru_stime
            if time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return pid, False, 0.0
        time.sleep(0.02)


def _limits(tests: Sequence[str]) -> tuple[int, float]:
    """Seconds of CPU and of time that these tests may take with a fault; ValueError if they fail without one."""
    began = time.monotonic()
    _, passed, used = _wait({_start(tests, None, 900): began + 900.0})
    if not passed:
        raise ValueError(f"{' '.join(tests)}: fail without a fault")
    return round(LEAST_LIMIT_S + 2 * used), LEAST_LIMIT_S + 20 * (time.monotonic() - began)


def _verdicts(chosen: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant, and whether the tests passed all the same; in the order in which they end."""
    limits: dict[tuple[str, ...], tuple[int, float]] = {}
    running: dict[int, tuple[Mutant, float]] = {}
    waiting = list(reversed(chosen))
    while waiting or running:
        while waiting and len(running) < jobs:
            tests = tuple(_tests_of(waiting[-1].path))
            if tests not in limits:
                limits[tests] = _limits(tests)
            mutant, (cpu_s, limit_s) = waiting.pop(), limits[tests]
            running[_start(tests, mutant, cpu_s)] = (mutant, time.monotonic() + limit_s)
        pid, passed, _ = _wait({pid: until for pid, (_, until) in running.items()})
        yield running.pop(pid)[0], passed


def judged() -> dict[tuple[str, str, str], str]:
    """The survivors that `mutants.md` explains: (file, line of source, change) -> why."""
    known = {}
    for line in JUDGED.read_text().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in line.replace("\\|", "\0").split("|")]
        cells = [cell.replace("\0", "|").strip("`") for cell in cells]
        if len(cells) == 6 and cells[1].endswith(".py"):
            known[cells[1], cells[2], cells[3]] = cells[4]
    return known


def _chosen(pattern: str, sample: int, seed: int) -> list[Mutant]:
    """Evenly over all faults of the matching files: of a few files as of many."""
    paths = sorted({str(file.relative_to(ROOT)) for target in TARGETS for file in ROOT.glob(target)})
    paths = [path for path in paths if fnmatch.fnmatch(path, pattern) and not _left_out(path)]
    every = [mutant for path in paths for mutant in mutants_of(path)]
    if 0 < sample < len(every):
        every = sorted(random.Random(seed).sample(every, sample), key=lambda m: (m.path, m.index))
    return every


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", default="*", help="only source files that match this glob")
    parser.add_argument(
        "--sample", type=int, default=400, help="this many of all faults, evenly drawn; 0 = every one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument(
        "--again", type=Path, help="only the survivors that this output of an earlier run names"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    options = parser.parse_args(arguments)
    for name in ("numba", "numpy", "msgspec", "pytest", "torch"):
        __import__(name)  # once, before the forks
    chosen = _chosen(options.files, options.sample if options.again is None else 0, options.seed)
    if options.again is not None:
        chosen = [mutant for mutant in chosen if str(mutant) in options.again.read_text()]
    known = judged()
    explained = survived = 0
    for number, (mutant, passed) in enumerate(_verdicts(chosen, options.jobs), 1):
        if passed:
            why = known.get(mutant.key)
            explained, survived = explained + (why is not None), survived + (why is None)
            print(f"{'SURVIVED' if why is None else 'explained'} at line {mutant.line}: {mutant}", flush=True)
        elif number % 20 == 0:
            print(f"{number} of {len(chosen)}: {mutant.path}", flush=True)
    noticed = len(chosen) - explained - survived
    print(f"{len(chosen)} planted, {noticed} noticed, {explained} explained, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
