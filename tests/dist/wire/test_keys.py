"""Keys that are none are refused by name; a link lets go of all it holds and takes no frame above its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zmq

from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.keys import ClientKeys, ServerKeys, ZapHandler
from evenroute.dist.wire.link import DealerLink, RouterLink
from support.control_plane import wait_for


def pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@pytest.mark.parametrize("bad", ["", "x" * 39, '"' * 40, " " * 40, "é" * 40, "~" * 40, None, b"x" * 40])
@pytest.mark.parametrize("field", ["public_key", "secret_key", "server_public_key"])
def test_a_key_is_40_characters_of_z85(field: str, bad: Any) -> None:
    public, secret = pair()
    good = {"role": "rank", "public_key": public, "secret_key": secret, "server_public_key": public}
    ClientKeys(**good)
    with pytest.raises(ValueError, match=f"^{field} must be 40 characters of Z85, found ") as refused:
        ClientKeys(**{**good, field: bad})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("role", ["root", "", "Rank", None, 3])
def test_a_known_key_has_one_of_the_roles(role: Any) -> None:
    ServerKeys(*pair(), roles={b"k" * 32: "viewer"})
    with pytest.raises(ValueError, match=r"^roles=.* is not one of rank, operator, viewer$"):
        ServerKeys(*pair(), roles={b"k" * 32: role})


def test_a_closed_handler_holds_no_socket() -> None:
    with zmq.Context() as context:
        handler = ZapHandler(context, ServerKeys(*pair(), roles={}))
        handler.close()
        assert handler.socket.closed


def test_a_frame_above_the_bound_never_arrives(tmp_path: Path) -> None:
    address = parse_address(f"ipc://{tmp_path}/link.sock", field="bind")
    router = RouterLink(address, field="bind", keys=None, max_message_bytes=10_000)
    dealer = DealerLink(address, keys=None, max_message_bytes=10_000)
    try:
        wait_for(lambda: dealer.send(b"x" * 10_000), 60, "a connection")
        sizes: list[int] = []

        def received() -> bool:
            router.socket.poll(20)
            sizes.extend(len(found.frame) for found in router.receive(10))
            return sizes != []

        wait_for(received, 60, "a frame of the largest size")
        assert sizes == [10_000]
        sizes.clear()
        wait_for(lambda: dealer.send(b"x" * 10_001), 60, "a connection")
        wait_for(lambda: dealer.send(b"after") and received(), 60, "a frame after the one that is too large")
        assert set(sizes) == {len(b"after")}
    finally:
        dealer.close(0)
        router.close()
