"""Numba compilation with an on-disk cache that notices edits in any kernel file.

Numba's own cache looks at the one file that holds a function; an edited helper in another file goes unseen.
So the cache folder's name carries a hash of all sources that define kernels.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np

KERNEL_PACKAGES = ("eplb", "routing")


@cache
def sources_hash() -> str:
    """16 hex digits over all files that define kernels, at any depth, and the versions of numba and numpy."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(__file__).parents[1]
    for path in sorted(path for package in KERNEL_PACKAGES for path in (root / package).rglob("*.py")):
        source = path.read_bytes()
        if b"\n@kernel\n" in source or path == Path(__file__):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + source + b"\0")
    digest.update(f"{numba.__version__} {np.__version__}".encode())
    return digest.hexdigest()


def _is_ours(folder: Path) -> bool:
    """The cache holds pickles, so only a folder that no other user can write is trusted."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    return ours and os.access(folder, os.W_OK | os.X_OK)


@cache
def cache_folder() -> Path | None:
    """Folder of compiled code: below NUMBA_CACHE_DIR, else the user's cache, else the temporary folder.

    None if no such folder can be written by this user alone; code is then compiled in every process.
    """
    name = f"evenroute-{sources_hash()}"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    given = os.environ.get("NUMBA_CACHE_DIR")
    bases = [given] if given else [os.path.join(home, "evenroute", "numba")]
    bases.append(os.path.join(tempfile.gettempdir(), f"evenroute-numba-{os.getuid()}"))
    for base in bases:
        folder = Path(base) / name
        if _is_ours(folder):
            return folder
    return None


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` at its first call, without the interpreter lock, and cache it on disk."""
    # Numba files code under its source's path: an editable install's links and the files behind them are one place.
    source = os.path.realpath(function.__code__.co_filename)
    function.__code__ = function.__code__.replace(co_filename=source)
    folder = cache_folder()
    config: Any = numba.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder or before)
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=folder is not None)(function)
    finally:
        config.CACHE_DIR = before
    return compiled
