"""The process groups of one membership: formed over the first member's store, closed from any thread.

They are objects that torch's registry does not know, so that new ones form beside old ones and no group outlives its
membership. Gloo has no abort: whoever waits in a collective is freed by shutting the connected sockets of the groups
(never a listening one: that ends the process). NCCL: all communicators are aborted; never destroyed, which flushes and
may hang behind a dead peer.
"""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from evenroute.dist.groups import adopt_group
from evenroute.dist.wire.membership import MembershipRecord

_LOOK_S = 0.02
_forming = threading.Lock()  # sockets that appear meanwhile are the groups' own


class FormError(RuntimeError):
    """A membership's groups could not be formed; ``missing``: members that did not come, by number."""

    def __init__(self, text: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(text)
        self.missing = missing


def host_store(host: str) -> TCPStore:
    """A store of this process's own, on a free port: a membership that it is the first member of is formed over it."""
    return TCPStore(host, 0, None, True, wait_for_workers=False, timeout=timedelta(seconds=30))


def _sockets() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found


def is_group_failure(error: BaseException) -> bool:
    """Whether an exception says that a collective or transfer failed, not that the model did."""
    if isinstance(error, torch_dist.DistError):
        return True
    text = str(error).lower()
    marks = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "aborted")
    return isinstance(error, RuntimeError) and any(mark in text for mark in marks)


class MemberGroups:
    """The groups of one membership.

    ep, vote, move   the layers' collectives, the votes (always gloo), the weights' transfer
    rank, record     this member's place
    """

    def __init__(
        self,
        record: MembershipRecord,
        number: int,
        *,
        device: torch.device,
        limit_s: float,
        form_limit_s: float,
        halted: Callable[[], bool],
    ) -> None:
        """Form them with all members of ``record``; ``number`` is this one's.

        Raises FormError when members do not come within ``form_limit_s``, or ``halted`` says to stop.
        """
        self.record = record
        self.rank = record.numbers.index(number)
        self.size = len(record.members)
        self.device = device
        self._limit_s = limit_s
        self._closed = threading.Event()
        self._fds: dict[int, str] = {}
        deadline = time.monotonic() + form_limit_s
        self.store = self._roll_call(deadline, halted)
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            with _forming:
                before = _sockets()
                self.vote = self._one("vote", "gloo")
                self.ep = self._one("ep", backend)
                self.move = self._one("move", backend)
                for group in (self.vote, self.ep, self.move):
                    self._connect(group)
                self._fds = {fd: link for fd, link in _sockets().items() if before.get(fd) != link}
        except (torch_dist.DistError, RuntimeError) as error:
            raise FormError(f"membership {record.number}: groups not formed: {_line(error)}") from None

    def _roll_call(self, deadline: float, halted: Callable[[], bool]) -> Store:
        """The first member's store, once all have signed in it: a group formed with a missing rank blocks for long."""
        first = self.record.members[0]
        while True:
            try:
                base = TCPStore(
                    first.host,
                    first.port,
                    None,
                    False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=2.0),
                )
                break
            except (torch_dist.DistError, RuntimeError) as error:
                if halted() or time.monotonic() > deadline:
                    text = f"membership {self.record.number}: the store of member {first.number} at "
                    raise FormError(
                        f"{text}{first.host}:{first.port} is not reached", (first.number,)
                    ) from error
        store = PrefixStore(f"evenroute/{self.record.run}", base)
        try:
            store.set(f"here/{self.rank}", "1")
            while True:
                missing = [
                    one.number
                    for rank, one in enumerate(self.record.members)
                    if not store.check([f"here/{rank}"])
                ]
                if not missing:
                    return store
                if halted() or time.monotonic() > deadline:
                    why = "halted" if halted() else "did not come in time"
                    raise FormError(
                        f"membership {self.record.number}: members {missing[:8]} {why}", tuple(missing)
                    )
                time.sleep(_LOOK_S)
        except (torch_dist.DistError, RuntimeError) as error:
            if isinstance(error, FormError):
                raise
            raise FormError(
                f"membership {self.record.number}: the store of member {first.number} is gone",
                (first.number,),
            ) from None

    def _one(self, name: str, backend: str) -> ProcessGroup:
        store = PrefixStore(name, self.store)
        group = ProcessGroup(store, self.rank, self.size)
        kinds = ProcessGroup.BackendType
        limit = timedelta(seconds=self._limit_s)
        if backend == "gloo":
            made = torch_dist.ProcessGroupGloo(store, self.rank, self.size, limit)
            group._set_default_backend(kinds.GLOO)
            group._register_backend(torch.device("cpu"), kinds.GLOO, made)
        else:
            options = torch_dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            nccl = torch_dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            group._set_default_backend(kinds.NCCL)
            group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        group._set_group_name(f"evenroute-{self.record.run}-{name}")  # type: ignore[arg-type] # a str by another name
        adopt_group(group, store)
        return group

    def _connect(self, group: ProcessGroup) -> None:
        """Connects every pair, so that nothing connects later."""
        device = torch.device("cpu") if group is self.vote else self.device
        tiny = torch.zeros(self.size, dtype=torch.int64, device=device)
        group.allreduce([tiny]).wait(timedelta(seconds=self._limit_s))
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def agree(self, values: list[int | None]) -> list[int]:
        """Every member's equal ``values`` (None = has none, takes the others'). Raises RuntimeError where they differ.

        A collective of all members: who gets through knows that all have come.
        """
        top = 1 << 62
        signed = [top if one is None else one for one in values]
        signed += [top if one is None else -one for one in values]
        vector = torch.tensor(signed, dtype=torch.int64)
        torch_dist.all_reduce(vector, torch_dist.ReduceOp.MIN, group=self.vote)
        low, high = vector[: len(values)].tolist(), (-vector[len(values) :]).tolist()
        if low != high:
            raise RuntimeError(f"membership {self.record.number}: members begin with {low} and {high}")
        return [int(one) for one in low]

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def close(self) -> None:
        """Free whoever waits in a collective of these groups, here and on the peers; from any thread, at once."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self.device.type == "cuda":
            for group in (self.ep, self.move):
                with suppress(RuntimeError):
                    group.abort()
        now = _sockets()
        for fd, link in self._fds.items():
            if now.get(fd) != link:  # closed meanwhile, and the number used again
                continue
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as mine:
                mine.getpeername()  # a listening socket has none
                mine.shutdown(socket.SHUT_RDWR)

    def drop(self) -> None:
        """Close, and let go of torch's objects; on the forward thread, which no exception may hold them for."""
        self.close()
        for name in ("ep", "vote", "move", "store"):
            if hasattr(self, name):
                delattr(self, name)
        gc.collect()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
