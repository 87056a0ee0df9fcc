"""What planted faults of the cores once got through: falling keys, errors that pass, parts left out of the hash."""

from __future__ import annotations

import numpy as np
import pytest

from evenroute.dist.protocol.agreement import (
    AgreedState,
    AgreementError,
    Commit,
    Discard,
    Version,
    vote_vector,
)
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.protocol.view import RankView, RunView
from evenroute.dist.wire.messages import Ack
from evenroute.eplb.placement.placement import PlacementRow
from support.memory_store import MemoryStore
from support.protocol_helpers import (
    JOB,
    RUN,
    minimum,
    placement_message,
    placement_of,
    rank_core,
    replace,
    started,
    version_of,
    window_of,
    with_shares,
)
from support.protocol_loop import running


def bad(key):
    message = placement_message(version_of(key, seed=2))
    return replace(message, digest=message.digest ^ 1)


def test_refused_never_goes_back():
    core = rank_core()
    core.receive(bad((5, 3)), 0.1)
    core.receive(bad((5, 2)), 0.2)
    assert core.status().refused == (5, 3)


def test_an_error_stays_until_its_version_is_dropped():
    """Whatever the mover says later: what was staged is bad."""
    cores = [rank_core(0), rank_core(1)]
    for core in cores:
        core.receive(placement_message(version_of((5, 1), seed=1)), 0.1)
    reduced = minimum(*[core.vote() for core in cores])
    for core in cores:
        core.decide(0, reduced)
    cores[0].set_error(True)
    cores[0].set_error(False)
    reduced = minimum(*[core.vote() for core in cores])
    for core in cores:
        core.decide(1, reduced)
    assert all(core.state.failing for core in cores)


def test_a_target_begins_with_a_discard_before_its_first_commits():
    state = AgreedState(version_of((1, 0)), num_buffers=2)
    version = Version.of((1, 1), with_shares(placement_of(seed=5, layers={2}), 0))
    actions = state.decide(vote_vector(version, 0, False, state.state_hash()), version)
    assert actions[0] == Discard()
    assert any(isinstance(action, Commit) for action in actions)


def test_the_hash_tells_live_rows_and_the_layers_to_move_apart():
    """Two states with equal keys and counts, of which one holds another row, or moves other layers."""

    def state():
        return AgreedState(version_of((1, 0)), num_buffers=2)

    one, other = state(), state()
    other.live_digests[0] ^= 1
    assert one.state_hash() != other.state_hash()
    one, other = state(), state()
    one.moved, other.moved = [0, 1], [0, 2]
    assert one.state_hash() != other.state_hash()


def test_keys_of_a_rank_never_fall_in_the_view():
    view = RankView("a", 0.0, 1)
    status = rank_core().status()
    view.update(replace(status, held=(5, 2), vote=4), "a", 1.0)
    view.update(replace(status, held=(5, 1), vote=3), "a", 2.0)
    assert (view.held, view.vote) == ((5, 2), 4)


def test_a_version_of_this_epoch_that_was_never_published_is_rejected():
    loop = running()
    core, rank = loop.core, loop.ranks[0]
    before = core.counters.messages_rejected
    status = replace(rank.status(), held=(core.epoch, core.version + 5), vote=10**6)
    core.receive(0, status, 50.0)
    assert core.counters.messages_rejected == before + 1
    assert core.view.newest_status.vote < 10**6


def test_rows_are_asked_of_a_rank_that_is_furthest():
    loop = running()
    core = loop.core
    core.view.ranks[0].vote, core.view.ranks[0].heard_at = 3, 99.0
    core.view.ranks[1].vote, core.view.ranks[1].heard_at = 9, 1.0
    assert [item.peer for item in core._ask_rows(100.0)] == [core.view.ranks[1].peer]


def test_ranks_of_two_runs_never_agree():
    one, other = rank_core(0), RankCore(started(run=RUN + 1), rank=1, config=RankConfig())
    with pytest.raises(AgreementError, match="agreed states differ"):
        one.decide(0, np.minimum(one.vote(), other.vote()))


def test_a_row_of_another_width_under_a_known_digest_is_asked_for():
    loop = running()
    digest = version_of((1, 0)).row_digests[0]

    class Narrow(MemoryStore):
        def row(self, digest):
            return PlacementRow(np.arange(JOB.num_slots - 1, dtype=np.int32), None)

    view = RunView(RUN, JOB, Narrow())
    view.add(loop.ranks[0].status(), 0, 0.0)
    assert view.missing_rows()
    assert view.live_placement() is None
    assert view.take_rows(loop.ranks[0].rows()).keys() == {digest} | set(version_of((1, 0)).row_digests)
    assert view.live_placement() is not None


def test_the_next_job_of_another_shape_is_counted_in_its_own():
    loop = running()
    loop.core.receive(0, window_of(1), loop.now)
    job = replace(JOB, num_logical_experts=5, num_slots=8)
    ranks = [RankCore(started(job, run=RUN + 1), rank=rank, config=RankConfig()) for rank in (0, 1)]
    loop.ranks, loop.now = ranks, loop.now + 100.0
    for _ in range(3):
        loop.tick(5.0)
    out = loop.core.receive(0, window_of(1, run=RUN + 1, job=job), loop.now)
    assert [type(item.message) for item in out] == [Ack]
    assert loop.core.loads().counts.shape == (3, 5)
    assert loop.core.loads().tokens == 8
