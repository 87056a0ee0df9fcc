"""`evenroute init DIR`: a commented settings file and keys, to begin with."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Annotated

import typer

SETTINGS_FILE = "evenroute.toml"
_SECTIONS = {
    "rebalancer": "The process: where it listens, what it keeps, how long things may take (seconds).",
    "planner": "When and how a placement is planned.",
    "security": "Who may talk to it.",
}


def init(
    folder: Annotated[Path, typer.Argument(help="Folder for evenroute.toml and keys; made if absent.")],
    bind: Annotated[
        str | None,
        typer.Option(help="Address for ranks: ipc://PATH (as without it, in the folder) or tcp://HOST:PORT."),
    ] = None,
) -> None:
    """Write a settings file in which every setting stands with its default and what it does, and make keys."""
    from evenroute.dist.wire.address import parse_address
    from evenroute.dist.wire.keys import generate_keys

    address = parse_address(bind or f"ipc://{folder.absolute() / 'evenroute.sock'}", field="--bind")
    target = folder / SETTINGS_FILE
    if target.exists():
        raise FileExistsError(f"{target}: exists; settings are never overwritten")
    made = generate_keys(folder / "keys")
    target.write_text(settings_text(folder.absolute(), address.text, with_keys=address.ipc_path is None))
    for path in (target, *made):
        typer.echo(path)
    typer.echo(f"next: evenroute rebalancer --config {target}")


def settings_text(folder: Path, bind: str, *, with_keys: bool) -> str:
    """The file: what a first start needs is set, all else is a comment that shows its default."""
    from evenroute.dist.config import SECTIONS

    given = {
        ("rebalancer", "bind"): bind,
        ("rebalancer", "store"): str(folder / "run.db"),
        ("rebalancer", "http_bind"): "127.0.0.1:9421",
    }
    if with_keys:
        given["security", "keys"] = str(folder / "keys")
    lines = [
        "# Settings of `evenroute rebalancer --config FILE`. A line that is commented out shows the default.",
        "",
    ]
    for section, about in _SECTIONS.items():
        kind = SECTIONS[section]
        comments = field_comments(kind)
        lines += [f"# {about}", f"[{section}]"]
        for field in dataclasses.fields(kind):
            told = f"  # {comments[field.name]}" if comments.get(field.name) else ""
            if (section, field.name) in given:
                lines.append(f"{field.name} = {toml_value(given[section, field.name])}{told}")
            elif field.default is None:
                lines.append(f"# {field.name} =  # none unless given{told.replace('  #', ';')}")
            else:
                lines.append(f"# {field.name} = {toml_value(field.default)}{told}")
        lines.append("")
    return "\n".join(lines)


def field_comments(kind: type) -> dict[str, str]:
    """What is said of each field of a settings dataclass: the comment behind it, else what it may hold."""
    found = {
        name: getattr(hint, "__metadata__", [None])[0]
        for name, hint in typing.get_type_hints(kind, include_extras=True).items()
    }
    told = {name: rule.expected for name, rule in found.items() if rule is not None}
    behind = re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE)
    return told | {name: text.strip() for name, text in behind}


def toml_value(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value)
