"""Orders and names from outside: refused, or harmless."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import msgspec
import pytest

from evenroute.dist.wire.control import (
    RecordStart,
    StatusRequest,
    decode_order,
    decode_request,
    encode_control,
)
from evenroute.dist.wire.messages import MessageError
from evenroute.dist.wire.recording import CONTROL_PROTOCOL, RecordOrder
from support.pass_rank import EPOCH, order, recorder_in


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "/etc/x", ".hidden", "a b", "a\n", "x" * 65, "a\0b", "..", "-x"]
)
def test_a_name_is_never_a_path(name: str) -> None:
    frame = msgspec.msgpack.encode({**msgspec.to_builtins(order()), "name": name})
    with pytest.raises(MessageError, match="name"):
        decode_order(frame)
    if name:
        with pytest.raises(MessageError, match="name"):
            decode_request(encode_control(RecordStart(mode="per_token", name=name)))


def test_control_messages_of_another_version_are_named() -> None:
    for frame, decode in (
        (encode_control(StatusRequest(protocol=CONTROL_PROTOCOL - 1)), decode_request),
        (encode_control(StatusRequest(protocol=CONTROL_PROTOCOL + 1)), decode_request),
        (msgspec.msgpack.encode({"type": "new-thing", "protocol": CONTROL_PROTOCOL + 1}), decode_request),
        (encode_control(msgspec.structs.replace(order(), protocol=CONTROL_PROTOCOL + 1)), decode_order),
        (
            msgspec.msgpack.encode({**msgspec.to_builtins(order()), "mood": "new", "protocol": 9}),
            decode_order,
        ),
    ):
        with pytest.raises(MessageError, match=rf"control protocol: found \d, expected {CONTROL_PROTOCOL}"):
            decode(frame)


ODD = [
    0,
    1,
    -1,
    2**62,
    2**63,
    "",
    "..",
    "/",
    "a/../../b",
    "per_pass",
    "stat",
    True,
    None,
    1.5,
    b"x",
    "x\n",
    "Z" * 64,
    [],
    {},
]


def damaged(rng: random.Random, good: RecordOrder) -> bytes:
    """A frame with a few bytes changed, or with a field of another value."""
    if rng.random() < 0.5:
        fields = msgspec.to_builtins(good)
        fields[rng.choice(list(fields))] = rng.choice(ODD)
        return msgspec.msgpack.encode(fields)
    data = bytearray(encode_control(good))
    for _ in range(rng.randint(1, 2)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 0x2E, 0x2F, 0x7F, 0x80, 0xC0, 0xFF))
        elif kind == 2:
            data[at:at] = rng.choice((b"../", b"/", b"\0", b"\xff"))
        else:
            del data[at]
    return bytes(data)


def test_damaged_orders_are_refused_or_stay_within_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    rng = random.Random(0)
    good = [
        order(number, mode=mode, name=name, running=running)
        for number, mode, name, running in itertools.product(
            (5, 6), ("per_pass", "per_token"), ("x", "a.b-c_d"), (True, False)
        )
    ]
    recorder, decoded = recorder_in(folder), 0
    lines: list[str] = []
    for _ in range(4000):
        try:
            found = decode_order(damaged(rng, rng.choice(good)))
        except MessageError as error:
            lines.append(str(error))
            continue
        decoded += 1
        if decoded % 10 == 0:  # every recording is a thread and a file
            recorder.order(found, EPOCH)
            recorder.due(0.0)
    assert decoded > 100
    assert not any("\n" in line for line in lines)
    recorder.close(10.0)
    for thread in threading.enumerate():
        if thread.name == "evenroute-passes":
            thread.join(10)
    assert {path.name for path in tmp_path.iterdir()} == {"records"}
    assert list(folder.iterdir())
    assert all(path.name.endswith("-rank1.evd") for path in folder.iterdir())
