"""Seams of an engine: the functions and fields that a plug-in relies on, looked up in the engine's sources.

Nothing is imported: sources are read and parsed, those of an installed engine or of a wheel. What is called through is
known by its parameters; what a plug-in replaces by its text too, since a new duty inside it would be lost silently.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Seam:
    """One function (``Class.method`` or ``function``) or class with fields of a file below the engine's package.

    file        path below the package
    name        of the function or class
    parameters  the known lists of parameters, keyword-only ones behind "*"; of a class none
    texts       the known digests of its text (`text_digest`); empty where any will do
    needs       parameters, or fields of a class, that have to be there whatever else is; used without `parameters`
    """

    file: str
    name: str
    parameters: tuple[tuple[str, ...], ...] = ()
    texts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file.removesuffix('.py').replace('/', '.')}.{self.name}"


@dataclass(frozen=True)
class Found:
    """What a source says of a seam: parameters (or fields), digest of the text."""

    parameters: tuple[str, ...]
    text: str


def text_digest(text: str) -> str:
    """Of a function's source: indentation, blank lines and lines of comment alone do not count."""
    lines = (line.strip() for line in text.splitlines())
    kept = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.blake2b(kept.encode(), digest_size=6).hexdigest()


def find_seam(source: str, tree: ast.Module, name: str) -> Found | None:
    """The function or class ``name`` of a parsed file; None if it has none of that name."""
    body: list[ast.stmt] = tree.body
    node: ast.stmt | None = None
    for part in name.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        node = next((item for item in body if isinstance(item, kinds) and item.name == part), None)
        if node is None:
            return None
        body = node.body  # type: ignore[attr-defined]
    text = text_digest(ast.get_source_segment(source, node) or "") if node is not None else ""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
        names += ["*", *(item.arg for item in arguments.kwonlyargs)] if arguments.kwonlyargs else []
        return Found(tuple(names), text)
    fields = (item.target for item in body if isinstance(item, ast.AnnAssign))
    return Found(tuple(item.id for item in fields if isinstance(item, ast.Name)), text)


def seam_problem(seam: Seam, found: Found | None) -> str:
    """What is wrong with a seam, naming it; empty where it is known."""
    if found is None:
        return f"{seam} is missing"
    lacking = [name for name in seam.needs if name not in found.parameters]
    if lacking:
        return f"{seam} lacks {', '.join(lacking)}"
    if seam.parameters and found.parameters not in seam.parameters:
        known = " or ".join(f"({', '.join(names)})" for names in seam.parameters)
        return f"{seam} has parameters ({', '.join(found.parameters)}), known: {known}"
    if seam.texts and found.text not in seam.texts:
        return f"{seam} has a text that is not known ({found.text})"
    return ""


def find_seams(seams: tuple[Seam, ...], read: Callable[[str], str | None]) -> dict[Seam, Found | None]:
    """Look up seams; ``read(file)`` gives a file's source, None where there is no such file."""
    found: dict[Seam, Found | None] = {}
    parsed: dict[str, tuple[str, ast.Module] | None] = {}
    for seam in seams:
        if seam.file not in parsed:
            source = read(seam.file)
            parsed[seam.file] = None if source is None else (source, ast.parse(source))
        file = parsed[seam.file]
        found[seam] = None if file is None else find_seam(*file, seam.name)
    return found
