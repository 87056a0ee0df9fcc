"""The HTTP port's process, seen from the rebalancer: fed once a second, never waited for, started anew if it dies.

The port is bound here, so that an address that cannot be had ends the start; the child serves it. Between the two goes
length-prefixed msgpack, one way; of several statuses that the child has not read yet it gets the newest.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress

import msgspec
from msgspec import Struct

from evenroute.dist.config import RebalancerConfig
from evenroute.dist.wire.address import bracketed, parse_address
from evenroute.dist.wire.control import RebalancerStatus

logger = logging.getLogger("evenroute.dist.rebalancer")

_CHILD = "evenroute.dist.web.child"
LENGTH_BYTES = 4
_FIRST_RESTART_S = 1.0
_LAST_RESTART_S = 60.0
_WELL_S = 300.0  # a child that lived so long starts anew at once


class WebSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """What the child is told at its start. ``descriptor``: the listening socket that it inherits."""

    store: str
    max_rank_silence_s: float
    token: str
    is_local: bool
    log_level: str
    log_format: str = "text"
    descriptor: int = -1


def listen(host: str, port: int) -> socket.socket:
    """The bound port; OSError in one line where it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host if host != "*" else "", port), family=family, backlog=64)
    except OSError as error:
        raise OSError(
            f"rebalancer.http_bind (--http-bind): {bracketed(host)}:{port} cannot be bound: {error.strerror or error}"
        ) from None


class WebProcess:
    """`feed` once a second, `turn` more often; both return at once."""

    def __init__(self, host: str, port: int, settings: WebSettings) -> None:
        self._listening = listen(host, port)
        self.address = f"{bracketed(host)}:{self._listening.getsockname()[1]}"
        self._settings = msgspec.structs.replace(settings, descriptor=self._listening.fileno())
        self._child: subprocess.Popen[bytes] | None = None
        self._pipe: socket.socket | None = None
        self._pending = memoryview(b"")
        self._started_at = 0.0
        self._restart_s = 0.0
        self.restarts = 0

    @classmethod
    def of(cls, config: RebalancerConfig, token: str) -> WebProcess | None:
        """As the settings say; None without an address. OSError in one line when it cannot be bound."""
        settings = config.rebalancer
        if not settings.http_bind:
            return None
        http = parse_address(f"tcp://{settings.http_bind}", field="rebalancer.http_bind")
        told = WebSettings(
            settings.store,
            settings.max_rank_silence_s,
            token,
            http.is_local,
            settings.log_level,
            settings.log_format,
        )
        return cls(http.host.strip("[]"), http.port, told)

    def feed(self, status: RebalancerStatus, now: float) -> None:
        """The next status; dropped while the one before is still on its way."""
        self.turn(now)
        if self._child is None:
            self._start(now)
        if not self._pending:
            self._send(_frame(status))

    def turn(self, now: float) -> None:
        """Go on with what is on its way; notice a child that has ended."""
        if self._pending:
            self._send(b"")
        if self._child is not None and self._child.poll() is not None:
            self._restart_s = (
                _FIRST_RESTART_S
                if now - self._started_at > _WELL_S
                else min(max(2 * self._restart_s, _FIRST_RESTART_S), _LAST_RESTART_S)
            )
            self.restarts += 1
            logger.warning(
                "http: its process ended with %d, begins anew in %.0f s",
                self._child.returncode,
                self._restart_s,
            )
            self._drop()
            self._started_at = now

    def _start(self, now: float) -> None:
        if self.restarts and now - self._started_at < self._restart_s:
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", _CHILD],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(self._listening.fileno(),),
            )
        except OSError as error:
            ours.close()
            logger.error("http: its process cannot be started: %s", error)
            self.restarts, self._restart_s = self.restarts + 1, _LAST_RESTART_S
        else:
            self._pipe = ours
            self._send(_frame(self._settings))
        finally:
            theirs.close()
            self._started_at = now

    def _send(self, frame: bytes) -> None:
        if self._pipe is None:
            return
        if frame:
            self._pending = memoryview(frame)
        try:
            while self._pending:
                self._pending = self._pending[self._pipe.send(self._pending) :]
        except BlockingIOError:
            pass
        except OSError:  # it is gone; `turn` says so
            self._pending = memoryview(b"")

    def _drop(self) -> None:
        self._child, self._pending = None, memoryview(b"")
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    def close(self) -> None:
        """End the child and free the port."""
        child = self._child
        self._drop()
        if child is not None:
            with suppress(ProcessLookupError):
                child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=5.0)
        self._listening.close()


def _frame(message: Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def read_frame(descriptor: int) -> bytes:
    """The next message; EOFError once the rebalancer has ended."""
    size = int.from_bytes(_read(descriptor, LENGTH_BYTES), "little")
    return _read(descriptor, size)


def _read(descriptor: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
