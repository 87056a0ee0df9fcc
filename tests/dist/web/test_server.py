"""The HTTP port is bounded in peers, bytes and time: who opens it and says nothing keeps nobody out."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from evenroute.dist.web import server as bounded
from evenroute.dist.web.process import listen
from evenroute.dist.web.server import BoundedServer, HttpAnswer, plain
from support.control_plane import patience, wait_for


def ticks():
    while True:
        yield b"tick\n"
        time.sleep(0.05)


def respond(request):
    if request.path == "/stream":
        return HttpAnswer(stream=ticks())
    return plain(200, "x" * 10_000 if request.path == "/long" else "fine")


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(bounded, "MAX_PEER_S", patience())
    made = BoundedServer(listen("127.0.0.1", 0), respond)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join(10)


def connect(server):
    return socket.create_connection(server.socket.getsockname()[:2], timeout=30)


def ask(server, path="/", **headers):
    host, port = server.socket.getsockname()[:2]
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read()


def test_half_open_requests_hold_few_threads_and_keep_nobody_out(server):
    threads = threading.active_count()
    held = [connect(server) for _ in range(200)]
    try:
        for one in held:
            one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        assert ask(server) == b"fine\n"
        wait_for(lambda: threading.active_count() <= threads + bounded.MAX_PEERS, 60, "few threads")
        wait_for(lambda: threading.active_count() <= threads, 60, "none past the time limit")
    finally:
        for one in held:
            one.close()


def test_a_slow_sender_is_cut_and_an_endless_head_too(server):
    with connect(server) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012
            while time.monotonic() - began < 60:
                slow.sendall(b"x")  # never silent for long, never done
                time.sleep(0.05)
    with connect(server) as big, pytest.raises(OSError):  # noqa: PT012
        for _ in range(10_000):
            big.sendall(b"x" * 4096)
            time.sleep(0.001)
    assert ask(server) == b"fine\n"


@pytest.mark.parametrize(
    ("frame", "told"),
    [
        (b"\0\1\2\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\n\r\n", b"501"),
        (b"GET\r\n\r\n", b"400"),
        (b"\r\n\r\n", b""),
        (b"GET /?" + b"&".join(b"a=1" for _ in range(99)) + b" HTTP/1.1\r\n\r\n", b""),
    ],
)
def test_what_is_no_request_is_refused_and_the_port_goes_on(server, frame, told):
    with connect(server) as one:
        one.sendall(frame)
        found = b""
        while part := one.recv(4096):
            found += part
    assert told in found.partition(b"\r\n")[0]
    assert b"Traceback" not in found
    assert ask(server) == b"fine\n"


def test_streams_have_places_of_their_own(server):
    """Once they are taken the next stream is told so; plain answers go on; a place that is left is free again."""
    held = []
    try:
        for _ in range(bounded.MAX_STREAMS):
            held.append(connect(server))
            held[-1].sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" in held[-1].recv(4096)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            ask(server, "/stream")
        assert ask(server) == b"fine\n"
        time.sleep(1.2 * bounded.MAX_PEER_S)  # longer than a plain answer may take
        held[1].recv(65536)
        assert b"tick" in held[1].recv(65536)
        held.pop(0).close()
        wait_for(lambda: len(server._streams) < bounded.MAX_STREAMS, 60, "a free place")
    finally:
        for one in held:
            one.close()


def test_a_stream_that_is_not_read_is_ended(server):
    with connect(server) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        server.respond = lambda _: HttpAnswer(stream=iter(lambda: b"x" * 1_000_000, b""))
        one.sendall(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: server._streams, 60, "its begin")
        wait_for(lambda: not server._streams, 60, "its end")


def test_long_answers_are_zipped_for_those_who_can_read_them(server):
    assert len(ask(server, "/long", **{"Accept-Encoding": "gzip"})) < 1000
    assert len(ask(server, "/long")) == 10_001
