"""The rebalancer's life: start, runs, publication."""

import pytest

from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.types import Outgoing, Phase
from evenroute.dist.wire.messages import (
    Down,
    PlacementMessage,
    Refusal,
    RowsRequest,
    SnapshotRequest,
    Token,
)
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
from support.protocol_loop import CONFIG, INFO, rebalancer, running


def messages(outgoing: list[Outgoing]) -> list[Down]:
    """Without the peers."""
    return [item.message for item in outgoing]


# ---------------------------------------------------------------------------------- start and runs


def test_nothing_is_published_answered_or_acknowledged_before_all_ranks_were_heard() -> None:
    core = rebalancer()
    ranks = [rank_core(0), rank_core(1)]
    (answer,) = core.receive("a", ranks[0].status(), 0.0)
    token = answer.message
    assert isinstance(token, Token)
    assert (token.run, token.epoch) == (RUN, 0)
    assert core.receive("a", status_of(ranks[0], token=token.token), 0.1) == []
    assert core.receive("a", window_of(1), 0.2) == []
    assert core.phase is Phase.WAITING
    out = messages(core.receive("b", ranks[1].status(), 0.3))
    assert core.phase is Phase.SERVING
    assert [type(message) for message in out] == [RowsRequest]


def test_the_epoch_counts_above_the_store_and_above_all_reported_fences() -> None:
    store = MemoryStore()
    store.begin_epoch(7 << 20 | 5, pid=1, now=0.0)
    loop = running(store)
    assert loop.core.epoch >> 20 == 8
    assert store.last_epoch() == loop.core.epoch
    healed = running(MemoryStore(), ranks=loop.ranks)
    assert healed.core.epoch >> 20 == 9


def test_two_lives_from_the_same_counter_differ_in_their_random_bits() -> None:
    first, second = rebalancer(seed=1), rebalancer(seed=2)
    for core in (first, second):
        core.receive("a", SnapshotRequest(run=0, nonce=1, job=JOB), 0.0)
    assert first.epoch >> 20 == second.epoch >> 20
    assert first.epoch != second.epoch


def test_a_token_is_good_once_and_only_as_it_was_drawn() -> None:
    loop = running()
    old = rank_core(0)
    stale = replace(old.status(), run=RUN + 1)
    for token in (0, 12345):
        (answer,) = loop.core.receive("x", replace(stale, token=token), loop.now)
        assert isinstance(answer.message, Token)
    assert loop.core.view is not None
    assert loop.core.view.run == RUN
    token = answer.message.token
    loop.core.receive("x", replace(stale, token=token), loop.now)
    assert loop.core.view.run == RUN + 1
    (again,) = loop.core.receive(0, status_of(loop.ranks[0], token=token), loop.now)
    assert isinstance(again.message, Token)
    assert again.message.token != token
    assert loop.core.view.run == RUN + 1


def test_a_fence_above_the_own_epoch_ends_the_life() -> None:
    loop = running()
    higher = status_of(loop.ranks[0], fence=loop.core.epoch + 1)
    assert loop.core.receive(0, higher, loop.now) == []
    assert loop.core.ended is not None
    assert str(loop.core.epoch) in loop.core.ended
    assert loop.core.receive(0, window_of(1), loop.now) == []
    assert loop.core.tick(loop.now + 99) == []


def test_a_newer_life_on_the_same_store_ends_this_one_at_its_next_transaction() -> None:
    for act in ("window", "publish"):
        loop = running()
        loop.store.begin_epoch(loop.core.epoch + (1 << 20), pid=2, now=0.0)
        if act == "window":
            assert loop.core.receive(0, window_of(1), loop.now) == []
        else:
            assert loop.core.publish(placement_of(seed=3), INFO, loop.now) == []
        assert loop.core.phase is Phase.ENDED
        assert loop.store.windows == []


class RacedStore(MemoryStore):
    """Somebody else begins an epoch between this life's reading and writing."""

    def begin_epoch(self, epoch: int, *, pid: int, now: float) -> None:
        self.epochs.append(9 << 20)
        super().begin_epoch(epoch, pid=pid, now=now)


def test_a_life_that_lost_the_race_for_the_epoch_ends() -> None:
    core = rebalancer(RacedStore())
    assert core.receive("a", SnapshotRequest(run=0, nonce=1, job=JOB), 0.0) == []
    assert core.ended is not None
    assert "meanwhile" in core.ended


def test_a_full_disk_at_the_start_is_counted_and_the_start_is_tried_again() -> None:
    store = MemoryStore()
    store.failing = True
    core = rebalancer(store)
    request = SnapshotRequest(run=0, nonce=1, job=JOB)
    assert core.receive("a", request, 0.0) == []
    assert (core.phase, core.counters.store_errors) == (Phase.WAITING, 1)
    store.failing = False
    assert len(core.receive("a", request, 1.0)) == 1


def test_a_job_that_is_not_accepted_is_neither_started_nor_followed() -> None:
    core = RebalancerCore(
        MemoryStore(),
        CONFIG,
        random_bits=lambda bits: 3,
        stamp=lambda: 0.0,
        accept_job=lambda job: "another model",
    )
    for message in (SnapshotRequest(run=0, nonce=1, job=JOB), status_of(rank_core(0), token=3)):
        (item,) = core.receive("a", message, 0.0)
        assert isinstance(item.message, Refusal)
        assert item.message.reason == "job refused: another model"
    assert (core.phase, core.view, core.counters.messages_rejected) == (Phase.WAITING, None, 2)


# ------------------------------------------------------------------------------------- publication


def test_a_version_is_kept_before_it_is_sent_to_every_rank() -> None:
    loop = running()
    out = loop.core.publish(placement_of(seed=3), INFO, loop.now)
    assert sorted(str(item.peer) for item in out) == ["0", "1"]
    assert all(isinstance(item.message, PlacementMessage) for item in out)
    newest = loop.store.newest_placement()
    assert newest is not None
    assert (newest.epoch, newest.version) == (loop.core.epoch, 2)
    assert newest.placement.digest() == placement_of(seed=3).digest()


def test_a_version_that_can_not_be_kept_is_not_sent() -> None:
    loop = running()
    loop.store.failing = True
    assert loop.core.publish(placement_of(seed=3), INFO, loop.now) == []
    assert (loop.core.version, loop.core.counters.store_errors) == (1, 1)
    loop.store.failing = False
    assert loop.core.publish(placement_of(seed=3), INFO, loop.now) != []


def test_a_rank_that_holds_less_than_the_newest_is_answered_with_it() -> None:
    loop = running()
    loop.core.publish(placement_of(seed=3), INFO, loop.now)  # lost
    (item,) = loop.core.receive(1, loop.ranks[1].status(), loop.now)
    assert item.peer == 1
    assert isinstance(item.message, PlacementMessage)
    assert loop.core.counters.placements_resent == 1
    loop.send([item])
    assert loop.core.receive(1, loop.ranks[1].status(), loop.now) == []


def test_the_next_version_waits_until_every_layer_has_the_newest_one() -> None:
    loop = running()
    loop.publish(placement_of(seed=3))
    for _ in range(2):
        assert not loop.core.may_publish(loop.now)
        with pytest.raises(ValueError, match="not settled"):
            loop.core.publish(placement_of(seed=4), INFO, loop.now)
        loop.vote()
    loop.vote()
    assert loop.core.may_publish(loop.now)


def test_the_next_version_may_follow_one_that_failed_was_refused_or_is_in_conflict() -> None:
    failed = running()
    failed.publish(placement_of(seed=3))
    failed.vote()
    failed.vote(error=1)
    assert failed.core.may_publish(failed.now)
    for field in ("refused", "conflict"):
        loop = running()
        loop.core.publish(placement_of(seed=3), INFO, loop.now)
        assert loop.core.newest is not None
        told = status_of(loop.ranks[1], **{field: loop.core.newest.key})
        loop.core.receive(1, told, loop.now)
        assert loop.core.may_publish(loop.now)


def test_an_unfinished_version_may_be_followed_after_a_time_that_doubles_until_one_is_finished() -> None:
    loop = running()
    for seed, seconds in ((3, 10.0), (4, 20.0), (5, 40.0), (6, 40.0)):
        loop.publish(placement_of(seed=seed))
        start = loop.now
        assert not loop.core.may_publish(start + seconds - 0.1)
        loop.now = start + seconds + 0.01
        assert loop.core.may_publish(loop.now)
    loop.publish(placement_of(seed=7))
    loop.vote(6)
    loop.publish(placement_of(seed=8))
    assert not loop.core.may_publish(loop.now + 9.9)
    assert loop.core.may_publish(loop.now + 10.1)


def test_a_placement_that_does_not_fit_the_job_is_not_published() -> None:
    loop = running()
    with pytest.raises(ValueError, match="does not fit"):
        loop.core.publish(placement_of(replace(JOB, num_layers=2), seed=1), INFO, loop.now)


def test_the_view_is_the_status_of_the_highest_vote_whatever_comes_later() -> None:
    loop = running()
    early = loop.ranks[1].status()
    loop.publish(placement_of(seed=3))
    loop.vote(4)
    settled = loop.core.live_placement()
    loop.core.receive(1, early, loop.now)
    assert loop.core.live_placement() is settled
    assert settled is not None
    assert settled.digest() == placement_of(seed=3).digest()


def test_a_rank_with_another_job_shape_is_rejected_and_named() -> None:
    loop = running()
    status = status_of(loop.ranks[1], job=replace(JOB, top_k=3))
    (item,) = loop.core.receive(1, status, loop.now)
    assert isinstance(item.message, Refusal)
    assert "job shape" in item.message.reason
    assert loop.core.counters.messages_rejected == 1
    assert "rank 1" in loop.core.notices[-1].text
