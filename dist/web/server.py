"""HTTP for strangers: GET alone, bounded in peers, bytes and time; nobody who opens the port keeps others out.

A plain answer has 10 seconds and one of 32 places, where a new peer takes the oldest one's. A stream (server-sent
events) has one of 8 places of its own; once they are taken further ones are told so, and the page asks instead.
"""

from __future__ import annotations

import gzip
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

MAX_PEERS = 32
MAX_STREAMS = 8
MAX_PEER_S = 10.0
MAX_STREAM_S = 3600.0  # a browser connects anew by itself
_MAX_HEAD_BYTES = 16 * 1024
_ZIPPED_FROM = 4096  # bytes
_ALWAYS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


@dataclass(frozen=True)
class HttpRequest:
    """A GET: its path, the first value of each query word, and its headers."""

    path: str
    query: dict[str, str]
    headers: Message


@dataclass(frozen=True)
class HttpAnswer:
    """What goes back; ``stream``: parts sent as they come, until it ends or the peer leaves."""

    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    stream: Iterator[bytes] | None = None


def plain(status: int, text: str, **headers: str) -> HttpAnswer:
    """A line of text."""
    return HttpAnswer(f"{text}\n".encode(), status=status, headers=headers)


class _Handler(BaseHTTPRequestHandler):
    """One request of bounded size; the connection's time is bounded by the server."""

    server: BoundedServer
    server_version = "evenroute"
    sys_version = ""

    def handle(self) -> None:
        """Read the head of a request, answer, close."""
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            part = self.request.recv(_MAX_HEAD_BYTES - len(head))
            if not part or len(head) + len(part) >= _MAX_HEAD_BYTES:
                return
            head += part
        self.rfile = BytesIO(head)
        with suppress(OSError):  # the peer left
            self.handle_one_request()

    def do_GET(self) -> None:
        """The answer of the server's `respond`."""
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query, max_num_fields=8).items()}
        self._send(self.server.respond(HttpRequest(parts.path, query, self.headers)))

    do_HEAD = do_GET

    def _send(self, answer: HttpAnswer) -> None:
        if answer.stream is not None and not self.server.begin_stream(self.request):
            answer = plain(503, f"{MAX_STREAMS} streams are open; ask /api/status instead")
        headers = {"Content-Type": answer.content_type, **_ALWAYS, **answer.headers}
        body = answer.body
        if answer.stream is None:
            if len(body) >= _ZIPPED_FROM and "gzip" in (self.headers.get("Accept-Encoding") or ""):
                body = gzip.compress(body, 1)
                headers["Content-Encoding"] = "gzip"
            headers["Content-Length"] = str(len(body))
        self.send_response(answer.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if answer.stream is None:
            self.wfile.write(body)
            return
        for part in answer.stream:
            self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


class BoundedServer(ThreadingMixIn, TCPServer):
    """Serves a listening socket; ``respond`` is called in a thread of each request and must not raise."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, respond: Callable[[HttpRequest], HttpAnswer]) -> None:
        self.address_family = listening.family
        self.respond = respond
        self._open: dict[socket.socket, float] = {}
        self._streams: dict[socket.socket, float] = {}
        self._lock = Lock()
        super().__init__(listening.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a connection."""
        now = time.monotonic()
        with self._lock:
            self._open[request] = now
            self._cut(now, room=True)
        super().process_request(request, client_address)

    def begin_stream(self, request: socket.socket) -> bool:
        """Give a connection one of the places of streams; False when all are taken."""
        with self._lock:
            if len(self._streams) >= MAX_STREAMS or self._open.pop(request, None) is None:
                return False
            self._streams[request] = time.monotonic()
        request.settimeout(MAX_PEER_S)  # of one write, to a peer that does not read
        return True

    def service_actions(self) -> None:
        """Every half second: end connections that take too long."""
        with self._lock:
            self._cut(time.monotonic(), room=False)

    def _cut(self, now: float, *, room: bool) -> None:
        excess = len(self._open) - MAX_PEERS if room else 0
        late = [
            request
            for number, (request, since) in enumerate(self._open.items())  # oldest first
            if number < excess or now - since > MAX_PEER_S
        ]
        late += [request for request, since in self._streams.items() if now - since > MAX_STREAM_S]
        for request in late:
            self._open.pop(request, None)
            self._streams.pop(request, None)
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)  # its thread's recv or send returns

    def shutdown_request(self, request: Any) -> None:
        """End of a connection."""
        with self._lock:
            self._open.pop(request, None)
            self._streams.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that left or was cut is nothing to report."""
