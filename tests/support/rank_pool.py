"""Rank processes for tests over gloo: forked once from a server that has imported torch, then fed with functions.

def worker(ranks: Ranks, ...) -> result: ...        # module-level; the same on every rank
results = rank_pool(4).run(worker, ...)             # one result a rank, in rank order
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

import torch
import torch.distributed as torch_dist

LIMIT_S = 120.0
PRELOAD = [
    "torch",
    "torch.distributed",
    "hypothesis",
    "pytest",
    "evenroute.dist.engines.ep_layer",
    "evenroute.tools.run.driver",
]


class Ranks:
    """What a worker gets: its rank, the job's default group, and groups of its own on request."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._groups: dict[str, torch_dist.ProcessGroup] = {}

    def group(self, name: str, limit_s: float = 60.0) -> torch_dist.ProcessGroup:
        """A gloo group over all ranks, made once under each name; all ranks ask for it together."""
        if name not in self._groups:
            self._groups[name] = torch_dist.new_group(backend="gloo", timeout=timedelta(seconds=limit_s))
        return self._groups[name]


def _serve(rank: int, size: int, path: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt, EOFError):
        store = torch_dist.FileStore(path, size)
        torch_dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=LIMIT_S)
        )
        ranks = Ranks(rank, size)
        while (task := pipe.recv()) is not None:
            (module, path, name), args = task
            try:
                pipe.send((True, getattr(_load(module, path), name)(ranks, *args)))
            except BaseException as bad:
                pipe.send((False, (f"{type(bad).__name__}: {bad}", traceback.format_exc())))
    os._exit(0)  # gloo's threads may wait for ranks that are gone


def _load(module: str, path: str) -> ModuleType:
    """The module of a worker, by its file where it cannot be imported by name (pytest's importlib mode)."""
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


class RankError(RuntimeError):
    """A worker raised; the first message, and the traceback of each rank that raised."""


class RankPool:
    """``size`` processes with a gloo job among them."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._dir = tempfile.TemporaryDirectory(prefix="evenroute-ranks-")
        self.processes, self._pipes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, f"{self._dir.name}/store", there), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self._pipes.append(here)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Hand the function to all ranks and return."""
        where = (function.__module__, str(sys.modules[function.__module__].__file__), function.__name__)
        for pipe in self._pipes:
            pipe.send((where, args))

    def results(self, ranks: list[int] | None = None, limit_s: float = LIMIT_S) -> list[tuple[bool, Any]]:
        """(True, value) or (False, (message, traceback)) of each rank asked for; a dead one gives (False, ...)."""
        found = []
        for rank in range(self.size) if ranks is None else ranks:
            try:
                if not wait([self._pipes[rank]], limit_s):
                    raise TimeoutError(f"rank {rank} gave no result within {limit_s:g} s")
                found.append(self._pipes[rank].recv())
            except (EOFError, ConnectionError):
                found.append((False, (f"rank {rank} is dead", "")))
        return found

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Values of all ranks; RankError if one raised."""
        self.start(function, *args)
        results = self.results()
        bad = [f"rank {rank}: {value[0]}\n{value[1]}" for rank, (ok, value) in enumerate(results) if not ok]
        if bad:
            self.close()
            _POOLS.pop(self.size, None)
            raise RankError("\n".join(bad))
        return [value for _, value in results]

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self._dir.cleanup()


_POOLS: dict[int, RankPool] = {}


def rank_pool(size: int) -> RankPool:
    """The pool of this size, made on first use and kept for the session."""
    if size not in _POOLS:
        _POOLS[size] = RankPool(size)
    return _POOLS[size]


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS.values()):
        pool.close()
