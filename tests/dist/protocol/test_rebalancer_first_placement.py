"""The first placement of a rebalancer's life: from the ranks' rows, from the store, or of a starting job."""

from evenroute.dist.protocol.types import Outgoing
from evenroute.dist.wire.messages import (
    NO_KEY,
    Down,
    RowsRequest,
    Snapshot,
    SnapshotRequest,
    Token,
)
from evenroute.dist.wire.placement import unpack_placement
from support.memory_store import MemoryStore
from support.protocol_helpers import (
    JOB,
    RUN,
    placement_message,
    placement_of,
    rank_core,
    replace,
    version_of,
)
from support.protocol_loop import Loop, rebalancer, running


def messages(outgoing: list[Outgoing]) -> list[Down]:
    """Without the peers."""
    return [item.message for item in outgoing]


# -------------------------------------------------------------------------------- first placements


def test_a_job_found_running_is_asked_for_its_rows_and_gets_them_under_a_new_key() -> None:
    loop = running()
    assert loop.core.newest is not None
    assert loop.core.newest.key == (loop.core.epoch, 1)
    assert loop.core.newest.digest == placement_of().digest()
    assert [rank.state.live_keys for rank in loop.ranks] == [[(loop.core.epoch, 1)] * 3] * 2


def test_a_restart_on_its_store_publishes_the_newest_version_of_the_store_under_a_new_key() -> None:
    loop = running()
    loop.publish(placement_of(seed=3))
    again = running(loop.store, ranks=loop.ranks)
    assert again.core.epoch > loop.core.epoch
    assert again.core.newest is not None
    assert again.core.newest.key == (again.core.epoch, 1)
    assert again.core.newest.digest == placement_of(seed=3).digest()
    assert set(again.ranks[0].state.live_keys) == {(again.core.epoch, 1)}


def test_a_lost_store_heals_from_the_rows_in_use_even_of_different_versions() -> None:
    loop = running()
    loop.publish(placement_of(seed=3))
    loop.vote(2)
    live = loop.ranks[0].live_placement()
    assert len(set(loop.ranks[0].state.live_keys)) == 2
    again = running(MemoryStore(), ranks=loop.ranks)
    assert again.core.newest is not None
    assert again.core.newest.digest == live.digest()


def test_rows_are_asked_for_again_until_they_come() -> None:
    loop = Loop()
    loop.now = 1.0
    for _ in range(2):
        for peer, rank in enumerate(loop.ranks):
            for item in loop.core.receive(peer, rank.status(), loop.now):
                if isinstance(item.message, Token):
                    rank.receive(item.message, loop.now)
    assert not loop.core.has_view()
    assert loop.core.tick(loop.now + 0.5) == []
    (item,) = loop.core.tick(loop.now + 1.0)
    assert isinstance(item.message, RowsRequest)
    loop.send([item])
    assert loop.core.has_view()


def test_rows_that_are_not_the_missing_ones_or_no_placement_change_nothing() -> None:
    loop = Loop()
    other = rank_core(0)
    loop.core.receive("a", SnapshotRequest(run=0, nonce=1, job=JOB), 0.0)
    for _ in range(2):
        for item in loop.core.receive(0, other.status(), 0.0):
            if isinstance(item.message, Token):
                other.receive(item.message, 0.0)
    rows = other.rows()
    bad = replace(rows, placement=replace(rows.placement, physical_to_logical=b"\0" * 72))
    foreign = replace(rows, placement=placement_message(version_of((1, 1), seed=2)).placement)
    for message in (bad, foreign, replace(rows, run=RUN + 1)):
        loop.core.receive(0, message, 0.0)
        assert not loop.core.has_view()
    loop.core.receive(0, rows, 0.0)
    assert loop.core.has_view()


def test_a_snapshot_of_an_empty_store_says_start_with_your_own() -> None:
    core = rebalancer()
    (item,) = core.receive("a", SnapshotRequest(run=0, nonce=8, job=JOB), 0.0)
    assert item == Outgoing("a", Snapshot(0, core.epoch, 8, NO_KEY, 0, None))


def test_a_snapshot_gives_the_stores_newest_under_its_own_key_if_it_fits_the_job() -> None:
    loop = running()
    loop.publish(placement_of(seed=3))
    core = rebalancer(loop.store)
    (item,) = core.receive("a", SnapshotRequest(run=0, nonce=8, job=JOB), 0.0)
    snapshot = item.message
    assert isinstance(snapshot, Snapshot)
    assert snapshot.placement is not None
    assert (snapshot.key, snapshot.epoch) == ((loop.core.epoch, 2), core.epoch)
    assert (
        unpack_placement(snapshot.placement, JOB).digest() == snapshot.digest == placement_of(seed=3).digest()
    )
    other = replace(JOB, num_layers=2)
    (item,) = core.receive("b", SnapshotRequest(run=0, nonce=9, job=other), 0.0)
    assert isinstance(item.message, Snapshot)
    assert item.message.placement is None


def test_live_keys_above_the_newest_version_are_taken_up_at_once() -> None:
    core = rebalancer()
    core.receive("a", SnapshotRequest(run=0, nonce=8, job=JOB), 0.0)
    ranks = [rank_core(0), rank_core(1)]
    for rank in ranks:
        rank.receive(placement_message(version_of((3, 1), seed=3)), 0.0)
    loop = Loop(ranks=ranks)
    loop.core = core
    loop.tick()
    loop.tick()
    assert core.newest is not None
    assert core.newest.key == (core.epoch, 1)
    assert core.newest.digest == placement_of().digest()
