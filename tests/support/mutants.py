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
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

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


class _Watcher:
    """A pytest plugin: which functions of some files each test calls, and the CPU seconds that it takes."""

    def __init__(self, report: Path, paths: Sequence[str]) -> None:
        self._report = report
        self._paths = {str(ROOT / path): path for path in paths}
        self._callers: dict[str, dict[str, None]] = {}
        self._seconds: dict[str, float] = {}
        self._test = ""

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        path = self._paths.get(frame.f_code.co_filename)
        if path is not None:
            self._callers.setdefault(f"{path}:{frame.f_code.co_firstlineno}", {})[self._test] = None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test, began = item.nodeid, time.process_time()
        sys.settrace(self._trace)
        yield
        sys.settrace(None)
        self._seconds[item.nodeid] = time.process_time() - began

    def pytest_sessionfinish(self) -> None:
        callers = {function: list(tests) for function, tests in self._callers.items()}
        self._report.write_text(json.dumps([callers, self._seconds]))


@dataclass(frozen=True)
class _Tests:
    """The tests of some files: who calls which function ("path:line"), and each test's CPU seconds."""

    files: tuple[str, ...]
    callers: dict[str, list[str]]
    seconds: dict[str, float]

    @classmethod
    def watched(cls, files: tuple[str, ...], paths: Sequence[str]) -> _Tests:
        """Run them without a fault; ValueError if one fails."""
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            pid = _start(files, None, 900, _Watcher(report, paths))
            if not _wait({pid: time.monotonic() + 1200.0})[1]:
                raise ValueError(f"{' '.join(files)}: fail without a fault")
            return cls(files, *json.loads(report.read_text()))

    def start(self, mutant: Mutant, *, callers: bool) -> tuple[int, float]:
        """Run those that call the mutant's function, or all; the process and until when it may run."""
        chosen = self.callers.get(f"{mutant.path}:{mutant.function}", []) if callers else list(self.seconds)
        used = sum(self.seconds[test] for test in chosen)
        pid = _start(chosen if callers else self.files, mutant, round(5 + 2 * used))
        return pid, time.monotonic() + 60.0 + 30 * used


def _run_tests(tests: Sequence[str], mutant: Mutant | None, watcher: _Watcher | None) -> int:
    """In this process, which ends with it."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    if mutant is not None:
        sys.meta_path.insert(0, _Planted(mutant))
    os.chdir(ROOT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m"]
    plugins = [] if watcher is None else [watcher]
    return int(pytest.main([*options, "not slow and not gpu and not multigpu", *tests], plugins))


def _start(tests: Sequence[str], mutant: Mutant | None, cpu_s: int, watcher: _Watcher | None = None) -> int:
    """Fork a process that runs the tests; its pid. No threads here: a lock that one held would stay shut there."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
            status = _run_tests(tests, mutant, watcher)
        finally:
            os._exit(status)
    return pid


def _wait(running: Mapping[int, float]) -> tuple[int, bool]:
    """The first of these processes (pid: until when) that is done, and whether its tests passed."""
    while True:
        for pid, until in running.items():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return pid, os.waitstatus_to_exitcode(status) == 0
            if time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return pid, False
        time.sleep(0.02)


def _verdicts(chosen: Sequence[Mutant], jobs: int) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant, and whether the tests passed all the same; in the order in which they end.

    First the tests that call its function; if they pass, all: what a fixture or a cache called is not seen."""
    files = {path: tuple(_tests_of(path)) for path in {mutant.path for mutant in chosen}}
    tests: dict[tuple[str, ...], _Tests] = {}
    running: dict[int, tuple[Mutant, bool, float]] = {}
    waiting = [(mutant, mutant.function > 0) for mutant in reversed(chosen)]
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant, callers = waiting.pop()
            mine = files[mutant.path]
            if mine not in tests:
                tests[mine] = _Tests.watched(mine, [path for path, found in files.items() if found == mine])
            callers = callers and f"{mutant.path}:{mutant.function}" in tests[mine].callers
            pid, until = tests[mine].start(mutant, callers=callers)
            running[pid] = (mutant, callers, until)
        pid, passed = _wait({pid: until for pid, (_, _, until) in running.items()})
        mutant, callers, _ = running.pop(pid)
        if passed and callers:
            waiting.append((mutant, False))
        else:
            yield mutant, passed


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
    for name in ("numba", "numpy", "msgspec", "torch"):
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
