"""Reaching a rebalancer: over IPv6, with a reason where it can't be reached, and for longer than one of its lives."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request

import pytest
import zmq

from evenroute.dist.client import ControlClient, UnreachableError, query_status
from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.control import Done, StatusAnswer, StatusRequest, encode_control
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.messages import JobShape, SnapshotRequest, decode_down, encode
from support.control_plane import RebalancerProcess, child_environment, wait_for
from support.fake_control import FakeControl, status
from support.ports import free_port

FLAGS = ["--interval", "3600", "--planner", "support.stub_planner:plan"]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
def test_ranks_operators_and_metrics_over_ipv6(tmp_path):
    flags = [*FLAGS, "--http-bind", "[::1]:0"]
    with RebalancerProcess(tmp_path, bind="tcp://[::1]:0", flags=flags) as rebalancer:
        assert rebalancer.address.startswith("tcp://[::1]:")
        link = DealerLink(parse_address(rebalancer.address, field="f"), keys=None, max_message_bytes=1 << 20)
        try:
            request = encode(SnapshotRequest(0, 7, JobShape(3, 8, 12, 2, 1, 2, False, "six")))
            wait_for(lambda: link.send(request), 60, "a rank's connection")
            answer = wait_for(lambda: next(link.receive(1), None), 60, "an answer")
            assert decode_down(answer[0]).nonce == 7
        finally:
            link.close(linger_ms=0)
        assert rebalancer.status().state == "serving"
        metrics = json.loads(rebalancer.ready.read_text())["metrics"]
        assert metrics.startswith("[::1]:")
        assert (
            "evenroute_up" in urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30).read().decode()
        )


@pytest.mark.parametrize(
    ("text", "endpoint", "local"),
    [
        ("tcp://[::1]:5", "tcp://[::1]:5", True),
        ("tcp://::1:5", "tcp://[::1]:5", True),
        ("tcp://[2001:db8::1]:0", "tcp://[2001:db8::1]:*", False),
    ],
)
def test_ipv6_literals(text, endpoint, local):
    address = parse_address(text, field="f")
    assert (address.endpoint, address.is_local, address.needs_ipv6) == (endpoint, local, True)
    assert not parse_address("tcp://127.0.0.1:5", field="f").needs_ipv6


def reason(address):
    with pytest.raises(UnreachableError) as caught:
        query_status(address, timeout_s=0.2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_cause_has_its_own_words(tmp_path):
    assert f"there is no socket {tmp_path}/none.sock" in reason(f"ipc://{tmp_path}/none.sock")
    assert "nothing listens there" in reason(f"tcp://127.0.0.1:{free_port()}")
    assert "'no-such-host.invalid' does not resolve" in reason("tcp://no-such-host.invalid:5")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"{tmp_path}/silent.sock")
        silent.listen()
        assert "something listens there: does it hang, or use keys" in reason(f"ipc://{tmp_path}/silent.sock")


def test_a_socket_of_another_user_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("evenroute.dist.client.socket.socket.connect", refuse)
    assert "is another user's" in reason(f"ipc://{tmp_path}/theirs.sock")


# --------------------------------------------------------------------------------------- long-lived clients

LONG_LIVED = """
    import sys
    from evenroute.dist.client import ControlClient, UnreachableError
    from evenroute.dist.wire.control import StatusRequest
    with ControlClient(sys.argv[1], timeout_s=0.3) as client:
        for line in sys.stdin:
            try:
                print(type(client.ask(StatusRequest())).__name__, flush=True)
            except UnreachableError:
                print("none", flush=True)
"""


def test_a_client_outlives_the_rebalancers_it_asks(tmp_path):
    """libzmq aborted the process when the peer left, as IMMEDIATE was changed after the connect."""
    command = [sys.executable, "-c", textwrap.dedent(LONG_LIVED), f"ipc://{tmp_path}/fake.sock"]
    client = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment()
    )

    def ask():
        client.stdin.write("\n")
        client.stdin.flush()
        return client.stdout.readline().strip()

    try:
        for _ in range(4):
            with FakeControl(tmp_path, [status()]):
                wait_for(lambda: ask() == "StatusAnswer", 60, "an answer")
            assert ask() == "none"
        client.stdin.close()
        assert client.wait(timeout=60) == 0
    finally:
        client.kill()
        client.wait(timeout=60)
        client.stdout.close()


def test_a_late_answer_is_never_taken_for_the_next_ones(tmp_path):
    router = zmq.Context.instance().socket(zmq.ROUTER)
    router.linger = 0
    router.bind(f"ipc://{tmp_path}/late.sock")
    try:
        with ControlClient(f"ipc://{tmp_path}/late.sock", timeout_s=0.3) as client:
            with pytest.raises(UnreachableError):
                client.ask(StatusRequest())
            assert router.poll(10_000)
            peer, tag, _ = router.recv_multipart()  # answered too late, below
            client._timeout_s = 30.0
            router.send_multipart([peer, tag, encode_control(Done("late"))])

            def serve():
                assert router.poll(30_000)
                asker, mark, _ = router.recv_multipart()
                router.send_multipart([asker, mark, encode_control(StatusAnswer(status()))])

            server = threading.Thread(target=serve)
            server.start()
            assert isinstance(client.ask(StatusRequest()), StatusAnswer)
            server.join(30)
    finally:
        router.close()
