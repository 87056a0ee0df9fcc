"""Mutants: small faults planted one by one into a file, each run against the tests of that file.

    python -m support.mutants [FILE ...] [--limit SECONDS] [--sample N --seed N] [--jobs N]

A mutant that no test notices (a survivor) is printed with its line. Each runs in a copy of the tree, which is changed
in place; the tree itself is never touched. Comparisons are shifted (< to <=) or inverted, arithmetic swapped, numbers
moved by one, conditions negated, statements and branches dropped, ``and`` and ``or`` exchanged.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[2]
_PROTOCOL = [
    f"tests/dist/protocol/test_{name}.py"
    for name in (
        "agreement",
        "rank",
        "rebalancer",
        "refusals",
        "core_promises",
        "job_start",
        "protocol_cases",
        "fuzz",
    )
]
_STORE = ["tests/eplb/store"]
_PLANNER = ["tests/eplb/planner"]
TESTS: dict[str, list[str]] = {
    **{
        f"dist/protocol/{name}.py": _PROTOCOL
        for name in ("agreement", "publication", "rank", "rebalancer", "receipt")
    },
    **{f"dist/protocol/{name}.py": _PROTOCOL for name in ("stream", "view", "job_start")},
    "dist/wire/received.py": ["tests/dist/wire/test_messages.py", *_PROTOCOL],
    "dist/wire/messages.py": ["tests/dist/wire/test_messages.py", *_PROTOCOL],
    **{f"eplb/store/{name}.py": _STORE for name in ("custody", "epochs", "reader", "writer", "schema")},
    "dist/weights/transfer.py": ["tests/dist/weights/test_transfer.py"],
    "eplb/planner/moves.py": _PLANNER,
    "eplb/planner/full.py": _PLANNER,
    "eplb/planner/locality.py": _PLANNER,
    "eplb/planner/auto.py": _PLANNER,
    "eplb/planner/policy.py": _PLANNER,
}

_SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_INVERTED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_SWAPPED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip


def _of_node(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What may stand in a node's place; None = nothing at all (a statement)."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for table in (_SHIFTED, _INVERTED):
            other = table.get(type(node.ops[0]))
            if other is not None:
                yield (
                    f"{type(node.ops[0]).__name__} -> {other.__name__}",
                    ast.Compare(node.left, [other()], node.comparators),
                )
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"{type(node.op).__name__} -> {type(other_op).__name__}", ast.BoolOp(other_op, node.values)
        for number in range(len(node.values)):
            rest = [value for place, value in enumerate(node.values) if place != number]
            yield f"operand {number} dropped", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        swapped = _SWAPPED[type(node.op)]
        yield f"{type(node.op).__name__} -> {swapped.__name__}", ast.BinOp(node.left, swapped(), node.right)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not dropped", node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value} -> {value}", ast.Constant(value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("max", "min"):
        other_name = "min" if node.func.id == "max" else "max"
        yield f"{node.func.id} -> {other_name}", ast.Call(ast.Name(other_name), node.args, node.keywords)
    elif isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break):
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield f"{type(node).__name__} dropped", None
    elif isinstance(node, ast.If):
        yield "condition negated", ast.If(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)


def mutants(source: str) -> list[tuple[int, str, str]]:
    """Line, what was done, and the changed source of each mutant. Annotations, names and messages stay."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
                continue
            places = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for place, child in places:
                if not isinstance(child, ast.AST):
                    continue
                for what, other in _of_node(child):
                    found.append((node, field, place, child, what, other))
    made = []
    for node, field, place, child, what, other in found:
        new = copy.deepcopy(other) if other is not None else ast.Pass()
        value = getattr(node, field)
        if place is None:
            setattr(node, field, new)
        else:
            value[place] = new
        made.append((child.lineno, what, ast.unparse(ast.fix_missing_locations(tree))))
        if place is None:
            setattr(node, field, child)
        else:
            value[place] = child
    return made


def copy_of_tree(folder: Path) -> Path:
    """A copy to change: sources and tests, no build outputs."""
    skipped = shutil.ignore_patterns(
        ".git", ".venv", "build", "__pycache__", "*.egg-info", ".mypy_cache", ".ruff_cache"
    )
    return Path(shutil.copytree(ROOT, folder / "tree", ignore=skipped))


def survives(tree: Path, tests: list[str], limit_s: float) -> bool:
    """Whether the tests pass in the tree; a run past the limit counts as noticed."""
    environment = {
        **os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(tree / ".hypothesis"),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> int:
    """Exit status 1 if a mutant survives."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", default=[])
    parser.add_argument("--limit", type=float, default=120.0, help="seconds a mutant")
    parser.add_argument("--sample", type=int, help="so many of each file, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    alive = total = 0
    with tempfile.TemporaryDirectory(prefix="evenroute-mutants-") as folder:
        trees: Queue[Path] = Queue()
        for number in range(options.jobs):
            place = Path(folder) / str(number)
            place.mkdir()
            trees.put(copy_of_tree(place))
        for name in options.files or TESTS:
            source = (ROOT / name).read_text()
            made = mutants(source)
            if options.sample is not None and options.sample < len(made):
                made = random.Random(options.seed).sample(made, options.sample)

            def run(mutant: tuple[int, str, str], name: str = name, source: str = source) -> bool:
                tree = trees.get()
                try:
                    (tree / name).write_text(mutant[2])
                    return survives(tree, TESTS[name], options.limit)
                finally:
                    (tree / name).write_text(source)
                    trees.put(tree)

            began = time.monotonic()
            with ThreadPoolExecutor(options.jobs) as pool:
                for (line, what, _), survived in zip(made, pool.map(run, made), strict=True):
                    if survived:
                        print(
                            f"{name}:{line}: {what}: survives: {source.splitlines()[line - 1].strip()}",
                            flush=True,
                        )
                        alive += 1
            total += len(made)
            print(f"{name}: {len(made)} mutants, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{total} mutants, {alive} survive")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
