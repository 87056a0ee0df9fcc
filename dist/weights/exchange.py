"""Point-to-point transfers of one chunk on a process group, with their limit: enqueue, then done or late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as torch_dist
from torch import Tensor

from evenroute.dist.groups import is_adopted


class MigrationError(RuntimeError):
    """A transfer failed or outlasted its limit; names operation and layer. The job cannot go on."""


@dataclass(frozen=True)
class Move:
    """``memory`` (1-D uint8) goes to (or, not ``send``, comes from) rank ``peer`` of the group."""

    send: bool
    memory: Tensor
    peer: int


@dataclass
class InFlight:
    """A chunk that is enqueued. ``what`` names operation and layer. On CUDA ``begun`` and ``done`` are
    its events; on the CPU ``works`` are waited for."""

    what: str
    started: float
    works: list[torch_dist.Work]
    begun: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None

    def has_begun(self) -> bool:
        """CUDA only: is the device past all that comes before it."""
        return self.begun is not None and self.begun.query()  # type: ignore[no-untyped-call]

    def finished(self) -> bool:
        """CUDA only: has the device done it."""
        return self.done is not None and self.done.query()  # type: ignore[no-untyped-call]


def post(moves: Sequence[Move], group: torch_dist.ProcessGroup, what: str) -> list[torch_dist.Work]:
    """Enqueue the moves as one batch on the current stream; both sides list them in one order.

    Raises:
        MigrationError: the backend refuses (a peer is gone).
    """
    if is_adopted(group):
        return _post_adopted(moves, group, what)
    ops = [
        torch_dist.P2POp(
            torch_dist.isend if move.send else torch_dist.irecv,
            move.memory,
            group=group,
            group_peer=move.peer,
        )
        for move in moves
    ]
    if not ops:
        return []
    try:
        works: list[torch_dist.Work] = torch_dist.batch_isend_irecv(ops)
    except RuntimeError as bad:
        raise MigrationError(f"{what} failed: {bad}") from bad
    return works


def _post_adopted(moves: Sequence[Move], group: torch_dist.ProcessGroup, what: str) -> list[torch_dist.Work]:
    """The same on a group that torch's registry does not know: `batch_isend_irecv` refuses it."""
    batch = bool(moves) and moves[0].memory.device.type == "cuda"  # NCCL: sends and receives of one launch
    works: list[torch_dist.Work] = []
    try:
        if batch:
            group._start_coalescing(moves[0].memory.device)
        works += [(group.send if one.send else group.recv)([one.memory], one.peer, 0) for one in moves]
        if batch:
            works = [group._end_coalescing(moves[0].memory.device)]
    except RuntimeError as bad:
        raise MigrationError(f"{what} failed: {bad}") from bad
    return works


def wait_host(chunk: InFlight, limit_s: float) -> None:
    """CPU: wait for the works of a chunk, all within one limit.

    Raises:
        MigrationError: a peer is gone, or the limit is over.
    """
    for work in chunk.works:
        left = max(0.001, limit_s - (time.monotonic() - chunk.started))
        try:
            work.wait(timedelta(seconds=left))
        except RuntimeError as bad:
            raise MigrationError(
                f"{chunk.what} failed or did not complete within {limit_s:g} s: {bad}"
            ) from bad
    chunk.works.clear()
