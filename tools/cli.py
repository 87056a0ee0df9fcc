"""The `evenroute` command: a thin shell that finds its commands in `tools/commands/` and `tools/operator/`.

A command module holds a function of its own name, or `SUBCOMMANDS`. It is imported only when its command (or the
general help) is asked for, so that `evenroute status` never pays for numba, and nothing here needs torch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from evenroute.tools.errors import fail, one_line_errors
from evenroute.tools.report.words import plain_streams

GROUPS = {
    "Run a rebalancer": ("init", "keygen", "rebalancer", "launch", "backup", "completion"),
    "Watch and steer it": ("status", "top", "trace", "record", "pause", "resume", "rollback", "scale"),
    "Work with files": ("advise", "inspect", "plan", "replay", "convert"),
    "Try and measure": ("stress", "bench"),
}
_FOLDERS = ("commands", "operator")
_COMPLETE = "_EVENROUTE_COMPLETE"


def command_homes() -> dict[str, str]:
    """Every command, sorted, and the folder of its file."""
    files = {
        path.stem: folder for folder in _FOLDERS for path in (Path(__file__).parent / folder).glob("[!_]*.py")
    }
    return dict(sorted(files.items()))


def command_names() -> list[str]:
    """Names of all commands, sorted."""
    return list(command_homes())


class _Grouped(TyperGroup):
    """The list of commands by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One list for each of `GROUPS`."""
        width = max(map(len, self.commands), default=0)
        for title, names in GROUPS.items():
            rows = [
                (name.ljust(width), self.commands[name].get_short_help_str(400))
                for name in names
                if name in self.commands
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class _InPanels(TyperCommand):
    """Flags by what they are about (`rich_help_panel` of each), in plain text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One list for each panel, and one for the rest."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(row)
        for title, rows in panels.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def package_version() -> str:
    """The installed version, or "unknown" when evenroute runs from a source tree."""
    try:
        return version("evenroute")
    except PackageNotFoundError:
        return "unknown"


def build_app(names: list[str]) -> typer.Typer:
    """A typer app with the commands in `names`."""
    app = typer.Typer(
        name="evenroute",
        help="Routes tokens to experts evenly: a rebalancer for expert-parallel clusters and its tools.",
        add_completion=_COMPLETE in os.environ,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        cls=_Grouped,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(
        show_version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if show_version:
            typer.echo(f"evenroute {package_version()}")
            raise typer.Exit

    for name in names:
        add_command(app, name)
    whole_short_helps(app)
    return app


def add_command(app: typer.Typer, name: str) -> None:
    """Adds a command from its file; every command ends wrong use with one line and exit status 2."""
    module = importlib.import_module(f"evenroute.tools.{command_homes()[name]}.{name}")
    subcommands = getattr(module, "SUBCOMMANDS", ())
    if subcommands:
        group = typer.Typer(help=module.HELP, no_args_is_help=True)
        for function in subcommands:
            group.command(cls=_InPanels)(one_line_errors(function))
        app.add_typer(group, name=name)
    elif getattr(module, "FORWARDS", False):  # flags, --help too, to a parser of its own
        forward = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command(context_settings=forward)(one_line_errors(getattr(module, name)))
    else:
        app.command(cls=_InPanels)(one_line_errors(getattr(module, name)))


def whole_short_helps(app: typer.Typer) -> None:
    """A command's line in the list of commands is its first paragraph, wrapped: click cuts what it derives itself."""
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        command.short_help = command.short_help or " ".join(text.partition("\n\n")[0].split())
    for group in app.registered_groups:
        if group.typer_instance is not None:
            whole_short_helps(group.typer_instance)


def main(argv: list[str] | None = None) -> None:
    """Entry point of the `evenroute` script. Exit status: 0 done, 1 a bad finding, 2 wrong use."""
    plain_streams()
    arguments = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if _COMPLETE in os.environ:
        arguments = []
    names = command_names()
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    app = build_app([wanted] if wanted in names else names)
    try:
        status = app(args=arguments, prog_name="evenroute", standalone_mode=False)
    except Exception as error:
        # Typer prints wrong use as a usage block; here it is one line. Its exception class lives in
        # click or, in newer releases, inside typer: it is known by its method.
        format_message = getattr(error, "format_message", None)
        if format_message is not None:
            fail(str(format_message()))
        if type(error).__name__ == "Abort":
            raise SystemExit(130) from None
        raise
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
