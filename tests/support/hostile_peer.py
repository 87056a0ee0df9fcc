"""One peer that does everything a stranger on an open address, or a rank gone wrong, can do to a rebalancer."""

from __future__ import annotations

import itertools
import random
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from evenroute.dist.wire.messages import (
    NO_KEY,
    Goodbye,
    JobShape,
    MessageError,
    RankCosts,
    RankStatus,
    RankWindow,
    Rows,
    SnapshotRequest,
    Token,
    decode_down,
)
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

NAME = "\x1b[31mevil\nERROR forged line\r\n"
HALF_OPEN = 64


class HostilePeer:
    """Connections of its own to a rebalancer's address and to its metrics port.

    `answers`: what came back, by type and reason. It knows the run, the job's shape and the epoch, as any rank does.
    """

    def __init__(self, address: str, metrics: tuple[str, int], job: JobShape, run: int, epoch: int) -> None:
        self._job, self._run, self._epoch = job, run, epoch
        self._metrics = metrics
        self._random = random.Random(1)
        self._foreign_run = secrets.randbits(62) or 1
        self._token = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(address)
        self._half_open: list[socket.socket] = []
        self._attacks = itertools.cycle(self._all())
        self.sent = 0
        self.answers: dict[str, int] = {}

    def turn(self) -> None:
        """The next attack; then read what came back."""
        next(self._attacks)()
        with suppress(zmq.Again):
            while True:
                self._take(self._socket.recv(zmq.NOBLOCK))

    def close(self) -> None:
        for one in self._half_open:
            one.close()
        self._socket.close(linger=0)
        self._context.term()

    def _all(self) -> list[Callable[[], None]]:
        return [
            self._fence_far_away,
            self._fence_close_by,
            self._windows_of_impossible_steps,
            self._windows_for_others,
            self._costs_for_another,
            self._half_open_requests,
            self._names_with_escapes,
            self._status_for_another,
            self._goodbye_for_another,
            self._rows_for_another,
            self._garbage,
        ]

    def _take(self, frame: bytes) -> None:
        with suppress(MessageError):
            message = decode_down(frame)
            if isinstance(message, Token):
                self._token = message.token
            name = type(message).__name__
            self.answers[name] = self.answers.get(name, 0) + 1

    def _send(self, message: object, **changes: Any) -> None:
        """With fields that the message's own type would refuse."""
        fields = {**msgspec.to_builtins(message, builtin_types=(bytes,)), **changes}
        with suppress(zmq.Again):
            self._socket.send(msgspec.msgpack.encode(fields), zmq.NOBLOCK)
            self.sent += 1

    def _rank(self) -> int:
        return self._random.randrange(self._job.ep_size)

    def _status(self, run: int, fence: int, job: JobShape | None = None) -> RankStatus:
        layers = self._job.num_layers
        return RankStatus(
            run, self._rank(), job or self._job, secrets.randbits(62), 2**40, NO_KEY, 1, fence,
            bytes(16 * layers), bytes(8 * layers), token=self._token,
        )  # fmt: skip

    # S1: epochs that would end the rebalancer, or be persisted
    def _fence_far_away(self) -> None:
        for run in (self._foreign_run, self._run):
            self._send(self._status(run, 2**62 - 1))

    def _fence_close_by(self) -> None:
        """Of another run, with the token that the rebalancer gave for it."""
        self._send(self._status(self._foreign_run, self._epoch + (3 << 20)))
        self._send(self._status(self._foreign_run, self._epoch))

    # S2: numbers that the store cannot hold
    def _windows_of_impossible_steps(self) -> None:
        window = self._window(seq=1)
        for last in (2**62 - 1, 2**64 - 1, 2**44 - 1):
            self._send(window, first_step=0, last_step=last)
        huge = np.full((self._job.num_layers, self._job.num_logical_experts), 2**62, "<i8").tobytes()
        self._send(window, counts=huge, tokens=2**40)

    # S3: numbers that would make a rank's own windows duplicates
    def _windows_for_others(self) -> None:
        for seq in (2**62 - 1, 2**44 - 1, 1, 1000):
            self._send(self._window(seq=seq), last_step=2**44 - 1)

    def _window(self, seq: int) -> RankWindow:
        zeros = bytes(8 * self._job.num_layers * self._job.num_logical_experts)
        return RankWindow(self._run, self._rank(), seq, 0, 10, 0, zeros)

    # S4: connections that never finish their request
    def _half_open_requests(self) -> None:
        while len(self._half_open) >= HALF_OPEN:
            self._half_open.pop(0).close()
        with suppress(OSError):
            one = socket.create_connection(self._metrics, timeout=1.0)
            self._half_open.append(one)
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: ")

    # S5: text that forges log lines
    def _names_with_escapes(self) -> None:
        job = msgspec.structs.replace(self._job, model=NAME)
        self._send(SnapshotRequest(0, secrets.randbits(62), job))
        self._send(self._status(self._foreign_run, 0, job))
        self._send(self._window(seq=1), **{NAME: NAME})

    # A rank's voice is its own
    def _status_for_another(self) -> None:
        self._send(self._status(self._run, self._epoch))

    def _goodbye_for_another(self) -> None:
        self._send(Goodbye(self._run, self._rank()))

    def _costs_for_another(self) -> None:
        costs = RankCosts(self._run, self._rank(), 2**31, 3600.0, 1e9, 1e9, 2**40, 2**40)
        self._send(costs)
        for wrong in (float("nan"), float("inf"), -1.0, 1e300):
            self._send(costs, step_s=wrong)

    def _rows_for_another(self) -> None:
        job = self._job
        other = Placement.initial(
            job.num_layers, job.num_logical_experts, job.num_slots, Topology(job.ep_size, job.num_nodes)
        )
        self._send(Rows(self._run, self._rank(), 2**40, pack_placement(other)))

    def _garbage(self) -> None:
        frames = [b"", b"\xc1", self._random.randbytes(200), b"\x81" * 5000, NAME.encode()]
        for frame in frames:
            with suppress(zmq.Again):
                self._socket.send(frame, zmq.NOBLOCK)
                self.sent += 1
