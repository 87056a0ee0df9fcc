"""Parses command lines found in manifests and documents by the real command line: nothing is run."""

from __future__ import annotations

import atexit
import functools
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from evenroute.dist.wire.keys import generate_keys
from evenroute.tools.cli import build_app, command_names
from evenroute.tools.stress.__main__ import split_launcher_flag
from evenroute.tools.stress.options import StressOptions, parse_options

STRESS_MODULE = "evenroute.tools.stress"


@functools.cache
def _keys_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="evenroute-keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    generate_keys(folder)
    return folder


def with_real_files(argv: list[str]) -> list[str]:
    """The stress run reads the key file as it parses: whatever folder a line names, a real one stands for it."""
    return [
        re.sub(r"^(--keys=)?[^=]*/rank\.toml$", rf"\g<1>{_keys_folder()}/rank.toml", word) for word in argv
    ]


def command_tree() -> Any:
    """The click command of the whole `evenroute`."""
    return typer.main.get_command(build_app(command_names()))


def parse_evenroute(argv: list[str]) -> dict[str, Any]:
    """Parses `evenroute ...` down to its last sub-command; returns its parameters.

    Raises the parser's own error (unknown command, unknown option, missing argument, wrong value).
    """
    command = command_tree()
    words = list(argv)
    context = command.make_context("evenroute", words)
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, words = command.resolve_command(context, rest)
        context = command.make_context(name, list(words), parent=context)
        if name == "stress":
            ranks, flags = split_launcher_flag(list(words))
            return vars(parse_options(with_real_files(flags), ep_size=ranks))
        if name == "bench":
            return _parse_bench(list(words))
    return dict(context.params)


def _parse_bench(words: list[str]) -> dict[str, Any]:
    """The flags of a benchmark by its own parser, as on a host with GPUs."""
    from evenroute.tools.bench.options import parse_ep, parse_migration

    parsers = {"ep": parse_ep, "migration": parse_migration}
    if words and words[0] in parsers:
        return vars(parsers[words[0]](words[1:], on_gpu=True))
    return {}


def parse_torchrun(
    argv: list[str], *, gpus: int = 8, environment: dict[str, str] | None = None
) -> StressOptions | None:
    """Parses `torchrun ...` (its own flags by torch's parser, the module's by the module's).

    `environment`: `PET_*` variables that an operator sets. Returns the stress run's options, None for other modules.
    """
    from torch.distributed.run import get_args_parser

    args = get_args_parser().parse_args(argv)
    environment = environment or {}
    nodes = int(environment.get("PET_NNODES", args.nnodes.split(":")[-1]))
    per_node = environment.get("PET_NPROC_PER_NODE", args.nproc_per_node)
    if args.standalone:
        nodes = 1
    assert args.module, f"expected -m MODULE, found {argv}"
    if args.training_script != STRESS_MODULE:
        return None
    size = nodes * (gpus if per_node in ("gpu", "auto") else int(per_node))
    return parse_options(with_real_files(list(args.training_script_args)), ep_size=size)


def parse_any(argv: list[str]) -> None:
    """Parses one command line that starts with `evenroute`, `torchrun` or `python -m evenroute...`."""
    head, *rest = argv
    name = Path(head).name
    if name == "evenroute":
        parse_evenroute(rest)
    elif name == "torchrun":
        parse_torchrun(rest)
    elif rest[:1] == ["-m"] and rest[1].startswith("evenroute.tools"):
        if rest[1] == STRESS_MODULE:
            ranks, flags = split_launcher_flag(rest[2:])
            parse_options(with_real_files(flags), ep_size=ranks)
        else:
            parse_evenroute(rest[2:])
    else:
        raise ValueError(f"not a command line of evenroute: {shlex.join(argv)}")


def all_flags() -> set[str]:
    """Every long flag of every command, and of the stress run."""
    from evenroute.tools.bench import planner
    from evenroute.tools.bench.options import elastic_parser
    from evenroute.tools.stress.options import build_parser

    flags: set[str] = {"--help", "--nproc-per-node"}

    def walk(command: Any) -> None:
        for parameter in command.params:
            flags.update([*parameter.opts, *parameter.secondary_opts])
        for child in getattr(command, "commands", {}).values():
            walk(child)

    walk(command_tree())
    for parser in (build_parser(), planner.build_parser(), elastic_parser()):
        for action in parser._actions:
            flags.update(action.option_strings)
    return {flag for flag in flags if flag.startswith("--")}


FENCE = re.compile(r"^```(?:bash|sh|console|shell)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# In running text a command stands between backquotes.
INLINE = re.compile(r"`((?:evenroute|torchrun) [^`\n]+)`")


def shell_lines(text: str) -> Iterator[str]:
    """Lines of the shell blocks of a Markdown text, continuation lines joined, prompts and comments dropped."""
    for block in FENCE.findall(text):
        yield from script_lines(block)


def script_lines(script: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", " ", script).splitlines():
        line = line.strip().removeprefix("$ ")
        if line and not line.startswith("#"):
            yield line


def commands_in_line(line: str) -> Iterator[list[str]]:
    """The simple commands of a shell line that are evenroute's (pipes, `&&` and `;` split it)."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    command: list[str] = []
    skip = False
    for word in [*lexer, ";"]:
        if skip:
            skip = False
        elif set(word) <= set("<>&") and set(word) & set("<>"):
            skip = True  # the file of a redirection is no argument, nor is the number before it
            if command and command[-1] in ("1", "2"):
                command.pop()
        elif set(word) <= set("|&;"):
            while command and (re.match(r"^[A-Z_]+=", command[0]) or command[0] in ("sudo", "nohup", "exec")):
                command.pop(0)
            if command and is_ours(command):
                yield command
            command = []
        else:
            command.append(word)


def is_ours(argv: list[str]) -> bool:
    name = Path(argv[0]).name
    return name in ("evenroute", "torchrun") or (
        name.startswith("python")
        and argv[1:2] == ["-m"]
        and len(argv) > 2
        and argv[2].startswith("evenroute.")
    )
