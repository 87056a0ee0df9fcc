"""The sockets: what raw patterns lose in silence (B22 a, B23), and what ours tell instead."""

import time

import pytest
import zmq

from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.link import QUEUE_FRAMES, DealerLink, RouterLink
from support.control_plane import patience, wait_for

LIMIT = 1 << 24


@pytest.fixture
def address(tmp_path):
    return parse_address(f"ipc://{tmp_path}/link.sock", field="bind")


@pytest.fixture
def router(address):
    made = RouterLink(address, field="bind", keys=None, max_message_bytes=LIMIT)
    yield made
    made.close()


@pytest.fixture
def dealer(address):
    made = DealerLink(address, keys=None, max_message_bytes=LIMIT)
    yield made
    made.close(0)


def received(link, number, limit_s=60.0):
    """The first `number` frames that arrive within the limit."""
    found = []
    deadline = time.monotonic() + limit_s
    while len(found) < number and time.monotonic() < deadline:
        link.socket.poll(20)
        found += [(r.peer, bytes(r.frame)) for r in link.receive(number - len(found))]
    return found


def test_the_baseline_pub_loses_what_comes_before_the_subscription(tmp_path):
    """B22 (a): "connected" is not "subscribed"; what is sent before the subscription is lost, without an error.

    Sent first here, for a subscription made before may win the race on a busy machine.
    """
    with zmq.Context() as context, context.socket(zmq.PUB) as pub, context.socket(zmq.SUB) as sub:
        pub.linger = sub.linger = 0
        pub.bind(f"ipc://{tmp_path}/pub.sock")
        sub.connect(f"ipc://{tmp_path}/pub.sock")
        for number in range(1000):
            pub.send(b"%d" % number)
        sub.subscribe(b"")
        assert wait_for(lambda: pub.send(b"late") or sub.poll(20), 60, "the subscription")
        while sub.poll(300):
            assert sub.recv() == b"late"


def test_the_baseline_pub_drops_at_its_high_water_mark_without_an_error(tmp_path):
    """B23: all sends return, most of 20,000 messages are gone."""
    with zmq.Context() as context, context.socket(zmq.PUB) as pub, context.socket(zmq.SUB) as sub:
        pub.linger = sub.linger = 0
        pub.sndhwm = sub.rcvhwm = 10
        pub.bind(f"ipc://{tmp_path}/pub.sock")
        sub.connect(f"ipc://{tmp_path}/pub.sock")
        sub.subscribe(b"")
        assert wait_for(lambda: pub.send(b"hello") or sub.poll(20), 60, "the subscription")
        for number in range(20_000):
            pub.send(number.to_bytes(4, "little") + bytes(10_000))
        arrived = 0
        while sub.poll(300):
            sub.recv()
            arrived += 1
    assert arrived < 10_000


def test_ours_says_so_when_nobody_is_connected(dealer):
    assert not dealer.send(b"x")
    assert dealer.dropped == 1


def test_ours_says_so_when_the_reader_stalls_and_holds_no_more_than_its_bound(router, dealer):
    wait_for(lambda: dealer.send(b"first"), 60, "a connection")
    frame = bytes(100_000)
    refused = sum(not dealer.send(frame) for _ in range(3000))
    taken = 3000 - refused
    assert refused > 2000
    assert taken < 4 * QUEUE_FRAMES + 64, "queues of both sides and the kernel's buffers"
    arrived = received(router, taken + 1)
    assert len(arrived) == taken + 1, "what was taken arrives"


def test_frames_come_in_order_and_a_peer_that_left_is_told(router, dealer, address):
    wait_for(lambda: dealer.send(b"0"), 60, "a connection")
    for number in range(1, 10):
        assert dealer.send(b"%d" % number)
    arrived = received(router, 10)
    assert [frame for _, frame in arrived] == [b"%d" % number for number in range(10)]
    peer = arrived[0][0]
    assert router.send(peer, b"answer")
    assert wait_for(lambda: list(dealer.receive(1)), 60, "the answer") == [[b"answer"]]
    assert not router.send(b"nobody", b"x")
    dealer.socket.disconnect(address.endpoint)

    def left():
        list(router.receive(1))  # ZeroMQ does its own work as its sockets are used
        dealer.socket.poll(1)
        return not router.send(peer, b"x")

    wait_for(left, 60, "the peer's leaving is noticed")
    assert router.dropped >= 2


def test_two_peers_are_told_apart_without_names_of_their_own(router, address):
    links = [DealerLink(address, keys=None, max_message_bytes=LIMIT) for _ in range(2)]
    for number, link in enumerate(links):
        wait_for(lambda link=link, number=number: link.send(b"%d" % number), 60, "a connection")
    peers = {peer for peer, _ in received(router, 2)}
    assert len(peers) == 2
    for link in links:
        link.close(0)


def test_a_new_connection_is_noticed_also_after_a_restart_of_the_other_side(dealer, address):
    first = RouterLink(address, field="bind", keys=None, max_message_bytes=LIMIT)
    wait_for(dealer.connected_anew, 60, "the first connection")
    assert not dealer.connected_anew()
    first.close()
    second = RouterLink(address, field="bind", keys=None, max_message_bytes=LIMIT)
    wait_for(dealer.connected_anew, 60, "the next one")
    second.close()


def test_a_socket_file_of_another_process_is_left_alone(address):
    """An old rebalancer that ends late does not take the new one's address with it."""
    old = RouterLink(address, field="bind", keys=None, max_message_bytes=LIMIT)
    new = RouterLink(address, field="bind", keys=None, max_message_bytes=LIMIT)
    old.close()
    assert address.ipc_path.is_socket()
    link = DealerLink(address, keys=None, max_message_bytes=LIMIT)
    wait_for(lambda: link.send(b"x"), 60, "the new one is reached")
    link.close(0)
    new.close()
    assert not address.ipc_path.exists()
    assert list(address.ipc_path.parent.iterdir()) == []


def test_closing_never_hangs_on_a_peer_that_does_not_read(router, dealer):
    wait_for(lambda: dealer.send(b"x"), 60, "a connection")
    peer = received(router, 1)[0][0]
    while router.send(peer, bytes(1_000_000)):
        pass
    began = time.monotonic()
    router.close()
    assert time.monotonic() - began < 3.0 * patience()
