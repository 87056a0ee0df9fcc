"""Small promises of the cores, each seen by hand: when something is sent again, what is counted, what begins anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evenroute.dist.protocol.job_start import JobStartConfig, JobStartCore
from evenroute.dist.protocol.store import JobRow, StoreError
from evenroute.dist.protocol.stream import RankStream
from evenroute.dist.protocol.view import RunView
from evenroute.dist.wire.messages import Ack, RankStatus, Token
from support.memory_store import MemoryStore
from support.protocol_helpers import (
    JOB,
    RUN,
    placement_of,
    rank_core,
    replace,
    status_of,
    window_of,
)
from support.protocol_loop import Loop, running

COUNTS = np.ones((JOB.num_layers, JOB.num_logical_experts), np.int64)


def test_a_snapshot_is_asked_for_again_once_a_resend_time() -> None:
    core = JobStartCore(
        JOB, placement_of(), JobStartConfig(resend_s=1.0, time_limit_s=60.0), lambda bits: bits
    )
    core.begin(100.0)
    sent = [now for now in np.arange(100.0, 104.0, 0.25).tolist() if core.tick(now)]
    assert sent == [101.0, 102.0, 103.0]


def test_a_stream_counts_each_acknowledgement_and_has_nothing_unsent_after_it() -> None:
    stream = RankStream(run=RUN, rank=0, resend_s=1.0)
    for number in (1, 2, 3):
        stream.add(number, number, 8, COUNTS, 0.0)
        assert stream.unsent().in_flight_tokens == 8
        stream.acknowledged(RUN, number, 0.0)
        assert stream.windows_acknowledged == number
        unsent = stream.unsent()
        assert (unsent.in_flight_tokens, unsent.in_flight_steps) == (0, None)
        assert (unsent.open_tokens, unsent.open_steps) == (0, None)
    assert (stream.windows_refused, stream.tokens_refused) == (0, 0)


def test_the_range_of_live_keys_goes_from_the_lowest_to_the_highest_layer() -> None:
    keys = [(5, 3), (5, 1), (4, 9)]
    status = status_of(rank_core(), live_keys=np.array(keys, "<i8").tobytes())
    view = RunView(RUN, JOB, MemoryStore())  # type: ignore[arg-type]
    assert view.live_range() == ((0, 0), (0, 0))
    view.add(status, 0, 1.0)
    for _ in range(2):  # the second time as it was remembered
        assert view.key_range(status) == ((4, 9), (5, 3))
    other = replace(status, live_keys=np.array([(6, 1)] * 3, "<i8").tobytes())
    assert view.key_range(other) == ((6, 1), (6, 1))
    assert view.live_range() == ((4, 9), (5, 3))


class NotingStore(MemoryStore):
    """Notes for which runs a shape was kept; may fail at that."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[int] = []
        self.failures = 0

    def set_job(self, run: int, job: JobRow, *, epoch: int, now: float) -> None:
        super().set_job(run, job, epoch=epoch, now=now)
        if self.failures:
            self.failures -= 1
            raise StoreError("store: disk full")
        self.kept.append(run)


def test_the_shape_of_a_run_is_kept_before_its_first_window_and_once() -> None:
    store = NotingStore()
    loop = running(store)
    store.failures = 1
    assert loop.core.receive(0, window_of(1), loop.now) == []  # nothing is acknowledged
    assert (store.kept, store.windows) == ([], [])
    for seq in (1, 2, 3):
        (item,) = loop.core.receive(0, window_of(seq), loop.now)
        assert isinstance(item.message, Ack)
    assert store.kept == [RUN]
    take_over(loop, RUN + 1)
    loop.core.receive("x", window_of(1, run=RUN + 1), loop.now)
    assert store.kept == [RUN, RUN + 1]


def take_over(loop: Loop, run: int) -> None:
    """Another run becomes the current one: its rank 0 is heard."""
    status = replace(rank_core(0).status(), run=run)
    (answer,) = loop.core.receive("x", status, loop.now)
    assert isinstance(answer.message, Token)
    loop.core.receive("x", replace(status, token=answer.message.token), loop.now)
    assert loop.core.view is not None
    assert loop.core.view.run == run


def test_loads_count_a_ranks_windows_tokens_and_last_number() -> None:
    loop = running()
    for seq in (1, 2, 3):
        loop.core.receive(0, window_of(seq, first=seq, last=seq), loop.now)
    loads = loop.core.loads()
    assert loads is not None
    (rank,) = loads.ranks
    assert (rank.num_windows, rank.tokens, rank.last_seq, rank.num_missing) == (3, 24, 3, 0)


def test_a_first_placement_that_was_due_for_another_run_is_not_published_for_the_next() -> None:
    loop = Loop()
    for _ in range(2):  # all ranks are heard; their rows are asked for and have not come
        for peer, rank in enumerate(loop.ranks):
            for item in loop.core.receive(peer, rank.status(), loop.now):
                if isinstance(item.message, Token):
                    rank.receive(item.message, loop.now)
    assert loop.core.newest is None
    other = rank_core(0)
    take_over(loop, RUN + 1)
    loop.core.receive("x", replace(other.rows(), run=RUN + 1), loop.now)
    assert loop.core.has_view()
    assert loop.core.tick(loop.now + 5.0) == []
    assert loop.core.newest is None


@pytest.mark.parametrize("message", ["status", "window"])
def test_a_run_that_is_not_the_current_one_counts_nothing(message: Any) -> None:
    loop = running()
    before = loop.core.loads()
    if message == "status":
        (answer,) = loop.core.receive("x", replace(rank_core(0).status(), run=RUN + 1), loop.now)
        assert isinstance(answer.message, Token)
        assert loop.core.counters.statuses_of_other_runs >= 1
    else:
        assert loop.core.receive(0, window_of(1, run=RUN + 1), loop.now) == []
        assert loop.core.counters.windows_ignored == 1
    after = loop.core.loads()
    assert before is not None
    assert after is not None
    assert (after.tokens, after.ranks) == (before.tokens, before.ranks)
    assert all(isinstance(rank.status(), RankStatus) for rank in loop.ranks)
