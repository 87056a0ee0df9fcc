"""The ranks' votes: an all-reduce (MIN) of a few int64 on a CPU group, a period ahead, by a thread of its own.

The forward thread posts vote k and goes on; a period later it WAITS for its result, which is then there. It never
polls: a rank that went on without a result would leave the others behind.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from evenroute.dist.groups import RollCall

_STOP = None
_LOOK_S = 1.0


class VoteError(RuntimeError):
    """A vote could not be reduced; the message names it and, as far as known, the missing rank. Ends the job."""


class VoteThread:
    """Reduces posted votes in order; at most one is outstanding."""

    def __init__(self, group: ProcessGroup, *, limit_s: float, roll_call: RollCall | None) -> None:
        self._group = group
        self._limit_s = limit_s
        self._roll_call = roll_call
        self.waited_s = 0.0  # by the forward thread, for all results together
        self._posted: queue.SimpleQueue[tuple[int, NDArray[np.int64]] | None] = queue.SimpleQueue()
        self._reduced: queue.SimpleQueue[NDArray[np.int64] | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="evenroute-votes", daemon=True)
        self._thread.start()

    def post(self, vote: int, vector: NDArray[np.int64]) -> None:
        """Hand over vote number `vote`, int64 [n]; returns at once."""
        self._posted.put((vote, vector))

    def wait(self, vote: int, describe: Callable[[], str]) -> NDArray[np.int64]:
        """The reduction of `vote`, waited for. Raises VoteError, with what `describe` says of the state, in time."""
        began = time.perf_counter()
        found = self._get(f"vote-{vote}")
        self.waited_s += time.perf_counter() - began
        if isinstance(found, Exception):
            missing = ""
            if self._roll_call is not None:
                missing = self._roll_call.missing(f"vote-{vote}", min(3.0, self._limit_s))
            reason = " ".join(str(found).split())[:200]
            raise VoteError(
                f"vote {vote} ({describe()}) was not reduced within {self._limit_s:g} s; {missing} ({reason})"
            ) from found
        return found

    def _get(self, operation: str) -> NDArray[np.int64] | Exception:
        """The result, or the reason for its absence.

        A rank whose neighbour died sees the error at once, other ranks only at the limit; so each second they look
        whether some rank has called the roll, and sign it in time.
        """
        # The collective fails at the limit; two more seconds let its error arrive.
        limit_s = self._limit_s + 2.0
        deadline = time.monotonic() + limit_s
        while True:
            try:
                return self._reduced.get(timeout=max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= deadline:
                    return TimeoutError(f"no result within {limit_s:g} s")
            if self._roll_call is not None and self._roll_call.called(operation):
                return ConnectionError("another rank found that it fails")

    def _run(self) -> None:
        while (posted := self._posted.get()) is not None:
            try:
                tensor = torch.from_numpy(posted[1])
                torch_dist.all_reduce(tensor, torch_dist.ReduceOp.MIN, group=self._group)
            except Exception as error:  # handed to the forward thread, which ends the job
                self._reduced.put(error)
                return
            self._reduced.put(posted[1])

    def close(self, limit_s: float) -> bool:
        """End the thread after the outstanding vote; False if that took longer than `limit_s`."""
        self._posted.put(_STOP)
        deadline = time.monotonic() + limit_s
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()
