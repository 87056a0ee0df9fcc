"""Process groups of a job: joining with a roll call, comparing ranks, and who is missing when a collective fails."""

from __future__ import annotations

import json
import os
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from evenroute.eplb._checks import describe, shown


class MissingRanksError(RuntimeError):
    """Some ranks did not come: the message names the operation and them."""


def _names(ranks: list[int]) -> str:
    text = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + text


_stores: weakref.WeakKeyDictionary[ProcessGroup, Store] = weakref.WeakKeyDictionary()


def adopt_group(group: ProcessGroup, store: Store) -> None:
    """A group that torch's registry does not know (an elastic job's): `store` is what its ranks meet over."""
    _stores[group] = store


def is_adopted(group: ProcessGroup) -> bool:
    """Whether the group is one that torch's registry does not know."""
    return group in _stores


def require_group(name: str, value: object) -> tuple[int, int]:
    """This rank and the number of ranks of a process group; ValueError unless this process is a member of it."""
    if not isinstance(value, ProcessGroup):
        number = (
            f"{value} (a rank that is no member)" if value is torch_dist.GroupMember.NON_GROUP_MEMBER else ""
        )
        raise ValueError(f"{name} must be a process group, found {number or describe(value)}")
    if is_adopted(value):
        return value.rank(), value.size()
    try:
        return torch_dist.get_rank(value), torch_dist.get_world_size(value)
    except (ValueError, RuntimeError, KeyError):
        raise ValueError(f"{name} must be a process group in use, found one that was destroyed") from None


def _from_environment(name: str, low: int, high: int) -> int:
    text = os.environ.get(name)
    if text is None:
        raise ValueError(f"{name} is not in the environment; expected as torchrun sets it")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
        raise ValueError(f"{name}: {shown(text)} found in the environment, expected {low} to {high}")
    return int(text)


def join_job(*, backend: str, limit_s: float, collective_limit_s: float = 600.0) -> None:
    """`init_process_group` from torchrun's environment with a roll call first.

    Raises MissingRanksError ("3/4 ranks joined ...") when a rank is not there within `limit_s` seconds, and ValueError
    for a backend that this torch lacks or an environment that is not torchrun's.
    """
    if not torch_dist.is_backend_available(backend.lower()):
        raise ValueError(f"backend={shown(backend)} is not one that this torch has")
    world_size = _from_environment("WORLD_SIZE", 1, 1 << 20)
    rank = _from_environment("RANK", 0, world_size - 1)
    port = _from_environment("MASTER_PORT", 1, 65535)
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise ValueError("MASTER_ADDR is not in the environment; expected as torchrun sets it")
    if torch_dist.is_initialized():
        raise RuntimeError("job start: torch.distributed is initialized already")
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
    started = time.monotonic()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store: Store = TCPStore(
            address,
            port,
            world_size,
            is_master=rank == 0 and not agent_hosts,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )
    except (torch_dist.DistError, RuntimeError) as error:
        raise MissingRanksError(
            f"job start: rank 0's store at {address}:{port} not reached within {limit_s:g} s"
        ) from error
    roll = PrefixStore(f"evenroute/join/{attempt}", store)
    _roll_call(roll, rank, world_size, limit_s - (time.monotonic() - started), limit_s)
    torch_dist.init_process_group(
        backend,
        store=PrefixStore(f"default/{attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=collective_limit_s),
    )


def _roll_call(store: Store, rank: int, world_size: int, remaining_s: float, limit_s: float) -> None:
    store.set(str(rank), "here")
    try:
        store.wait([str(other) for other in range(world_size)], timedelta(seconds=max(remaining_s, 0.1)))
    except (torch_dist.DistError, RuntimeError) as error:
        missing = [other for other in range(world_size) if not _has(store, str(other))]
        raise MissingRanksError(
            f"job start: {world_size - len(missing)}/{world_size} ranks joined within {limit_s:g} s, "
            f"missing: {_names(missing)}"
        ) from error


def _has(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except (torch_dist.DistError, RuntimeError):
        return False


def new_cpu_group(like: ProcessGroup, *, limit_s: float) -> ProcessGroup:
    """A gloo group of its own over the ranks of `like`, whose collectives fail after `limit_s` seconds.

    Every rank of `like` calls it, in the same order; others need not.
    """
    group: ProcessGroup | None = torch_dist.new_group(
        ranks=torch_dist.get_process_group_ranks(like),
        backend="gloo",
        timeout=timedelta(seconds=limit_s),
        use_local_synchronization=True,
    )
    assert group is not None
    return group


_compared: dict[str, int] = {}  # comparisons so far, by group


def compare_ranks(group: ProcessGroup, what: str, mine: Mapping[str, object], *, limit_s: float) -> None:
    """Every rank of `group` calls it with what has to be equal on all, before a collective that would not survive a
    difference: over the job's key-value store, so that nothing can hang or abort.

    Raises on every rank alike: ValueError that names what differs and on which ranks, MissingRanksError where some did
    not come within `limit_s` seconds.
    """
    name = group.group_name
    number = _compared[name] = _compared.get(name, 0) + 1
    base = _stores[group] if is_adopted(group) else _get_default_store()
    store = PrefixStore(f"evenroute/compare/{name}/{number}", base)
    rank, size = group.rank(), group.size()
    text = json.dumps({field: str(value) for field, value in mine.items()})
    store.set(str(rank), zlib.compress(text.encode()))  # type: ignore[arg-type] # torch takes bytes
    limit = timedelta(seconds=limit_s)
    if rank == 0:
        names = [str(other) for other in range(size)]
        try:
            store.wait(names, limit)
        except (torch_dist.DistError, RuntimeError):
            missing = [other for other in range(size) if not _has(store, str(other))]
            came = f"{size - len(missing)}/{size} ranks came within {limit_s:g} s"
            verdict = f"missing {what}: {came}, missing: {_names(missing)}"
        else:
            verdict = _difference([json.loads(zlib.decompress(store.get(other))) for other in names])
            verdict = f"{what}: ranks differ: {verdict}" if verdict else ""
        store.set("verdict", verdict)
    else:
        try:
            store.wait(["verdict"], limit + timedelta(seconds=5.0))  # rank 0's own limit first
        except (torch_dist.DistError, RuntimeError) as error:
            raise MissingRanksError(f"{what}: rank 0 did not come within {limit_s:g} s") from error
        verdict = store.get("verdict").decode()
    if verdict.startswith("missing "):
        raise MissingRanksError(verdict.removeprefix("missing "))
    if verdict:
        raise ValueError(verdict)


def _difference(found: Sequence[Mapping[str, str]]) -> str:
    """The first two fields that differ, with who has what; empty where all are equal."""
    parts = []
    for field in dict.fromkeys(field for one in found for field in one):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(found):
            ranks.setdefault(one.get(field, "none"), []).append(rank)
        if len(ranks) > 1:
            parts.append(
                f"{field} is " + ", ".join(f"{value} on {_names(who)}" for value, who in ranks.items())
            )
    more = f" (and {len(parts) - 2} more)" if len(parts) > 2 else ""
    return "; ".join(parts[:2]) + more


class RollCall:
    """Finds out after a failed collective which ranks are missing: the others sign in the job's store.

    Used on failure only. The store may be gone together with the rank that hosted it.
    """

    def __init__(self, *, run: int, rank: int, ep_size: int) -> None:
        store = _get_default_store()
        self._store = PrefixStore(f"evenroute/roll/{run}", store)
        self._rank = rank
        self._ep_size = ep_size

    def called(self, operation: str) -> bool:
        """Whether some rank has found that `operation` failed; False also where the store is gone."""
        return _has(self._store, f"{operation}/called")

    def missing(self, operation: str, wait_s: float) -> str:
        """Sign for `operation`, wait for the others' signatures, and say in words who is missing."""
        names = [f"{operation}/{rank}" for rank in range(self._ep_size)]
        self._store.set_timeout(timedelta(seconds=wait_s))
        missing: list[int] | None = None
        note = ""
        try:
            self._store.set(names[self._rank], "here")
            self._store.set(f"{operation}/called", "here")
            deadline = time.monotonic() + wait_s
            while True:
                missing = [rank for rank, name in enumerate(names) if not self._store.check([name])]
                if not missing or time.monotonic() >= deadline:
                    break
                time.sleep(0.1)
        except (torch_dist.DistError, RuntimeError):
            if missing is None:
                return "the job's store is gone too (its host, rank 0 or the launcher, has ended)"
            note = " (when the job's store went)"
        if missing:
            return f"missing: {_names(missing)}{note}"
        return "all ranks were there: the network between them failed"
