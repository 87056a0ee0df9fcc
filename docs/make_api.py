"""Writes docs/api.md from the docstrings of the public modules: python docs/make_api.py [--check]

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
# What an engine, an operator's script or an analysis is meant to import; everything else may change without notice.
MODULES = {
    "eplb": (
        *(
            "topology",
            "model_shapes",
            "placement",
            "placement_file",
            "loads",
            "load_files",
            "planner",
            "deepseek",
        ),
        "store_reader",
    ),
    "routing": (
        *(
            "config",
            "tables",
            "counters",
            "router",
            "output",
            "dispatch",
            "align",
            "formats",
            "gate_gemm",
            "library",
        ),
        *("simulated", "reference"),
    ),
    "dist": (
        *(
            "agent",
            "config",
            "mover",
            "migration",
            "migration_config",
            "weights",
            "ep_layer",
            "expert_compute",
            "status",
            "keys",
        ),
        *("metrics", "adapter_torch", "adapter_vllm", "adapter_deepseek"),
    ),
    "tools": ("adapter_sglang",),
}
HEADER = """# API reference

Made by `python docs/make_api.py` from the docstrings; a test fails when it is not up to date. Shapes are written
`[L, E]` with the letters of the design: T tokens, K routed experts a token, S shared ones, L MoE layers, E logical
experts, P slots, R ranks. Names that start with an underscore, and modules that are not listed, are not part of it.
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
    yield f"### `{node.name}`" + (f" ({bases})" if bases else "")
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


def module_parts(package: str, name: str) -> Iterator[str]:
    path = ROOT / package / f"{name}.py"
    tree = ast.parse(path.read_text())
    yield f"## `evenroute.{package}.{name}`\n\nSource: [{package}/{name}.py](../{package}/{name}.py)\n"
    yield block(docstring(tree))
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            if isinstance(node, ast.ClassDef):
                yield from class_parts(node)
            elif docstring(node):
                yield f"### `{signature(node, method=False)}`\n"
                yield block(docstring(node))


def render() -> str:
    """The whole page."""
    parts = [HEADER]
    for package, names in MODULES.items():
        for name in names:
            parts += [part.rstrip("\n") + "\n" for part in module_parts(package, name) if part]
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
