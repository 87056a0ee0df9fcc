"""The `evenroute` command: a thin shell that finds its commands in `tools/commands/<name>.py` and `orders/` there.

A command module holds a function of its own name, or `SUBCOMMANDS`. It is imported only when its command (or the
general help) is asked for, so that `evenroute status` never pays for numba, and nothing here needs torch.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from evenroute.tools.errors import fail, one_line_errors
from evenroute.tools.report.words import plain_streams


def command_names() -> list[str]:
    """Names of all commands, sorted: those of the files in `commands`."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    """The module of each command."""
    folder = Path(__file__).parent / "commands"
    here = {path.stem: f"evenroute.tools.commands.{path.stem}" for path in folder.glob("[!_]*.py")}
    orders = (folder / "orders").glob("[!_]*.py")
    return here | {path.stem: f"evenroute.tools.commands.orders.{path.stem}" for path in orders}


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
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
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
    """Adds a command's module; every command ends wrong use with one line and exit status 2."""
    module = importlib.import_module(_modules()[name])
    subcommands = getattr(module, "SUBCOMMANDS", ())
    if subcommands:
        group = typer.Typer(help=module.HELP, no_args_is_help=True)
        for function in subcommands:
            group.command()(one_line_errors(function))
        app.add_typer(group, name=name)
    elif getattr(module, "FORWARDS", False):  # flags, --help too, to a parser of its own
        forward = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
        app.command(context_settings=forward)(one_line_errors(getattr(module, name)))
    else:
        app.command()(one_line_errors(getattr(module, name)))


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
