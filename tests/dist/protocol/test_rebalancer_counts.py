"""The rebalancer and the windows of counts: stored once, acknowledged, gaps reported."""

from evenroute.dist.protocol.types import Outgoing
from evenroute.dist.wire.messages import (
    Ack,
    Down,
    Refusal,
)
from support.protocol_helpers import (
    JOB,
    RUN,
    rank_core,
    replace,
    window_of,
)
from support.protocol_loop import running


def messages(outgoing: list[Outgoing]) -> list[Down]:
    """Without the peers."""
    return [item.message for item in outgoing]


# ------------------------------------------------------------------------------------------ counts


def test_a_window_is_stored_once_and_acknowledged_each_time() -> None:
    loop = running()
    for _ in range(3):
        (item,) = loop.core.receive(0, window_of(1), loop.now)
        assert item == Outgoing(0, Ack(RUN, loop.core.epoch, 1))
    assert [window.seq for window in loop.store.windows] == [1]
    assert (loop.core.counters.windows_stored, loop.core.counters.windows_duplicate) == (1, 2)


def test_sequence_numbers_are_read_from_the_store_not_from_this_life() -> None:
    loop = running()
    loop.core.receive(0, window_of(1), loop.now)
    again = running(loop.store, ranks=loop.ranks)
    (item,) = again.core.receive(0, window_of(1), again.now)
    assert isinstance(item.message, Ack)
    assert len(loop.store.windows) == 1


def test_windows_of_a_batch_are_stored_together_and_each_is_answered_to_its_sender() -> None:
    loop = running()
    out = loop.core.receive_windows([(0, window_of(1)), (1, window_of(1, rank=1)), (0, window_of(1))])
    assert [item.peer for item in out] == [0, 1, 0]
    assert len(loop.store.windows) == 2


def test_a_window_that_can_not_be_stored_is_not_acknowledged() -> None:
    loop = running()
    loop.store.failing = True
    assert loop.core.receive(0, window_of(1), loop.now) == []
    loop.store.failing = False
    assert len(loop.core.receive(0, window_of(1), loop.now)) == 1
    assert len(loop.store.windows) == 1


def test_a_gap_means_a_lost_store_and_is_reported_with_its_rank() -> None:
    loop = running()
    loop.core.receive(1, window_of(4, rank=1), loop.now)
    assert loop.core.counters.windows_missing == 3
    assert "rank 1: 3 windows before number 4" in loop.core.notices[-1].text


def test_windows_of_other_runs_and_impossible_ones_move_no_numbers() -> None:
    loop = running()
    assert loop.core.receive(0, window_of(1, run=RUN + 1), loop.now) == []
    for window in (replace(window_of(2), last_step=0), replace(window_of(1), counts=b"\0" * 8)):
        (item,) = loop.core.receive(0, window, loop.now)
        assert isinstance(item.message, Refusal)
        assert (item.message.what, item.message.number) == ("window", window.seq)
    assert loop.store.windows == []
    assert (loop.core.counters.windows_ignored, loop.core.counters.windows_rejected) == (1, 2)


def test_loads_say_per_rank_from_when_and_how_completely() -> None:
    loop = running()
    loop.core.receive(0, window_of(1, first=0, last=9), loop.now)
    loads = loop.core.loads()
    assert loads is not None
    assert (loads.complete, loads.coverage, loads.missing_ranks) == (False, 0.0, (1,))
    loop.core.receive(1, window_of(1, rank=1, first=2, last=9), loop.now)
    loads = loop.core.loads()
    assert loads is not None
    assert (loads.complete, loads.coverage, loads.tokens) == (True, 0.8, 16)
    assert loads.counts[:, 0].tolist() == [32, 32, 32]
    assert [(rank.rank, rank.first_step, rank.last_step) for rank in loads.ranks] == [(0, 0, 9), (1, 2, 9)]


def test_a_hole_makes_the_loads_incomplete_until_a_new_interval_begins() -> None:
    loop = running()
    for rank in (0, 1):
        loop.core.receive(rank, window_of(1, rank=rank, first=0, last=9), loop.now)
    loop.core.receive(1, window_of(3, rank=1, first=20, last=29), loop.now)
    loads = loop.core.loads()
    assert loads is not None
    assert (loads.complete, loads.ranks[1].num_missing) == (False, 1)
    loop.core.clear_loads()
    for rank, seq in ((0, 2), (1, 4)):
        loop.core.receive(rank, window_of(seq, rank=rank, first=30, last=39), loop.now)
    loads = loop.core.loads()
    assert loads is not None
    assert loads.complete
    assert loads.tokens == 16


def test_only_rank_0_is_expected_where_all_ranks_see_the_same_tokens() -> None:
    job = replace(JOB, shared_counts=True)
    loop = running(ranks=[rank_core(0, job), rank_core(1, job)])
    loop.core.receive(0, window_of(1), loop.now)
    (item,) = loop.core.receive(1, window_of(1, rank=1), loop.now)
    assert isinstance(item.message, Refusal)
    loads = loop.core.loads()
    assert loads is not None
    assert loads.complete
