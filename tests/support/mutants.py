"""Plants one small fault after another in the code and says which of them no unit test notices.

    cd tests && python -m support.mutants [--files GLOB] [--sample N] [--jobs N]

A mutant differs from the source in one operator, constant, condition or statement. It lives in memory only: a forked
process imports the changed module and runs the tests that TARGETS names for it. Survivors that `mutants.md` explains
(same file, line of source and change) are known; any other makes the exit status 1.
"""

from __future__ import annotations

import argparse
import ast
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JUDGED = ROOT / "tests/support/mutants.md"

_PROTOCOL = "tests/dist/protocol/test_"
_PLANNER = "tests/eplb/planner/test_"
# Source files (a glob) and the tests that have to notice a fault in them, quick ones first.
TARGETS: dict[str, tuple[str, ...]] = {
    "dist/protocol/agreement.py": (_PROTOCOL + "agreement.py", _PROTOCOL + "protocol_cases.py"),
    "dist/protocol/*.py": (_PROTOCOL + "*.py",),
    "dist/wire/placement.py": ("tests/dist/wire/test_messages.py", _PROTOCOL + "rank.py"),
    "dist/wire/messages.py": ("tests/dist/wire/test_messages.py", _PROTOCOL + "re*.py"),
    "dist/wire/received.py": ("tests/dist/wire/test_messages.py", _PROTOCOL + "re*.py"),
    "dist/weights/transfer.py": ("tests/dist/weights/test_transfer.py",),
    "eplb/store/*.py": ("tests/eplb/store/test_*.py",),
    "eplb/planner/*.py": (_PLANNER + "*.py",),
}
LEFT_OUT = ("*/__init__.py", "*/warm_up.py", _PROTOCOL + "fuzz.py", _PROTOCOL + "simulator.py",
            _PROTOCOL + "agreement_exhaustive.py", _PLANNER + "deepseek_tensors.py")  # fmt: skip
LEAST_LIMIT_S = 8.0  # a mutant may use three times the CPU that its tests do, and this

_COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_BINARY = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}
_TEXT = (ast.Raise, ast.JoinedStr, ast.Assert)  # wording and what the code says of itself


@dataclass(frozen=True)
class Mutant:
    """The ``index``-th fault of a file: what is changed in which line."""

    path: str
    index: int
    line: int
    change: str
    source: str  # the line, without its indent

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.source, self.change


Fault = tuple[int, str, Callable[[], None]]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below that run: no annotations, wording, `strict`, nor constants of a module."""
    hidden: set[int] = set()
    for name in ("annotation", "returns", "decorator_list", "bases", "type_comment"):
        found = getattr(node, name, None)
        hidden |= {id(item) for item in (found if isinstance(found, list) else [found])}
    for child in ast.iter_child_nodes(node):
        if id(child) in hidden or isinstance(child, _TEXT):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.keyword) and child.arg == "strict":
            continue
        if isinstance(node, ast.Module) and isinstance(child, ast.Assign | ast.AnnAssign):
            continue
        yield child


def _swap(owner: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _put(items: list[ast.stmt], at: int, value: ast.stmt) -> Callable[[], None]:
    def change() -> None:
        items[at] = ast.copy_location(value, items[at])

    return change


def _of_expression(node: ast.AST) -> Iterator[Fault]:
    line = getattr(node, "lineno", 0)
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in _COMPARE:
            other = _COMPARE[type(op)]
            yield (
                line,
                f"{type(op).__name__} -> {other.__name__}",
                _swap(node, "ops", [other(), *node.ops[1:]]),
            )
        case ast.BoolOp():
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield line, f"{type(node.op).__name__} -> {other.__name__}", _swap(node, "op", other())
        case ast.UnaryOp(op=ast.Not()):
            yield line, "not gone", _swap(node, "operand", ast.UnaryOp(ast.Not(), node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            other = _BINARY[type(node.op)]
            yield line, f"{type(node.op).__name__} -> {other.__name__}", _swap(node, "op", other())
        case ast.AugAssign() if type(node.op) in _BINARY:
            other = _BINARY[type(node.op)]
            yield line, f"{type(node.op).__name__}= -> {other.__name__}=", _swap(node, "op", other())
        case ast.Constant(value=bool(value)):
            yield line, f"{value} -> {not value}", _swap(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield line, f"{value} -> {value + 1}", _swap(node, "value", value + 1)
        case ast.Constant(value=float(value)):
            yield line, f"{value} -> {value * 2 + 1}", _swap(node, "value", value * 2 + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield line, f"{name} -> {_CALLS[name]}", _swap(node.func, "id", _CALLS[name])
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if isinstance(
            test, ast.Name | ast.Attribute | ast.Call
        ):
            yield line, "test negated", _swap(node, "test", ast.UnaryOp(ast.Not(), test))


def _of_statements(node: ast.AST) -> Iterator[Fault]:
    """Statements of a function that vanish."""
    for name in ("body", "orelse", "finalbody"):
        items = getattr(node, name, None)
        if not isinstance(items, list) or isinstance(node, ast.Module | ast.ClassDef):
            continue
        for at, item in enumerate(items):
            match item:
                case ast.Expr(value=ast.Call()) | ast.AugAssign():
                    yield item.lineno, "statement gone", _put(items, at, ast.Pass())
                case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                    yield item.lineno, "statement gone", _put(items, at, ast.Pass())
                case ast.Continue():
                    yield item.lineno, "continue -> break", _put(items, at, ast.Break())
                case ast.Break():
                    yield item.lineno, "break -> continue", _put(items, at, ast.Continue())


def _faults(node: ast.AST) -> Iterator[Fault]:
    yield from _of_expression(node)
    yield from _of_statements(node)
    for child in _children(node):
        yield from _faults(child)


def mutants_of(path: str) -> list[Mutant]:
    """Every fault that can be planted in a file, in the order of its tree."""
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    found = enumerate(_faults(ast.parse(text)))
    return [Mutant(path, index, line, what, lines[line - 1].strip()) for index, (line, what, _) in found]


def _mutated(mutant: Mutant) -> ast.Module:
    tree = ast.parse((ROOT / mutant.path).read_text())
    for index, (_, _, change) in enumerate(_faults(tree)):
        if index == mutant.index:
            change()
            break
    return ast.fix_missing_locations(tree)


class _Planted(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports the changed module in place of the one on disk."""

    def __init__(self, mutant: Mutant) -> None:
        self._name = "evenroute." + mutant.path.removesuffix(".py").replace("/", ".")
        self._path = str(ROOT / mutant.path)
        self._code = compile(_mutated(mutant), self._path, "exec")

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
    return round(LEAST_LIMIT_S + 3 * used), LEAST_LIMIT_S + 20 * (time.monotonic() - began)


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
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    options = parser.parse_args(arguments)
    for name in ("numba", "numpy", "msgspec", "pytest", "torch"):
        __import__(name)  # once, before the forks
    chosen = _chosen(options.files, options.sample, options.seed)
    known = judged()
    explained = survived = 0
    for number, (mutant, passed) in enumerate(_verdicts(chosen, options.jobs), 1):
        if passed:
            why = known.get(mutant.key)
            explained, survived = explained + (why is not None), survived + (why is None)
            verdict = "SURVIVED" if why is None else f"explained ({why})"
            print(f"{mutant.path}:{mutant.line}: {mutant.change}: {verdict}: {mutant.source}", flush=True)
        elif number % 20 == 0:
            print(f"{number} of {len(chosen)}: {mutant.path}", flush=True)
    noticed = len(chosen) - explained - survived
    print(f"{len(chosen)} planted, {noticed} noticed, {explained} explained, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
