"""What a user names is a regular file: a pipe, a socket or a device would block, never end, or be replaced; all are
refused.

Inputs are opened here, or checked here before a library opens them by name. Most readers read a file more than once,
so a pipe is no substitute.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def _check(path: str | PathLike[str], mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        what = _KINDS.get(stat.S_IFMT(mode), "no file")
        raise ValueError(
            f"{os.fspath(path)}: {what}, expected a regular file (save its content to one first)"
        )


def check_input(path: str | PathLike[str]) -> None:
    """Refuse anything but a regular file or a link to one; nothing is opened, so nothing can block.

    Raises:
        OSError: absent, a folder, or out of reach.
        ValueError: a pipe, socket or device; one line that says which.
    """
    _check(path, os.stat(path).st_mode)


def open_input(path: str | PathLike[str]) -> BinaryIO:
    """The file, opened for reading bytes without ever waiting for a writer; errors as `check_input`."""
    check_input(path)  # a socket cannot be opened at all, and a device should not be
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _check(path, os.fstat(descriptor).st_mode)  # it may have been replaced in between
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_input(path: str | PathLike[str]) -> bytes:
    """The file's bytes; errors as `check_input`, and ValueError where memory cannot hold them."""
    with open_input(path) as file:
        check_memory(path, os.fstat(file.fileno()).st_size)
        return file.read()


_MOST_LINE = 256 << 20


def input_lines(path: str | PathLike[str]) -> Iterator[bytes]:
    """The file's lines; errors as `check_input`, and ValueError at one that no writer of records makes."""
    with open_input(path) as file:
        while line := file.readline(_MOST_LINE + 1):
            if len(line) > _MOST_LINE:
                raise ValueError(
                    f"{os.fspath(path)}: a line of more than {_MOST_LINE:,} bytes: truncated or damaged"
                )
            yield line


def read_input_text(path: str | PathLike[str], *, encoding: str = "utf-8") -> str:
    """The file's text, lines ended by a newline; errors as `check_input`, and UnicodeDecodeError."""
    return read_input(path).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def check_memory(path: str | PathLike[str], num_bytes: int) -> None:
    """ValueError where the content of `path`, `num_bytes` at once, is more than this host has memory left for."""
    available = _available_bytes()
    if available is not None and num_bytes > available:
        raise ValueError(
            f"{os.fspath(path)}: takes {num_bytes:,} bytes of memory, {available:,} are available"
        )


_UNPACKED_FREELY = 256 << 20
_MOST_PACKED = 100  # counts pack to a tenth or a thirtieth


def unpacked_bytes(path: str | PathLike[str]) -> int:
    """What the members of a zip file take, all of them together.

    Raises:
        ValueError: much more than counts can have been packed into a file of its size.
        zipfile.BadZipFile: no zip file.
    """
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    packed = os.stat(path).st_size
    if unpacked > max(_UNPACKED_FREELY, _MOST_PACKED * packed):
        raise ValueError(
            f"{os.fspath(path)}: {packed:,} bytes that unpack to {unpacked:,}, expected at most {_MOST_PACKED} times"
        )
    return unpacked


def _available_bytes() -> int | None:
    """As the kernel estimates it; None where it does not."""
    try:
        with open("/proc/meminfo", "rb") as file:
            for line in file:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def visible(text: str) -> str:
    """Text from outside (names of files, models, hosts), made safe to print.

    Characters that move the cursor, break the line or turn its direction are escaped, bytes of a file's name that
    are no UTF-8 too.
    """
    return "".join(char if char.isprintable() else escaped(char) for char in text)


def escaped(char: str) -> str:
    """The character as a Python escape; a byte of a file's name as that byte."""
    if "\udc80" <= char <= "\udcff":  # a byte, as Python keeps it in file names
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape").decode()


def shown(path: str | PathLike[str]) -> str:
    """A path as text that can be written anywhere: bytes of its name that are no UTF-8 as `\\xff`."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def check_target(path: str | PathLike[str]) -> None:
    """Refuse to put a file in the place of a pipe, socket or device (`-o /dev/null` would replace it).

    Raises:
        ValueError: one line that says what is there.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:  # absent, or what the writer will say better
        return
    if stat.S_IFMT(mode) in _KINDS:
        raise ValueError(f"{os.fspath(path)}: {_KINDS[stat.S_IFMT(mode)]}, expected a file to write")


def write_beside_and_rename(path: str | PathLike[str], data: bytes) -> None:
    """Replace ``path`` by ``data`` as a whole, durably: a reader sees the old file or the new one.

    Raises:
        OSError: the file cannot be written.
        ValueError: a pipe, socket or device is in the file's place.
    """
    target = Path(path)
    check_target(target)
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(beside, 0o666 & ~umask)
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise
