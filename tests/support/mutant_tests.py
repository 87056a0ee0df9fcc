"""Which tests reach a line of source, and a run of just these with a fault planted."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.abc
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.mutant_faults import ROOT, Mutant, mutants_of, mutated

PLANTED = "EVENROUTE_PLANTED"  # FILE:INDEX of the fault, for every process that the tests start

_PROTOCOL = "tests/dist/protocol/test_"
_PLANNER = ("tests/eplb/planner/test_*.py", "tests/eplb/planner/history/test_*.py")


@dataclass(frozen=True)
class Group:
    """Source files (globs) and the tests that have to notice a fault in them."""

    name: str
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    interpreted: bool = (
        False  # kernels run as Python: compiled code has no lines, and compiling each mutant takes long
    )
    longest_s: float = 60.0  # tests that take longer are left out


GROUPS = (
    Group("protocol", ("dist/protocol/*.py", "dist/wire/messages.py", "dist/wire/placement.py",
                       "dist/wire/received.py"),
          (_PROTOCOL + "*.py", "tests/dist/wire/test_messages.py"), longest_s=20.0),
    Group("wire", ("dist/wire/link.py", "dist/wire/address.py", "dist/wire/keys.py"),
          ("tests/dist/wire/test_*.py", "tests/dist/test_client.py")),
    Group("transfer", ("dist/weights/transfer.py",), ("tests/dist/weights/test_transfer.py",)),
    Group("weights", ("dist/weights/*.py",), ("tests/dist/weights/test_*.py",), longest_s=20.0),
    Group("store", ("eplb/store/*.py",), ("tests/eplb/store/test_*.py", "tests/tools/commands/test_inspect_store.py",
                                          "tests/tools/operator/test_backup.py")),
    Group("kernels", ("eplb/planner/kernels/*.py",), _PLANNER, interpreted=True, longest_s=5.0),
    Group("planner", ("eplb/planner/*.py", "eplb/planner/history/*.py"), _PLANNER, longest_s=20.0),
)  # fmt: skip


@dataclass
class Reach:
    """Of one group: how long each test that passes takes, and which tests reach each line."""

    group: Group
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)  # "FILE:LINE" -> tests

    @staticmethod
    def paths() -> list[list[str]]:
        """The source files of each group; a file is in the first whose globs it matches."""
        found: dict[str, list[str]] = {group.name: [] for group in GROUPS}
        files = {file for group in GROUPS for glob in group.sources for file in ROOT.glob(glob)}
        for path in sorted(str(file.relative_to(ROOT)) for file in files):
            found[_group_of(path).name].append(path)
        return list(found.values())

    def tests_of(self, mutant: Mutant, most_s: float) -> list[str]:
        """The quickest tests that reach its line; where none does, the quickest of all (other processes run it)."""
        tests = self.lines.get(f"{mutant.path}:{mutant.line}") or list(self.seconds)
        chosen, sum_s = [], 0.0
        for test in sorted(tests, key=lambda test: self.seconds[test]):
            sum_s += self.seconds[test]
            if sum_s > most_s:
                break
            chosen.append(test)
        return chosen


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


def plant() -> None:
    """Plant the fault that the environment names, before anything of evenroute is imported."""
    path, index = os.environ[PLANTED].rsplit(":", 1)
    sys.meta_path.insert(0, _Planted(mutants_of(path)[int(index)]))


class _Recorder:
    """pytest plugin: the lines of a group's sources that each test reaches in this process."""

    def __init__(self, reach: Reach, paths: Sequence[str]) -> None:
        self.reach = reach
        self._ours = {str(ROOT / path): path for path in paths}
        self._names: dict[str, str | None] = {}
        self._hits: set[tuple[str, int]] = set()
        self._failed = False

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> None:
        self._hits, self._failed, self._began = set(), False, time.monotonic()
        threading.settrace(self._call)
        sys.settrace(self._call)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._failed |= not report.passed

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        if self._failed:
            return
        self.reach.seconds[nodeid] = round(time.monotonic() - self._began, 3)
        for path, line in self._hits:
            self.reach.lines.setdefault(f"{path}:{line}", []).append(nodeid)

    def _call(self, frame: Any, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        if file not in self._names:
            self._names[file] = self._ours.get(os.path.realpath(file))
        path = self._names[file]
        if path is None:
            return None
        hits = self._hits

        def line(frame: Any, event: str, arg: Any) -> Any:
            hits.add((path, frame.f_lineno))
            return line

        return line


class _Chosen:
    """pytest plugin: only these tests, in this order; a failing example is not made smaller."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._place = {test: place for place, test in enumerate(tests)}

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.get_profile("evenroute"), phases=phases, database=None)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self._place), key=lambda item: self._place[item.nodeid]
        )


def _pytest(group: Group, files: Sequence[str], plugin: Any, *more: str) -> int:
    """In this process, without output."""
    import numba
    import pytest

    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    if group.interpreted:
        numba.config.DISABLE_JIT = True
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow and not gpu and not multigpu",
    ]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # what was imported before the fork
    where = ["--rootdir", str(ROOT), *(str(ROOT / file) for file in files)]
    return int(pytest.main([*options, *more, *where], plugins=[plugin]))


def run_chosen(group: Group, tests: Sequence[str]) -> int:
    """Run these tests until the first that fails; the exit status."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    return _pytest(group, files, _Chosen(tests), "-x")


def _group_of(path: str) -> Group:
    return next(group for group in GROUPS if any(fnmatch.fnmatch(path, glob) for glob in group.sources))


@cache
def reach_of(path: str) -> Reach:
    """Of the group of a source file; measured once for the same sources and tests, then kept in build/."""
    group = _group_of(path)
    files = {
        kind: sorted({str(file.relative_to(ROOT)) for glob in globs for file in ROOT.glob(glob)})
        for kind, globs in (("sources", group.sources), ("tests", group.tests))
    }
    digest = hashlib.blake2b(repr(group).encode(), digest_size=8)
    for file in files["sources"] + files["tests"]:
        digest.update((ROOT / file).read_bytes())
    kept = ROOT / f"build/mutants/{group.name}-{digest.hexdigest()}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            try:
                reach = Reach(group)
                limit = f"--timeout={group.longest_s}"
                _pytest(group, files["tests"], _Recorder(reach, files["sources"]), limit)
                assert reach.seconds, f"{group.name}: no test passes"
                kept.with_suffix(".new").write_text(json.dumps([reach.seconds, reach.lines]))
                kept.with_suffix(".new").replace(kept)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        if not kept.exists():
            raise RuntimeError(f"{group.name}: its tests do not run without a fault")
    seconds, lines = json.loads(kept.read_text())
    return Reach(group, seconds, lines)
