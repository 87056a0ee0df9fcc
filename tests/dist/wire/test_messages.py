"""Messages: what goes in comes out, all else is refused in one line."""

import pickle
from contextlib import suppress

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evenroute.dist.wire import messages as m
from evenroute.dist.wire import received as r
from evenroute.dist.wire.placement import pack_placement, unpack_placement
from support.protocol_helpers import (
    JOB,
    placement_message,
    placement_of,
    rank_core,
    replace,
    version_of,
    window_of,
    with_shares,
)

UPS = [
    rank_core().status(),
    window_of(1),
    rank_core().rows(),
    m.SnapshotRequest(run=0, nonce=5, job=JOB),
]
DOWNS = [
    placement_message(version_of((1, 2), seed=3)),
    m.Ack(1, 2, 3),
    m.Token(1, 0, 9),
    m.RowsRequest(1, 2),
    m.Snapshot(0, 2, 5),
    m.Snapshot(0, 2, 5, (1, 1), 7, pack_placement(placement_of(seed=1))),
]


@pytest.mark.parametrize("message", UPS, ids=lambda message: type(message).__name__)
def test_up_messages_survive_the_wire(message: m.Up) -> None:
    assert r.decode_up(m.encode(message)) == message


@pytest.mark.parametrize("message", DOWNS, ids=lambda message: type(message).__name__)
def test_down_messages_survive_the_wire(message: m.Down) -> None:
    assert m.decode_down(memoryview(m.encode(message))) == message


@pytest.mark.parametrize("message", [*UPS, *DOWNS], ids=lambda message: type(message).__name__)
def test_a_side_does_not_take_the_other_sides_messages(message: m.Up | m.Down) -> None:
    decode = m.decode_down if isinstance(message, m.Up) else r.decode_up
    with pytest.raises(m.MessageError, match="Invalid value"):
        decode(m.encode(message))


def test_the_largest_key_and_digest_are_taken_and_one_more_is_not() -> None:
    assert m.decode_down(m.encode(m.Ack(2**62 - 1, 2**62 - 1, 2**62 - 1))).epoch == 2**62 - 1
    with pytest.raises(m.MessageError, match="epoch"):
        m.decode_down(m.encode(m.Ack(1, 2**62, 1)))
    with pytest.raises(m.MessageError, match="epoch"):
        m.decode_down(m.encode(m.Ack(1, -1, 1)))


def test_unknown_fields_and_wrong_types_are_refused_with_their_path() -> None:
    plain = msgspec.to_builtins(m.Ack(1, 2, 3))
    with pytest.raises(m.MessageError, match="unknown field `colour`"):
        m.decode_down(msgspec.msgpack.encode({**plain, "colour": 1}))
    with pytest.raises(m.MessageError, match=r"Expected `int`, got `str` - at `\$\.seq`"):
        m.decode_down(msgspec.msgpack.encode({**plain, "seq": "3"}))


def test_frames_above_the_limit_are_refused_before_decoding() -> None:
    frame = m.encode(window_of(1))
    assert r.decode_up(frame, limit=len(frame))
    with pytest.raises(m.MessageError, match=f"found {len(frame)} bytes, allowed at most {len(frame) - 1}"):
        r.decode_up(frame, limit=len(frame) - 1)


def test_another_protocol_version_is_named_even_if_its_fields_are_new() -> None:
    plain = msgspec.to_builtins(m.SnapshotRequest(run=0, nonce=5, job=JOB, protocol=1))
    for fields in ({}, {"mood": "new"}):
        frame = msgspec.msgpack.encode({**plain, **fields})
        with pytest.raises(m.MessageError, match="protocol"):
            r.decode_up(frame)


def test_pickles_and_json_are_refused() -> None:
    for frame in (pickle.dumps({"a": 1}), b'{"type": "ack"}', b"", b"\xc1"):
        with pytest.raises(m.MessageError):
            r.decode_up(frame)
        with pytest.raises(m.MessageError):
            m.decode_down(frame)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rank": 2}, "status.rank"),
        ({"live_keys": b"\0" * 47}, "status.live"),
        ({"live_digests": b"\0" * 32}, "status.live"),
        ({"job": replace(JOB, num_slots=7)}, "job"),
        ({"job": replace(JOB, num_slots=10)}, "job"),
        ({"protocol": 7}, "protocol"),
    ],
)
def test_statuses_whose_parts_do_not_fit_each_other_are_refused(fields: dict[str, object], name: str) -> None:
    with pytest.raises(m.MessageError, match=name):
        r.decode_up(m.encode(replace(rank_core().status(), **fields)))


@pytest.mark.parametrize("field", ["held", "failed", "conflict", "refused", "live_keys"])
def test_a_fence_bounds_epochs_and_no_versions(field: str) -> None:
    """Also where the version is the larger number of the two."""

    def status(epoch: int) -> m.RankStatus:
        keys = np.tile(np.array([epoch, 900], "<i8"), JOB.num_layers).tobytes()
        return replace(
            rank_core().status(), fence=3, **{field: keys if field == "live_keys" else (epoch, 900)}
        )

    sent = status(3)
    assert r.decode_up(m.encode(sent)) == sent
    with pytest.raises(m.MessageError, match=r"status\.fence: found 3, below the epoch 4"):
        r.decode_up(m.encode(status(4)))


def test_costs_that_a_rank_does_not_send_are_none() -> None:
    sent = msgspec.to_builtins(m.RankCosts(run=1, rank=0, steps=5, step_s=0.1))
    short = {name: sent[name] for name in ("type", "run", "rank", "steps", "step_s")}
    found = r.decode_up(msgspec.msgpack.encode(short))
    assert isinstance(found, m.RankCosts)
    assert (found.lost_s, found.transfer_s, found.slots, found.slot_bytes) == (0.0, 0.0, 0, 0)


def _window_with(value: int, tokens: int = 8) -> m.RankWindow:
    counts = np.zeros((JOB.num_layers, JOB.num_logical_experts), "<i8")
    counts[1, 2] = value
    return replace(window_of(1, tokens=tokens), counts=counts.tobytes())


@pytest.mark.parametrize(
    ("window", "name"),
    [
        (_window_with(-1), "window.counts"),
        (_window_with(2**47), "window.counts"),
        (replace(window_of(1), counts=b"\0" * 8), "window.counts"),
        (replace(window_of(1), rank=2), "window.rank"),
        (replace(window_of(1), first_step=3), "window.last_step"),
    ],
)
def test_windows_with_impossible_shapes_or_counts_are_refused(window: m.RankWindow, name: str) -> None:
    with pytest.raises(m.MessageError, match=name):
        r.check_window(window, JOB)


def test_a_window_may_hold_fewer_counts_than_its_tokens_and_more_are_named() -> None:
    r.check_window(_window_with(0), JOB)
    r.check_window(_window_with(16), JOB)
    assert r.counts_above(_window_with(16), JOB) == 0
    full = np.full((JOB.num_layers, JOB.num_logical_experts), 5, "<i8")
    r.check_window(more := replace(window_of(1), counts=full.tobytes()), JOB)
    assert r.counts_above(more, JOB) == 4


def test_only_rank_0_sends_windows_of_a_job_whose_ranks_see_the_same_tokens() -> None:
    job = replace(JOB, shared_counts=True)
    r.check_window(window_of(1, rank=0), job)
    with pytest.raises(m.MessageError, match=r"window\.rank: found 1, allowed 0\.\.0"):
        r.check_window(window_of(1, rank=1), job)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_placements_come_out_with_the_same_digest(seed: int) -> None:
    for placement in (placement_of(seed=seed), with_shares(placement_of(seed=seed), 1)):
        wire = m.decode_down(m.encode(m.Snapshot(0, 2, 5, (1, 1), 7, pack_placement(placement)))).placement
        assert wire is not None
        assert unpack_placement(wire, JOB).digest() == placement.digest()


@pytest.mark.parametrize(
    "fields",
    [{"num_layers": 4}, {"num_slots": 8}, {"physical_to_logical": b"\0" * 72}, {"shares": b"\0" * 3}],
)
def test_placements_that_do_not_fit_the_job_are_refused_in_one_line(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError) as refused:
        unpack_placement(replace(pack_placement(placement_of()), **fields), JOB)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["physical_to_logical", "shares"])
def test_rows_with_one_part_of_a_wrong_length_are_refused(field: str) -> None:
    rows = rank_core().rows()
    placement = pack_placement(with_shares(placement_of(), 1))
    r.check_up(replace(rows, placement=placement), JOB)
    short = replace(placement, **{field: getattr(placement, field)[:-2]})
    with pytest.raises(m.MessageError, match=r"placement: found \d+ and \d+ bytes"):
        r.check_up(replace(rows, placement=short), JOB)


@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([m.encode(message) for message in [*UPS, *DOWNS]]),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 2000),
)
def test_mutated_frames_decode_or_raise_message_error(
    frame: bytes, edits: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(frame)
    for place, value in edits:
        data[place % len(data)] = value
    if cut < len(data):
        del data[cut:]
    for decode in (r.decode_up, m.decode_down):
        with suppress(m.MessageError):
            assert isinstance(decode(bytes(data)), m.Up | m.Down)


def test_errors_are_one_line_whatever_the_frame_names_its_fields() -> None:
    frame = msgspec.msgpack.encode({**msgspec.to_builtins(m.Ack(1, 2, 3)), "a\nb": 1})
    with pytest.raises(m.MessageError) as refused:
        m.decode_down(frame)
    assert "\n" not in str(refused.value)
