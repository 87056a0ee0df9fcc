"""Writes docs/api.md from the docstrings of the public names: python docs/make_api.py [--check]

Reads the sources without importing them, so it needs neither torch nor an install. With --check nothing is written:
exit status 1 and the first difference if the page is not up to date.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/api.md"
FRONT_DOOR = ROOT / "evenroute/__init__.py"
HEADER = """# API reference

Made by `python docs/make_api.py` from the docstrings; a test fails when it is not up to date. Shapes are written
`[L, E]` with the letters of the design: T tokens, K routed experts a token, S shared ones, L MoE layers, E logical
experts, P slots, R ranks. All names are imported from `evenroute`; what is not listed is not part of it.
"""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def docstring(node: ast.AST) -> str:
    """The cleaned docstring of a module, class or function; empty if it has none."""
    assert isinstance(node, ast.Module | Definition)
    return inspect.cleandoc(ast.get_docstring(node, clean=False) or "")


def block(text: str) -> str:
    """A docstring as it is: columns and formulas keep their places."""
    return f"```text\n{text}\n```\n" if text else ""


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, method: bool) -> str:
    """`name(arguments) -> result`, without self."""
    arguments = ast.unparse(node.args)
    if method:
        for first in ("self", "cls"):
            arguments = arguments.removeprefix(f"{first}, ") if arguments != first else ""
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{node.name}({arguments}){result}"


def decorators(node: Definition) -> set[str]:
    """Names of the decorators, without their arguments."""
    return {ast.unparse(item).partition("(")[0].rpartition(".")[2] for item in node.decorator_list}


def fields(node: ast.ClassDef) -> list[str]:
    """Annotated public fields of a dataclass, a struct or a protocol."""
    found = []
    for item in node.body:
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and not item.target.id.startswith("_")
        ):
            default = f" = {ast.unparse(item.value)}" if item.value is not None else ""
            found.append(f"{item.target.id}: {ast.unparse(item.annotation)}{default}")
    return found


def class_parts(node: ast.ClassDef) -> Iterator[str]:
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"## `{node.name}`" + (f" ({bases})" if bases else "")
    yield block(docstring(node))
    listed = fields(node)
    if listed:
        yield "```text\n" + "\n".join(listed) + "\n```\n"
    for item in node.body:
        if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        hidden = item.name.startswith("_") and item.name not in ("__init__", "__call__")
        if hidden or "setter" in decorators(item):
            continue
        text = docstring(item)
        if item.name == "__init__" and not text:
            yield f"**`{signature(item, method=True)}`**\n"
            continue
        if "property" in decorators(item):
            result = f": {ast.unparse(item.returns)}" if item.returns is not None else ""
            yield f"**`{item.name}{result}`**\n"
        else:
            yield f"**`{signature(item, method='staticmethod' not in decorators(item))}`**\n"
        yield block(text)


def homes() -> dict[str, str]:
    """The public names and the modules that define them, as the front door lists them."""
    tree = ast.parse(FRONT_DOOR.read_text())
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    found: dict[str, str] = ast.literal_eval(values["_HOMES"])
    return found


def name_parts(name: str, module: str) -> Iterator[str]:
    """The parts of the page for one public name."""
    path = f"{module.replace('.', '/')}.py"
    tree = ast.parse((ROOT / path).read_text())
    [node] = [node for node in tree.body if isinstance(node, Definition) and node.name == name]
    if isinstance(node, ast.ClassDef):
        parts = class_parts(node)
    else:
        parts = iter((f"## `{signature(node, method=False)}`\n", block(docstring(node))))
    yield next(parts)
    yield f"<a id='{name.lower()}'></a>Source: [{path}](../{path})\n"
    yield from parts


def render() -> str:
    """The whole page."""
    names = homes()
    contents = ["| name | from |", "|---|---|"]
    contents += [f"| [`{name}`](#{name.lower()}) | `{module}` |" for name, module in names.items()]
    parts = [HEADER, "\n".join(contents) + "\n"]
    for name, module in names.items():
        parts += [part.rstrip("\n") + "\n" for part in name_parts(name, module) if part]
    return "\n".join(parts)


def main() -> int:
    """Write the page, or compare it."""
    text = render()
    if sys.argv[1:] == ["--check"]:
        old = PAGE.read_text() if PAGE.exists() else ""
        if old == text:
            return 0
        pairs = zip(old.splitlines(), text.splitlines(), strict=False)
        number, mine, new = next(
            ((n, a, b) for n, (a, b) in enumerate(pairs, 1) if a != b),
            (len(old.splitlines()), "(end)", "(more)"),
        )
        print(
            f"docs/api.md:{number}: found {mine!r}, the docstrings say {new!r}; run: python docs/make_api.py"
        )
        return 1
    if sys.argv[1:]:
        print("usage: python docs/make_api.py [--check]", file=sys.stderr)
        return 2
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
