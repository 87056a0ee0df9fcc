"""One line and exit status 2 for wrong use or unreadable input, never a traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

WRONG_USE = 2


def fail(message: str, *, status: int = WRONG_USE) -> NoReturn:
    """Prints one line on stderr and ends the process with `status`."""
    print(f"evenroute: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(status)


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
            name = f"{error.filename}: " if error.filename else ""
            fail(f"{name}{error.strerror or error}")
        except ValueError as error:
            fail(str(error))
        except (OverflowError, RecursionError) as error:
            fail(f"input holds a number too large or nesting too deep: {error}")

    return wrapped
