"""What the processes of an elastic run write down: JSON lines, one file a process, on the host's monotonic clock."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class EventLog:
    """One process's file; a line is written whole, so that a killed process leaves whole lines."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, kind: str, **values: Any) -> None:
        """Add an event."""
        line = json.dumps({"kind": kind, "at": time.monotonic(), "pid": os.getpid(), **values}) + "\n"
        os.write(self._file, line.encode())


class EventReader:
    """All processes' events, each once, as they come."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[Path, int] = {}

    def new(self) -> list[dict[str, Any]]:
        """Events since the last call, by time."""
        found: list[dict[str, Any]] = []
        for path in self._folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._places.get(path, 0))
                data = file.read()
            whole = data.rpartition(b"\n")[0]
            if whole:
                self._places[path] = self._places.get(path, 0) + len(whole) + 1
                found += [json.loads(line) for line in whole.splitlines()]
        return sorted(found, key=lambda event: float(event["at"]))
