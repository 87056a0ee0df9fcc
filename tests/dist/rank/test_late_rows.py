"""Boundaries and passes are told apart: every row that was routed is counted as what it is, and covered once."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.rank.counts import CountTaker
from evenroute.dist.rank.thread import AgentThread
from evenroute.dist.wire.messages import JobShape
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters

L, E, K, W = 2, 4, 2, 4


class Side:
    """The counting half of an agent, without threads or sockets: windows end up in `windows`."""

    def __init__(self, *, window_steps: int = W) -> None:
        placement = Placement.initial(L, E, E, Topology(1))
        started = StartedJob(5, 0, (0, 0), JobShape(L, E, E, 1, top_k=K), pack_placement(placement))
        core = RankCore(started, rank=0, config=RankConfig())
        self.windows: list[tuple[int, int, int, Any]] = []
        core.add_counts = (
            lambda *window: (
                self.windows.append(  # type: ignore[method-assign]
                    (*window[:3], window[3].copy())
                )
                or []
            )
        )
        self.thread = AgentThread(
            core,
            threading.RLock(),
            None,
            silence_limit_s=9.0,
            recorder=lambda wake: None,  # type: ignore[arg-type, return-value]
        )
        self.counters = ExpertCounters(L, E, device="cpu")
        self.taker = CountTaker(
            self.counters, self.hand_over, reports=True, window_steps=window_steps, wait_limit_s=1.0
        )
        self.step = 0

    def hand_over(self, take: Any) -> None:
        self.thread._takes.append(take)
        self.thread._add_take(take)

    def begin_step(self, rows: int | None = None, *, count: bool = True) -> None:
        self.taker.begin_step(self.step, count=count, per_pass=False)
        self.step += 1
        if rows is not None:
            self.begin_pass(rows, count=count)

    def begin_pass(self, rows: int, *, count: bool = True) -> None:
        self.taker.begin_pass(self.step - 1, rows, count=count, per_pass=False)

    def route(self, rows: int) -> Any:
        """Rows that choose experts 0 and 1, 1 and 2, ... in every layer."""
        counts = np.zeros((L, E), np.int64)
        for row in range(rows):
            counts[:, row % E] += 1
            counts[:, (row + 1) % E] += 1
        self.counters.counts[:, 0] += self.counters.counts.new_tensor(counts)
        return counts

    def finish(self) -> None:
        assert self.taker.finish(self.step, 1.0)
        list(self.thread._end_partial())


PASSES = st.lists(
    st.tuples(st.integers(0, 5), st.booleans(), st.booleans()),  # rows, counted, announced
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, 5), PASSES), max_size=12))
def test_every_row_is_counted_as_the_last_call_before_it_said(steps: Any) -> None:
    side, wanted, counted = Side(), np.zeros((L, E), np.int64), False
    announced = routed = 0
    for count, rows, passes in steps:
        side.begin_step(rows, count=count)
        counted = count
        if rows is not None:
            counts = side.route(rows)
            wanted += counts * counted
            announced, routed = announced + rows * counted, routed + rows * counted
        for more, counts_too, told in passes:
            if told:
                side.begin_pass(more, count=counts_too)
                counted = counts_too
                announced += more * counted
            wanted += side.route(more) * counted
            routed += more * counted
    side.finish()
    assert sum((window[3] for window in side.windows), np.zeros((L, E), np.int64)).tolist() == wanted.tolist()
    first = 0
    for number, (start, last, tokens, counts) in enumerate(side.windows):
        assert start <= first <= last + 1, "a hole between windows"
        assert tokens * K >= int(counts.sum(axis=1).max())
        if number + 1 < len(side.windows):
            assert (last + 1) % W == 0, "a window that ends elsewhere than on the other ranks"
        first = last + 1
    assert announced <= sum(window[2] for window in side.windows) <= max(announced, 0) + routed


def test_a_rank_s_dummy_passes_leave_its_windows_whole() -> None:
    """Two of three passes are dummies: windows still cover all steps and end where the other ranks' do."""
    for late in (False, True):
        side = Side()
        for step in range(3 * W):
            dummy = step % 3 != 0
            if late:
                side.begin_step()
                side.begin_pass(1 if dummy else 4, count=not dummy)
            else:
                side.begin_step(1 if dummy else 4, count=not dummy)
            side.route(1 if dummy else 4)
        side.finish()
        assert [window[:2] for window in side.windows] == [(0, 3), (4, 7), (8, 11)]
        assert sum(window[2] for window in side.windows) == 4 * W
        assert sum(int(window[3].sum()) for window in side.windows) == 4 * W * K * L


def test_a_whole_window_of_dummies_is_covered_by_an_empty_one() -> None:
    side = Side()
    for _ in range(2 * W):
        side.begin_step(1, count=False)
        side.route(1)
    side.begin_step(2)
    side.route(2)
    side.finish()
    assert [(start, last, tokens) for start, last, tokens, _ in side.windows] == [
        (0, 3, 0),
        (4, 7, 0),
        (8, 8, 2),
    ]


def test_more_rows_than_announced_are_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Rows before the first step, and a layer that is routed three times a step, stop nothing."""
    side = Side(window_steps=1)
    side.route(100)
    with caplog.at_level(logging.WARNING, "evenroute.dist.agent"):
        for _ in range(6):
            side.begin_step(4)
            for _ in range(3):
                side.route(4)
        side.finish()
    assert sum(window[2] for window in side.windows) == 100 + 6 * 12
    assert sum(int(window[3].sum()) for window in side.windows) == (100 + 6 * 12) * K * L
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert (
        "rank 0: steps 0..0: 112 rows were routed in layer 0, 4 were announced; counted as routed" in said[0]
    )


def test_rows_that_nobody_announced_are_data_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    side = Side(window_steps=2)
    with caplog.at_level(logging.WARNING, "evenroute.dist.agent"):
        for _ in range(4):
            side.begin_step()
            side.route(5)
        side.finish()
    assert sum(window[2] for window in side.windows) == 20
    assert not caplog.records


def test_a_part_of_a_window_is_ended_at_the_close() -> None:
    side = Side(window_steps=100)
    side.begin_step(3)
    side.route(3)
    side.begin_pass(1, count=False)
    assert side.thread.waiting() == (3, (0, 0))
    assert not side.thread.drained()
    side.finish()
    assert side.thread.waiting() == (0, None)
    assert [window[:3] for window in side.windows] == [(0, 0, 3)]
