"""Every refused message has an answer that ends it; one bad item harms nobody else; a rank has one voice."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from evenroute.dist.protocol.job_start import JobStartConfig, JobStartCore
from evenroute.dist.protocol.types import EPOCH_RANDOM_BITS, MAX_LIVES_AHEAD, Phase
from evenroute.dist.wire.messages import (
    PROTOCOL_VERSION,
    Ack,
    MessageError,
    Refusal,
    RowsRequest,
    decode_down,
    encode,
)
from evenroute.dist.wire.received import decode_up, refusal
from support.memory_store import MemoryStore
from support.protocol_helpers import JOB, RUN, placement_of, rank_core, replace, status_of, window_of
from support.protocol_loop import rebalancer, running

COUNTS = np.ones((JOB.num_layers, JOB.num_logical_experts), np.int64)


def kinds(out: list[Any]) -> list[tuple[type, int]]:
    """Kind of each answer and the window it is about."""
    return [(type(i.message), getattr(i.message, "seq", getattr(i.message, "number", 0))) for i in out]


def test_a_refused_window_is_answered_once_dropped_and_the_next_one_is_stored() -> None:
    loop = running()
    rank = loop.ranks[0]
    (bad,) = rank.add_counts(0, 3, 8, COUNTS[:, :1], loop.now)  # another job's width
    assert rank.add_counts(4, 7, 4, COUNTS, loop.now) == []  # waits for the first
    out = loop.core.receive(0, bad, loop.now)
    assert kinds(out) == [(Refusal, 1)]
    assert loop.core.view is not None
    assert "window 1 refused" in loop.core.view.ranks[0].trouble
    loop.send(out)
    assert loop.core.view.ranks[0].trouble == ""
    assert [window.seq for window in loop.store.windows] == [2]
    assert rank.stream.in_flight is None
    assert (rank.stream.windows_refused, rank.stream.tokens_refused) == (1, 8)
    assert len(rank.notices) == 1
    assert "window.counts" in rank.notices[0]
    assert loop.core.counters.windows_missing == 1  # what was refused is not in the store, and said so


def test_a_rank_says_a_reason_once_however_often_it_comes() -> None:
    rank = rank_core()
    for number in range(1, 20):
        rank.receive(Refusal(RUN, 0, "status", number, "job refused: another model"), 1.0)
    rank.receive(Refusal(RUN, 0, "status", 1, "something else"), 1.0)
    assert len(rank.notices) == 2


def test_a_refusal_of_another_window_or_of_a_fenced_rebalancer_drops_nothing() -> None:
    rank = rank_core(epoch=5)
    (window,) = rank.add_counts(0, 3, 8, COUNTS, 0.0)
    for answer in (
        Refusal(RUN, 5, "window", 2, "x"),
        Refusal(RUN, 4, "window", 1, "x"),
        Refusal(1, 5, "window", 1, "x"),
    ):
        rank.receive(answer, 0.0)
        assert rank.stream.in_flight is window
    rank.receive(Refusal(RUN, 5, "window", 1, "x"), 0.0)
    assert rank.stream.in_flight is None


def test_more_counts_than_announced_are_stored_and_flagged_with_rank_and_reason() -> None:
    loop = running()
    out = loop.core.receive(0, replace(window_of(1), tokens=1), loop.now)
    assert kinds(out) == [(Ack, 1)]
    assert loop.store.windows[0].counts.sum() == 16 * JOB.num_layers
    assert loop.core.counters.windows_over_announced == 1
    assert loop.core.view is not None
    assert "14 counts more" in loop.core.view.ranks[0].trouble


def test_a_bad_window_takes_none_of_its_batch_along() -> None:
    loop = running()
    bad = replace(window_of(1), counts=b"")
    out = loop.core.receive_windows([(0, bad), (1, window_of(1, rank=1)), (0, window_of(2))])
    assert sorted(kinds(out), key=str) == sorted([(Refusal, 1), (Ack, 1), (Ack, 2)], key=str)


@pytest.mark.parametrize("error", [OverflowError("Python int too large"), ValueError("another shape")])
def test_a_window_that_the_store_can_not_take_is_refused_alone(error: Exception) -> None:
    class Choosy(MemoryStore):
        def add_windows(self, windows: Any, **other: Any) -> Any:
            if any(window.last_step == 666 for window in windows):
                raise error
            return super().add_windows(windows, **other)

    loop = running(Choosy())
    bad = window_of(1, last=666)
    for _ in range(2):  # again and again
        out = loop.core.receive_windows([(1, window_of(1, rank=1)), (0, bad)])
        assert kinds(out) == [(Ack, 1), (Refusal, 1)]
    assert [(window.rank, window.seq) for window in loop.store.windows] == [(1, 1)]


@pytest.mark.parametrize(
    "fields", [{"last_step": 2**44}, {"first_step": 2**62 - 1}, {"seq": 2**62 - 1}, {"seq": 12}]
)
def test_steps_and_numbers_that_no_job_reaches_are_no_window(fields: dict[str, int]) -> None:
    window = replace(window_of(1, last=10), **fields)
    with pytest.raises(MessageError, match=r"seq|step"):
        decode_up(encode(window))


def test_sums_stop_instead_of_overflowing() -> None:
    loop = running()
    counts = np.full((JOB.num_layers, JOB.num_logical_experts), 2**46, "<i8").tobytes()
    for seq in range(1, 2**12):
        loop.core.receive(0, replace(window_of(seq), counts=counts), loop.now)
    loads = loop.core.loads()
    assert loads is not None
    assert loads.counts.min() == 2**46 * (2**12 - 1)
    assert loop.core.windows.loads is not None
    for _ in range(2**17):
        loop.core.windows.loads.add_counts(np.frombuffer(counts, "<i8").reshape(COUNTS.shape))
    assert loop.core.windows.loads.view().counts.max() == 2**62


# ------------------------------------------------------------------------------------------- one voice


def test_windows_rows_and_statuses_of_a_stranger_for_a_rank_change_nothing() -> None:
    loop = running()
    stranger = rank_core(1)
    assert loop.core.receive("x", window_of(2**20, rank=1, last=2**30), loop.now) == []
    (item,) = loop.core.receive("x", stranger.status(), loop.now)
    assert isinstance(item.message, Refusal)
    assert "another peer speaks for this rank" in item.message.reason
    assert loop.core.receive("x", window_of(1, rank=1), loop.now) == []
    assert loop.core.receive("x", loop.ranks[1].rows(), loop.now) == []
    assert loop.store.windows == []
    assert kinds(loop.core.receive(1, window_of(1, rank=1), loop.now)) == [(Ack, 1)]


def test_a_rank_keeps_its_voice_over_a_new_connection() -> None:
    loop = running()
    rank = loop.ranks[1]
    (window,) = rank.add_counts(0, 3, 8, COUNTS, loop.now)
    assert loop.core.receive("new", window, loop.now) == []  # not known yet
    out = [
        item for message in rank.reconnected(loop.now) for item in loop.core.receive("new", message, loop.now)
    ]
    assert (Ack, 1) in kinds(out)


# ---------------------------------------------------------------------------------------------- fences


def test_a_fence_out_of_reach_neither_ends_a_life_nor_reaches_the_store() -> None:
    loop = running()
    far = (2**62 - 1, loop.core.epoch + ((MAX_LIVES_AHEAD + 1) << EPOCH_RANDOM_BITS))
    for fence in far:
        for run in (RUN, RUN + 1):
            (item,) = loop.core.receive(0, status_of(loop.ranks[0], run=run, fence=fence), loop.now)
            assert isinstance(item.message, Refusal)
    assert loop.core.phase is Phase.SERVING
    # A life that waits does not count it either.
    waiting = rebalancer(loop.store)
    waiting.receive("x", status_of(loop.ranks[0], run=RUN + 1, fence=far[0]), 0.0)
    again = running(loop.store, ranks=loop.ranks)
    assert again.core.epoch >> EPOCH_RANDOM_BITS == (loop.core.epoch >> EPOCH_RANDOM_BITS) + 1


def test_a_strangers_fence_ends_a_life_only_once_the_job_is_not_heard() -> None:
    loop = running()
    stranger = status_of(rank_core(0), run=RUN + 1, fence=loop.core.epoch + (1 << EPOCH_RANDOM_BITS))
    assert loop.core.receive("x", stranger, loop.now) == []
    assert loop.core.phase is Phase.SERVING
    loop.core.receive("x", stranger, loop.now + loop.core.config.live_s + 1.0)
    assert loop.core.phase is Phase.ENDED


# --------------------------------------------------------------------------------------- other versions


def test_a_rank_of_another_protocol_version_is_told_both_numbers() -> None:
    plain = {"type": "status", "run": 5, "rank": 0, "protocol": PROTOCOL_VERSION - 1}
    frame = msgspec.msgpack.encode(plain)
    with pytest.raises(MessageError) as error:
        decode_up(frame)
    answer = encode(refusal(frame, str(error.value), epoch=3))
    told = decode_down(answer)
    assert isinstance(told, Refusal)
    assert (told.run, told.what) == (5, "status")
    expected = f"found protocol {PROTOCOL_VERSION - 1}, expected {PROTOCOL_VERSION}"
    assert expected in told.reason
    # A rank of version 1 does not know this message, but names the version in it.
    assert msgspec.msgpack.decode(answer)["protocol"] == PROTOCOL_VERSION


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"x" * 50, msgspec.msgpack.encode({"type": "z" * 99, "run": -5})]
)
def test_whatever_can_not_be_read_has_an_answer_that_can(frame: bytes) -> None:
    with pytest.raises(MessageError) as error:
        decode_up(frame)
    assert isinstance(decode_down(encode(refusal(frame, str(error.value) * 20, epoch=0))), Refusal)


def test_a_job_whose_request_is_refused_starts_on_its_own_and_says_why() -> None:
    drawn = iter((111, 222))
    core = JobStartCore(JOB, placement_of(), JobStartConfig(time_limit_s=2.0), lambda bits: next(drawn))
    core.begin(0.0)
    core.receive(Refusal(0, 9, "snapshot?", 222, "job refused: another model"))
    assert core.result(1.0) is None
    assert core.refused is not None
    assert "another model" in core.refused
    started = core.result(2.5)
    assert started is not None
    assert started.epoch == 0


def test_rows_that_do_not_fit_are_refused_with_their_reason() -> None:
    loop = running(ranks=[rank_core(0), rank_core(1)])
    rows = loop.ranks[0].rows()
    (item,) = loop.core.receive(0, replace(rows, placement=replace(rows.placement, num_nodes=2)), loop.now)
    assert isinstance(item.message, Refusal)
    assert item.message.what == "rows"
    assert not isinstance(item.message, RowsRequest)
