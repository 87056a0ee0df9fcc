"""Generated faults: each place of a source file where an operator, constant, condition or statement can be changed."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

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
    nth: int = 0  # of the faults of the file that read the same

    def __str__(self) -> str:
        return f"{self.path}: {self.change}: {self.source}" + (f" ({self.nth + 1})" if self.nth else "")

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
    found, same = [], Counter[tuple[str, str]]()
    for index, (line, change, _) in enumerate(_faults(ast.parse(text))):
        source = lines[line - 1].strip()
        found.append(Mutant(path, index, line, change, source, same[source, change]))
        same[source, change] += 1
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """The file's tree with the fault in it."""
    tree = ast.parse((ROOT / mutant.path).read_text())
    for index, (_, _, change) in enumerate(_faults(tree)):
        if index == mutant.index:
            change()
            break
    return ast.fix_missing_locations(tree)
