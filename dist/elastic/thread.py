"""A member's own thread and connection: it reports, hears of halts and records while the forward thread is anywhere."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import zmq

from evenroute.dist.membership.member import MemberCore
from evenroute.dist.rank.thread import Lock
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.membership import (
    MEMBER_TAG,
    MembershipRecord,
    MemberUp,
    decode_member_down,
    encode_member,
)
from evenroute.dist.wire.messages import MessageError

logger = logging.getLogger("evenroute.dist.elastic")

_TURN_S = 0.05


class MemberThread:
    """Drives a `MemberCore` under its lock. ``on_halt``: frees the forward thread, called whenever the member has
    halted or ended; ``on_offer``: a change that it may prepare for."""

    def __init__(
        self,
        core: MemberCore,
        lock: Lock,
        link: DealerLink,
        *,
        on_halt: Callable[[], None],
        on_offer: Callable[[MembershipRecord], None],
    ) -> None:
        self.core = core
        self.changed = threading.Condition()
        self._lock = lock
        self._link = link
        self._on_halt = on_halt
        self._on_offer = on_offer
        self._offered = 0
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="evenroute-member", daemon=True)

    def start(self) -> None:
        """Begin; the first report goes out at once."""
        self._thread.start()

    def wake(self) -> None:
        """Something is due."""
        with suppress(OSError):  # full: then it is awake anyway
            os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for one in (self._link.socket, self._link.monitor):
            poller.register(one, zmq.POLLIN)
        while not self._stopping:
            poller.poll(int(1000 * _TURN_S))
            try:
                self._turn(time.monotonic())
            except Exception:
                logger.exception("member's thread: goes on")
                time.sleep(0.05)

    def _turn(self, now: float) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if self._link.connected_anew():
            with self._lock:
                self.core.reconnected()
        for frames in self._link.receive(64):
            self._take(frames, now)
        with self._lock:
            out = self.core.tick(now)
            halted = self.core.halted or self.core.ended is not None
            offered = self.core.offered
        self._send(out)
        if halted:
            self._on_halt()
        if offered is not None and offered.run != self._offered:
            self._offered = offered.run
            self._on_offer(offered)
        with self.changed:
            self.changed.notify_all()

    def _take(self, frames: list[bytes], now: float) -> None:
        try:
            if len(frames) != 2 or frames[0] != MEMBER_TAG:
                raise MessageError(f"frames: {len(frames)} found, expected a tag and 1")
            message = decode_member_down(frames[1])
        except MessageError as error:
            logger.warning("frame of the rebalancer refused: %s", error)
            return
        with self._lock:
            out = self.core.receive(message, now)
        self._send(out)

    def _send(self, messages: list[MemberUp]) -> None:
        for message in messages:
            self._link.send(MEMBER_TAG, encode_member(message))

    def wait(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Until `ready`; False if it is not within `limit_s`."""
        deadline = time.monotonic() + limit_s
        with self.changed:
            while not ready():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self.changed.wait(min(left, 0.05))
        return True

    def close(self) -> None:
        """Say what is still to be said, then end."""
        with self._lock:
            self.core.reconnected()
        self.wake()
        time.sleep(0.02)
        self._stopping = True
        self.wake()
        self._thread.join(2.0)
        if not self._thread.is_alive():
            self._link.close(linger_ms=200)
