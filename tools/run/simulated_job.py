"""Many simulated ranks in one process, for the transport bench and the tests of the rebalancer. No torch.

They stream windows as a rank does but route nothing and vote nothing: a rank reports a placement as live as soon as all
hold it.
"""

from __future__ import annotations

import ctypes
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import zmq
from numpy.typing import NDArray

from evenroute.dist.protocol.agreement import Version
from evenroute.dist.protocol.stream import RankStream
from evenroute.dist.wire.link import raise_file_limit
from evenroute.dist.wire.messages import (
    NO_KEY,
    Ack,
    Down,
    JobShape,
    Key,
    PlacementMessage,
    RankStatus,
    Rows,
    RowsRequest,
    Snapshot,
    SnapshotRequest,
    Token,
    Up,
    decode_down,
    encode,
)
from evenroute.dist.wire.placement import pack_placement, unpack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

HEARTBEAT_S = 1.0
RESEND_S = 2.0
MIN_TURN_S = 0.008
M_TRIM_THRESHOLD = -1  # malloc.h


@dataclass
class SimulatedRank:
    """One rank's side: its socket, its stream of windows, the placement it holds."""

    rank: int
    socket: zmq.Socket[bytes]
    next_window_at: float
    next_status_at: float
    stream: RankStream
    windows: int = 0
    sent_at: float = 0.0
    held: Key = NO_KEY
    held_at: float = 0.0
    token: int = 0

    @property
    def stored(self) -> int:
        """Windows acknowledged."""
        return self.stream.windows_acknowledged


def _keep_freed_memory() -> None:
    """glibc gives memory above 128 KB back at once: 20 page faults a window here, none in a rank that sends its own."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 256 << 20)


class SimulatedJob:
    """`job.ep_size` ranks in one process. `turn` does what is due and reads what came, for at most `wait_s`."""

    def __init__(self, address: str, job: JobShape, *, seed: int = 0, period_s: float = 1.0) -> None:
        raise_file_limit()
        _keep_freed_memory()
        self.job = job
        self.run = secrets.randbits(62) or 1
        self.period_s = period_s
        self.latencies: list[float] = []
        self.sent = 0
        self.resent = 0
        self.counting = True
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, job.ep_size + 16)
        self._poller = zmq.Poller()
        self._by_socket: dict[object, SimulatedRank] = {}
        self._fence = 0
        self._next_turn_at = 0.0
        start = Placement.initial(
            job.num_layers, job.num_logical_experts, job.num_slots, Topology(job.ep_size, job.num_nodes)
        )
        self._live = Version.of(NO_KEY, start)
        self._versions: dict[Key, Version] = {NO_KEY: self._live}
        rng = np.random.default_rng(seed)
        weights = rng.pareto(1.2, job.num_logical_experts) + 0.05
        self._tokens = 4096
        one = rng.multinomial(self._tokens * job.top_k, weights / weights.sum(), size=job.num_layers)
        self.counts: NDArray[np.int64] = one.astype(np.int64)
        now = time.monotonic()
        self.ranks = [self._connect(address, rank, now) for rank in range(job.ep_size)]

    def _connect(self, address: str, rank: int, now: float) -> SimulatedRank:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.SNDHWM, 16)
        socket.connect(address)
        # Ranks take their windows at the same step, but not at the same microsecond.
        offset = rank / self.job.ep_size
        stream = RankStream(run=self.run, rank=rank, resend_s=RESEND_S)
        due = (now + self.period_s * offset, now + HEARTBEAT_S * offset)
        simulated = SimulatedRank(rank, socket, *due, stream)
        self._poller.register(socket, zmq.POLLIN)
        self._by_socket[socket] = simulated
        return simulated

    def start(self, limit_s: float = 60.0) -> None:
        """Ask for a snapshot as rank 0 of a starting job does, and wait until all ranks' statuses are known."""
        first = self.ranks[0]
        nonce = secrets.randbits(62)
        self._send(first, SnapshotRequest(0, nonce, self.job))
        deadline = time.monotonic() + limit_s
        while self._fence == 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rebalancer: no snapshot within {limit_s:g} s")
            self.turn(0.05, windows=False)

    def _send(self, rank: SimulatedRank, message: Up) -> None:
        with suppress(zmq.Again):  # whatever matters comes again
            # A copy of 0.1 MB is cheaper than watching for its end.
            rank.socket.send(encode(message), zmq.NOBLOCK)

    def turn(self, wait_s: float, *, windows: bool = True) -> None:
        """One round over all ranks."""
        now = time.monotonic()
        if now < self._next_turn_at:  # asking 1,024 sockets costs the same for one answer as for many
            time.sleep(self._next_turn_at - now)
            now = self._next_turn_at
        self._next_turn_at = now + MIN_TURN_S
        for rank in self.ranks:
            if now >= rank.next_status_at:
                rank.next_status_at = now + HEARTBEAT_S
                self._send(rank, self._status(rank))
            if rank.stream.in_flight is not None:
                for window in rank.stream.tick(now):
                    self.resent += 1
                    rank.sent_at = now
                    self._send(rank, window)
            elif windows and self.counting and now >= rank.next_window_at:
                self._window(rank, now)
        for socket, _ in self._poller.poll(max(0, int(1000 * wait_s))):
            self._receive(self._by_socket[socket])

    def _window(self, rank: SimulatedRank, now: float) -> None:
        first = rank.windows * 16
        rank.windows += 1
        rank.sent_at = now
        rank.next_window_at = max(rank.next_window_at + self.period_s, now - self.period_s)
        self.sent += 1
        for window in rank.stream.add(first, first + 15, self._tokens, self.counts, now):
            self._send(rank, window)

    def _status(self, rank: SimulatedRank) -> RankStatus:
        live = self._live
        keys = np.array([live.key] * self.job.num_layers, "<i8").tobytes()
        digests = np.array(live.row_digests, "<i8").tobytes()
        held = self._versions[rank.held]
        # The agreed part counts votes; here a vote is decided whenever the live version changes.
        vote = len(self._versions) - 1
        return RankStatus(
            self.run,
            rank.rank,
            self.job,
            self.run ^ rank.rank,  # an identity
            vote,
            rank.held,
            held.digest,
            self._fence,
            keys,
            digests,
            token=rank.token,
        )

    def _receive(self, rank: SimulatedRank) -> None:
        while True:
            try:
                frame = rank.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(rank, decode_down(frame), time.monotonic())

    def _take(self, rank: SimulatedRank, message: Down, now: float) -> None:
        self._fence = max(self._fence, message.epoch)
        match message:
            case Ack(seq=seq):
                before = rank.stored
                rank.stream.acknowledged(message.run, seq, now)
                if rank.stored > before:
                    self.latencies.append(now - rank.sent_at)
            case Token(token=token):
                rank.token, rank.next_status_at = token, now
            case PlacementMessage(key=key):
                self._hold(rank, message, key, now)
            case RowsRequest():
                self._send(
                    rank,
                    Rows(self.run, rank.rank, len(self._versions) - 1, pack_placement(self._live.placement)),
                )
            case Snapshot():
                pass

    def _hold(self, rank: SimulatedRank, message: PlacementMessage, key: Key, now: float) -> None:
        if key not in self._versions:
            self._versions[key] = Version.of(key, unpack_placement(message.placement, self.job))
        if key > rank.held:
            rank.held, rank.held_at, rank.next_status_at = key, now, now
        if all(other.held >= key for other in self.ranks) and key > self._live.key:
            self._live = self._versions[key]

    def drain(self, limit_s: float) -> bool:
        """No new windows; wait until all are acknowledged."""
        self.counting = False
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all(rank.stream.in_flight is None for rank in self.ranks):
                return True
            self.turn(0.02)
        return False

    def close(self) -> None:
        """Close all sockets."""
        for rank in self.ranks:
            rank.socket.close(linger=0)
        self._context.term()
