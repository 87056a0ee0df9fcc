"""Flags of the commands that run under torchrun or as a module: one parser, its help and its errors."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from evenroute.tools.errors import fail


class _Help(argparse.RawDescriptionHelpFormatter):
    """Says each flag's default, where it has one and its words do not say it."""

    def _get_help_string(self, action: argparse.Action) -> str:
        words = action.help or ""
        if "default" in words or action.default in (None, False, True, "", [], argparse.SUPPRESS):
            return words
        return f"{words} (default: %(default)s)"


class FlagParser(argparse.ArgumentParser):
    """Wrong flags end the process with status 2 and one line; ``name`` stands before it."""

    def __init__(self, prog: str, description: str, name: str = "") -> None:
        super().__init__(prog=prog, description=description, formatter_class=_Help, allow_abbrev=False)
        self._before = f"{name}: " if name else ""

    def error(self, message: str) -> NoReturn:
        fail(self._before + message)

    def sizes(self, sizes: dict[str, tuple[float, float, str]], on_gpu: bool) -> None:
        """Flags of sizes: default on GPUs, default on the CPU, help."""
        for name, (gpu, cpu, words) in sizes.items():
            value: Any = gpu if on_gpu else cpu
            self.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=words)
