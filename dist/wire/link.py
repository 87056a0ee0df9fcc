"""ZeroMQ sockets of the control plane: ROUTER at the rebalancer, DEALER at each rank. Non-blocking, bounded, no pickle.

A frame for which there is no room, or no peer, is dropped and counted: the protocol repeats whatever matters.
Identities are automatic (two peers with one identity are never both heard); ROUTER_MANDATORY reports peers that left.

ZeroMQ's own heartbeats are off: libzmq 4.3.5 aborts the process when it meets a PING in what is left of a lost
connection whose input was stopped at RCVHWM (found by freezing the rebalancer; libzmq#4841 has the same assertion). A
rank that hears nothing for too long connects anew instead, and TCP's keepalive closes dead connections here.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq

from evenroute.dist.wire.address import Address
from evenroute.dist.wire.keys import LOCAL_ROLE, ClientKeys, ServerKeys, ZapHandler
from evenroute.dist.wire.membership import MEMBER_TAG

LINGER_MS = 500
QUEUE_FRAMES = 16  # frames that wait for a peer that does not read
ROUTER_RECEIVE_FRAMES = (
    4  # frames of one peer that wait for the rebalancer: its memory's bound is this times ranks
)
CONTROL_TAG = b"control"  # first frame of an operator's or viewer's request, and of its answer
_HANDSHAKE_MS = 3000
_BACKLOG = 4096
_COPIED_BYTES = 16384  # a copy of a smaller frame is cheaper than keeping track of it


def _set_common(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, QUEUE_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def raise_file_limit() -> int:
    """Allow as many connections as the hard limit of open files does; returns that limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


class Received(NamedTuple):
    """A frame from a peer; `control` frames come from operators and viewers, the others from ranks; `member` frames are
    about who is in the job."""

    peer: bytes
    role: str
    control: bool
    frame: memoryview | bytes
    member: bool = False


class RouterLink:
    """The rebalancer's socket. Bind errors are OSError in one line that names the address and its setting."""

    def __init__(
        self, address: Address, *, field: str, keys: ServerKeys | None, max_message_bytes: int
    ) -> None:
        raise_file_limit()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 64)
        self.zap = None if keys is None else ZapHandler(self._context, keys)
        self.socket = self._context.socket(zmq.ROUTER)
        _set_common(self.socket, max_message_bytes)
        self.socket.setsockopt(zmq.RCVHWM, ROUTER_RECEIVE_FRAMES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        if address.needs_ipv6:
            self.socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            keys.apply(self.socket)
        self.dropped = 0
        self.malformed = 0
        self._socket_file: tuple[Path, int] | None = None
        try:
            self.endpoint = self._bind(address, field)
        except OSError:
            self.close()
            raise

    def _bind(self, address: Address, field: str) -> str:
        # ZeroMQ removes the file it has bound when it closes, even if another process has put its own there meanwhile
        # (a frozen rebalancer that wakes up): so it gets a name of its own, and the file is then renamed.
        path = address.ipc_path
        own = None if path is None else path.with_name(secrets.token_hex(8)[: len(path.name)])
        mask = os.umask(0o077)  # an ipc socket is for this user alone
        try:
            self.socket.bind(address.endpoint if own is None else f"ipc://{own}")
            if path is None or own is None:
                return self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
            if path.exists() and not path.is_socket():
                raise FileExistsError(errno.EEXIST, "a file that is not a socket lies there", str(path))
            own.rename(path)
            self._socket_file = (path, path.stat().st_ino)
            return address.endpoint
        except (OSError, zmq.ZMQError) as error:
            raise OSError(f"{field}: {address.text} cannot be bound: {error.strerror}") from None
        finally:
            os.umask(mask)

    def receive(self, limit: int) -> Iterator[Received]:
        """Up to `limit` frames that wait; those of another form are dropped and counted."""
        for _ in range(limit):
            try:
                peer = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            frames = [self.socket.recv(zmq.NOBLOCK, copy=False)]  # the parts of a message come together
            while frames[-1].more:
                frames.append(self.socket.recv(zmq.NOBLOCK, copy=False))
            tag = frames[0].bytes if len(frames) == 2 and len(frames[0].buffer) < 16 else b""
            control, member = tag == CONTROL_TAG, tag == MEMBER_TAG
            if len(frames) != 1 and not control and not member:
                self.malformed += 1
                continue
            yield Received(peer, self._role(frames[-1]), control, frames[-1].buffer, member)

    def _role(self, frame: zmq.Frame) -> str:
        if self.zap is None:
            return LOCAL_ROLE
        return str(frame.get("User-Id"))

    def send(self, peer: bytes, frame: bytes, *, control: bool = False, member: bool = False) -> bool:
        """Send, or drop and return False when the peer left or does not read."""
        more = zmq.NOBLOCK | zmq.SNDMORE
        try:
            self.socket.send(peer, more)
            if control or member:
                self.socket.send(CONTROL_TAG if control else MEMBER_TAG, more)
            self.socket.send(frame, zmq.NOBLOCK, copy=len(frame) < _COPIED_BYTES)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self.dropped += 1
            return False
        return True

    def in_place(self) -> bool:
        """Whether ranks can find it: an ipc socket's file is there, and is this one."""
        if self._socket_file is None:
            return True
        path, inode = self._socket_file
        try:
            return path.stat().st_ino == inode
        except OSError:
            return False

    def close(self) -> None:
        """Close within the linger time and remove the socket file."""
        self.socket.close()
        if self.zap is not None:
            self.zap.close()
        self._context.term()
        if self._socket_file is not None:
            path, inode = self._socket_file
            with suppress(FileNotFoundError):
                if path.stat().st_ino == inode:
                    path.unlink()


class DealerLink:
    """A rank's, an operator's or a viewer's socket; connects, and reconnects, in the background."""

    def __init__(
        self, address: Address, *, keys: ClientKeys | None, max_message_bytes: int, queues: bool = False
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        _set_common(self.socket, max_message_bytes)
        # Without `queues` nothing waits for a rebalancer that is not there. To be set before the connect: libzmq 4.3.5
        # aborts the process at a lost connection if it was changed afterwards.
        self.socket.setsockopt(zmq.IMMEDIATE, 0 if queues else 1)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if address.needs_ipv6:
            self.socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            keys.apply(self.socket)
        self.monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.dropped = 0
        self._endpoint = address.endpoint
        try:
            self.socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self.close(linger_ms=0)
            raise ValueError(
                f"address: {address.text} found, expected one to connect to ({error.strerror})"
            ) from None

    def reconnect(self) -> None:
        """Leave the connection, whatever its state, and make a new one."""
        self.socket.disconnect(self._endpoint)
        self.socket.connect(self._endpoint)

    def send(self, *frames: bytes) -> bool:
        """Send, or drop and return False when no peer is connected or the queue is full."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self.dropped += 1
            return False
        return True

    def receive(self, limit: int) -> Iterator[list[bytes]]:
        """Up to `limit` messages (lists of frames) that wait."""
        for _ in range(limit):
            try:
                yield self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def connected_anew(self) -> bool:
        """Whether a connection was made since the last call."""
        found = False
        while True:
            try:
                self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found = True

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close within `linger_ms`."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger_ms)
        self._context.term()
