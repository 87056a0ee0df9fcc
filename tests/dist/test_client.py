"""What scripts get wrong of clients, keys, settings: one ValueError of one line; none is sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import zmq

from evenroute.dist import client
from evenroute.dist.config import load_config
from evenroute.dist.rebalancer.process import run_rebalancer
from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.control import RecordRead, RecordStart, StatusRequest
from evenroute.dist.wire.keys import ClientKeys, ServerKeys, generate_keys, load_client_keys, load_server_keys
from support.dist_wrong_use import refused

NOBODY = "ipc:///tmp/nobody.sock"
NOT_PATHS = (None, 3, True, 1.5, ["x"], b"x", {}, "", "a\0b", "\ud800")
ADDRESSES = (
    *((bad, "address must be text, found") for bad in (None, 3, True, 1.5, ["tcp://h:1"], b"tcp://h:1", Path("/x"))),
    *((bad, "address: | expected ipc://PATH or tcp://HOST:PORT") for bad in ("", "x", "tcp://h", "x" * 5000)),
    ("ipc://a\0b", "address must be a path, found 'a\\x00b'"),
    ("ipc://\ud800", "address must be text, found 'ipc://\\ud800'"),
    ("ipc://" + "x" * 5000, "address: path of 5000 bytes found, at most 107 allowed"),
    ("tcp://h:" + "9" * 5000, "address: | expected ipc://PATH or tcp://HOST:PORT"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "Context", lambda *_: pytest.fail("a socket was made"))


# -------------------------------------------------------------------------------------------- clients


def ask_all(address: Any, **options: Any) -> None:
    """`ControlClient` is the way in of all others."""
    words = options.pop("words")
    refused(words, lambda: client.ControlClient(address, **options))
    refused(words, lambda: client.query_status(address, **options))


@pytest.mark.parametrize(("bad", "words"), ADDRESSES)
def test_addresses(bad: Any, words: str) -> None:
    ask_all(bad, words=words)
    refused(words, lambda: parse_address(bad, field="address"))


@pytest.mark.parametrize("bad", [None, "5", True, [5.0], math.nan, math.inf, -1, 0, 3601, 10**400, {}])
def test_time_limits(bad: Any) -> None:
    ask_all(NOBODY, timeout_s=bad, words="timeout")


@pytest.mark.parametrize("bad", [bad for bad in NOT_PATHS if bad is not None])
def test_key_files(bad: Any) -> None:
    ask_all(NOBODY, keys=bad, words="keys must be a path, found")


def asking(request: Any) -> Any:
    """A client without a socket: what it would send is a failure."""
    mine = client.ControlClient.__new__(client.ControlClient)
    mine._timeout_s = 1.0
    return mine.ask(request)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        *(
            (bad, "request must be one of StatusRequest, LayerRequest, TraceRequest, RecordStart")
            for bad in (None, "status", 3, {}, StatusRequest)
        ),
        (RecordStart(mode="per-token"), "request RecordStart: | mode"),  # type: ignore[arg-type]
        (RecordStart(mode=None), "request RecordStart: | mode"),  # type: ignore[arg-type]
        (RecordStart(name="a/b"), "request RecordStart: | name"),
        (RecordStart(name="\ud800"), "request RecordStart: "),
        (RecordStart(per_rank=1), "request RecordStart: | per_rank"),  # type: ignore[arg-type]
        (RecordStart(name=object()), "request RecordStart: "),  # type: ignore[arg-type]
        (RecordRead(offset=-1), "request RecordRead: | offset"),
        (RecordRead(offset=1 << 80), "request RecordRead: "),
        (RecordRead(rank=65536), "request RecordRead: | rank"),
        (StatusRequest(protocol=99), "request StatusRequest: control protocol: found 99"),
    ],
)
def test_requests_that_no_rebalancer_reads_are_not_sent(request_: Any, words: str) -> None:
    refused(words, lambda: asking(request_))


# ----------------------------------------------------------------------------------------------- keys

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


@pytest.mark.parametrize("bad", NOT_PATHS)
def test_files_of_keys(bad: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused("folder must be a path, found", lambda: generate_keys(bad))
    refused("keys must be a path, found", lambda: load_client_keys(bad))
    refused("keys must be a path, found", lambda: load_server_keys(bad))
    assert not list(tmp_path.iterdir())


def test_files_of_keys_named_by_text(tmp_path: Path) -> None:
    assert all(path.exists() for path in generate_keys(str(tmp_path / "keys")))
    assert load_client_keys(str(tmp_path / "keys/rank.toml")).role == "rank"
    assert len(load_server_keys(str(tmp_path / "keys")).roles) == 3


@pytest.mark.parametrize("name", ["public_key", "secret_key", "server_public_key"])
@pytest.mark.parametrize("bad", [None, 3, "", KEY[:-1], KEY + "x", '"' * 40, KEY.encode(), [KEY]])
def test_keys_are_keys_and_never_printed(name: str, bad: Any) -> None:
    good = {"role": "rank", "public_key": KEY, "secret_key": KEY, "server_public_key": KEY}
    ClientKeys(**good)
    with pytest.raises(ValueError) as caught:
        ClientKeys(**{**good, name: bad})
    assert f"{name} must be 40 characters of Z85, found" in str(caught.value)
    assert KEY[:20] not in str(caught.value)
    if name != "server_public_key":
        mine = {"public_key": KEY, "secret_key": KEY, "roles": {}, name: bad}
        refused(f"{name} must be 40 characters of Z85, found", lambda: ServerKeys(**mine))


def test_roles() -> None:
    for bad in (None, 3, ["rank"], "root"):
        refused("role= | is not one of rank, operator, viewer", lambda b=bad: ClientKeys(b, KEY, KEY, KEY))
        refused("roles= | is not one of rank", lambda b=bad: ServerKeys(KEY, KEY, {bytes(32): b}))
    refused("roles must be a dict of keys and their roles, found a list", lambda: ServerKeys(KEY, KEY, []))  # type: ignore[arg-type]
    refused(
        "roles must be of keys of 32 bytes, found a bytes of 3",
        lambda: ServerKeys(KEY, KEY, {b"abc": "rank"}),
    )


# ------------------------------------------------------------------------------------------- settings


def test_the_rebalancer_takes_its_settings() -> None:
    for bad in (None, "x", {}, load_config):
        refused("config must be a RebalancerConfig, found", lambda b=bad: run_rebalancer(b))
    refused(
        "take_over must be True or False, found 1", lambda: run_rebalancer(load_config(None), take_over=1)
    )  # type: ignore[arg-type]
