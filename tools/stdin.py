"""Loads on standard input: `-` in place of a path."""

from __future__ import annotations

import atexit
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 8 << 30
_CHUNK = 1 << 20
_BY_MAGIC = ((b"\x93NUMPY", ".npy"), (b"SQLite format 3", ".db"), (b"PK", ""), (b"\x80", ".pt"))


def with_stdin(paths: Sequence[Path]) -> list[Path]:
    """The paths, with a file of what standard input held in place of `-`; it lives until the process ends.

    Readers go over a file more than once and tell some formats by the name, so the input is stored first, under the
    suffix that its first bytes ask for.

    Raises:
        ValueError: `-` is given twice, standard input is a terminal or empty, or it brings more than 8 GiB.
    """
    wanted = [str(path) for path in paths].count("-")
    if not wanted:
        return list(paths)
    if wanted > 1:
        raise ValueError("-: standard input is given twice, and can be read once")
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("-: standard input is a terminal, expected loads from a file or a pipe")
    folder = Path(tempfile.mkdtemp(prefix="evenroute-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    kept = _store(sys.stdin.buffer, folder)
    return [kept if str(path) == "-" else path for path in paths]


def _store(stream: BinaryIO, folder: Path) -> Path:
    head = stream.read(_CHUNK)
    if not head:
        raise ValueError("-: standard input is empty, expected loads")
    path = folder / f"stdin{_suffix(head)}"
    with path.open("wb") as file:
        written = file.write(head)
        while chunk := stream.read(_CHUNK):
            written += file.write(chunk)
            if written > MOST_BYTES:
                raise ValueError(f"-: standard input brings more than {MOST_BYTES:,} bytes")
    return path


def _suffix(head: bytes) -> str:
    """The file name's suffix that formats without a mark of their own are known by."""
    for magic, suffix in _BY_MAGIC:
        if head.startswith(magic):
            return suffix
    if head[8:9] == b"{" and not head.isascii():
        return ".safetensors"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] in (b"{", b"["):
        lines = text.splitlines()
        return (
            ".jsonl" if len(lines) > 1 and lines[0].endswith(b"}") and lines[1].startswith(b"{") else ".json"
        )
    return ".csv" if text[:1].isdigit() or b"," in text.partition(b"\n")[0] else ".log"
