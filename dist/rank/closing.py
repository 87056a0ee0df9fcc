"""The end of a rank's agent: by `RankAgent.close`, at the interpreter's exit, or when nothing refers to the agent."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.util import Finalize

import torch

from evenroute.dist.config import AgentConfig
from evenroute.dist.rank.counts import CountTaker
from evenroute.dist.rank.thread import AgentThread
from evenroute.dist.rank.votes import VoteThread
from evenroute.dist.record.tap import RecordingTap

logger = logging.getLogger("evenroute.dist.agent")

_EXIT_LIMIT_S = 10.0


class Closing:
    """Ends an agent's parts, once; refers to them and never to the agent.

    step      the next step's number, kept by the agent
    failed    the job can't go on: no goodbye is sent
    result    what the first `close` came to; None before
    """

    def __init__(
        self,
        config: AgentConfig,
        rank: int,
        device: torch.device,
        takes: CountTaker,
        thread: AgentThread,
        votes: VoteThread,
        tap: RecordingTap,
    ) -> None:
        if device.type == "cuda" and device.index is None:  # of this thread; another may close
            device = torch.device("cuda", torch.cuda.current_device())
        self._rank, self._device = rank, device
        self._limit_s, self._streams = config.close_limit_s, bool(config.rebalancer)
        self._takes, self._thread, self._votes, self._tap = takes, thread, votes, tap
        self._pid = os.getpid()
        self._begun = threading.Event()
        self.step = 0
        self.failed = False
        self.result: bool | None = None

    def close(self, limit_s: float | None = None, *, clean: bool = True) -> bool:
        """Send what is counted and, if `clean`, a goodbye; end the threads. True if all of it is known to be stored."""
        if (
            self._begun.is_set() or os.getpid() != self._pid
        ):  # a forked child has the parent's threads only by name
            return bool(self.result)
        self._begun.set()
        self.result = False
        limit_s = self._limit_s if limit_s is None else limit_s
        deadline = time.monotonic() + limit_s
        if self._tap.open:
            self._tap.finish()
        taken = not self._streams or self._takes.finish(self.step, limit_s)
        if not taken:
            logger.warning(
                "rank %d: the counts of steps %d..%d stay on the device: its copies are three takes behind",
                self._rank,
                self._takes.first_step,
                self.step - 1,
            )
        left_s = max(0.0, deadline - time.monotonic()) if self._streams else 0.0
        done = self._thread.close(left_s, goodbye=clean and not self.failed) and taken
        if self._streams and not done:
            unsent = self._thread.unsent()
            logger.warning(
                "rank %d: not known to be stored: %d tokens in flight (steps %s), %d tokens unsent (steps %s)",
                self._rank,
                unsent.in_flight_tokens,
                unsent.in_flight_steps,
                unsent.open_tokens,
                unsent.open_steps,
            )
        # Ranks that are a few steps behind still need this one's last vote.
        if not self._votes.close(limit_s if clean and not self.failed else min(2.0, limit_s)):
            logger.warning(
                "rank %d: the last vote is still under way; its thread ends with the process", self._rank
            )
        self.result = done or not self._streams
        return self.result

    def detach(self, limit_s: float) -> None:
        """End the parts without a word, with all counts in the stream: the process goes on in another membership."""
        if self._begun.is_set():
            return
        self._begun.set()
        self.result = False
        if self._tap.open:
            self._tap.finish()
        self._takes.finish(self.step, limit_s)
        self._thread.hand_back(limit_s)
        self._votes.close(min(1.0, limit_s))

    def on_its_device(self) -> None:
        """`close`, from another thread than the one that counts."""
        with nullcontext() if self._device.type != "cuda" else torch.cuda.device(self._device):
            self.close()


def close_with(agent: object, closing: Closing) -> Callable[[], None]:
    """Close at the end of the process or once `agent` is gone; the function returned calls that off.

    An uncaught exception that ends the process is no clean end: what is counted is sent, a goodbye is not.
    """

    def at_exit() -> None:
        raised = sys.exc_info()[1] or getattr(sys, "last_value", None)
        closing.close(clean=raised is None or isinstance(raised, SystemExit))

    def when_gone() -> None:
        atexit.unregister(at_exit)
        at_child_exit.cancel()
        # The collector runs in any thread, the agent's own among them, and must not wait.
        thread = threading.Thread(target=closing.on_its_device, name="evenroute-closing", daemon=True)
        thread.start()
        _wait_at_exit(thread)

    def call_off() -> None:
        finalizer.detach()
        atexit.unregister(at_exit)
        at_child_exit.cancel()

    finalizer = weakref.finalize(agent, when_gone)
    finalizer.atexit = False
    atexit.register(at_exit)
    # A process that multiprocessing forked leaves by os._exit, after these.
    at_child_exit = Finalize(None, at_exit, exitpriority=1)
    return call_off


def _wait_at_exit(thread: threading.Thread) -> None:
    atexit.register(thread.join, _EXIT_LIMIT_S)
    Finalize(None, thread.join, args=(_EXIT_LIMIT_S,), exitpriority=1)
