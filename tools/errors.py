"""One line and exit status 2 for wrong use or unreadable input, never a traceback."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, ParamSpec, TypeVar

from evenroute.eplb._io import check_target, visible

P = ParamSpec("P")
R = TypeVar("R")

WRONG_USE = 2


def fail(message: str, *, status: int = WRONG_USE) -> NoReturn:
    """Prints one line on stderr and ends the process with `status`."""
    print(f"evenroute: error: {visible(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(status)


# Files are written beside their target under a hidden name and renamed: `.NAME.k2j3h4_8`, `.NAME.partial`,
# `.NAME.123-7f00.partial`.
_HIDDEN = re.compile(r"\.(?P<name>.+?)\.(?:[a-z0-9_]{8}|(?:\d+-[0-9a-f]+\.)?partial)")


def target_name(path: str) -> str:
    """The name that a user knows: of a hidden file that is being written, its target's."""
    folder, slash, name = path.rpartition("/")
    match = _HIDDEN.fullmatch(name)
    return path if match is None else f"{folder}{slash}{match['name']}"


def check_output(option: str, path: Path | None) -> None:
    """ValueError where `path` cannot be a file to write: before any work is done. None: the option was not given."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option} {path}: is a folder, expected a file to write")
    try:
        check_target(path)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path}: folder {path.absolute().parent} does not exist")


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turns `ValueError`, `OSError` and input beyond all limits into one line and exit status 2.

    Other exceptions are defects of evenroute itself and keep their traceback.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            # The reader (`| head`) has seen enough; keep the interpreter from complaining at exit.
            sys.stderr.close()
            raise SystemExit(0) from None
        except OSError as error:
            name = f"{target_name(str(error.filename))}: " if error.filename else ""
            fail(f"{name}{error.strerror or error}")
        except ValueError as error:
            fail(str(error))
        except (OverflowError, RecursionError) as error:
            fail(f"input holds a number too large or nesting too deep: {error}")

    return wrapped
