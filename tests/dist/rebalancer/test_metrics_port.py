"""The metrics port is bounded in peers, bytes and time: who opens it and says nothing keeps nobody out."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request

import pytest

from evenroute.dist.rebalancer import metrics
from evenroute.dist.rebalancer.metrics import MetricsServer
from support.control_plane import wait_for


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(metrics, "_MAX_PEER_S", 1.0)
    made = MetricsServer("127.0.0.1", 0, lambda: None, 10.0)
    yield made
    made.close()


def connect(server):
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def scrape(server):
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as answer:
        return answer.read().decode()


def test_half_open_requests_hold_few_threads_and_keep_no_scraper_out(server):
    threads = threading.active_count()
    held = [connect(server) for _ in range(200)]
    try:
        for one in held:
            one.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
        assert "# HELP evenroute_up" in scrape(server)
        wait_for(lambda: threading.active_count() <= threads + metrics._MAX_PEERS, 60, "few threads")
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
    assert "evenroute_up" in scrape(server)


def test_what_is_no_request_is_refused_and_the_port_goes_on(server):
    for frame in (b"\0\1\2\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n"):
        with connect(server) as one:
            one.sendall(frame)
            one.settimeout(30)
            while one.recv(4096):
                pass
    assert "evenroute_up" in scrape(server)
