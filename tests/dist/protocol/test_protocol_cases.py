"""Cases B22, B23 and B26 of `shared/cases.md` on the protocol's cores: late ranks, lost messages, versions that ranks
receive at different times. The same over real sockets and processes is tested beside the agent."""

import numpy as np
import pytest

from evenroute.dist.protocol.job_start import JobStartConfig, JobStartCore
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.wire.messages import JobShape, RankWindow, Snapshot
from evenroute.dist.wire.received import window_counts
from support.protocol_helpers import JOB, placement_of, rank_core, replace
from support.protocol_loop import Loop, rebalancer, running


def start_job(core: RebalancerCore, job: JobShape, *, run: int, now: float) -> list[RankCore]:
    """A job that starts now with this rebalancer."""
    drawn = iter([run, run + 1])
    start = JobStartCore(job, placement_of(job), JobStartConfig(time_limit_s=2.0), lambda bits: next(drawn))
    for request in start.begin(now):
        for item in core.receive("rank 0 of a new job", request, now):
            start.receive(item.message)
    started = start.result(now)
    assert started is not None, "no snapshot inside the time limit"
    return [RankCore(started, rank=rank, config=RankConfig()) for rank in range(job.ep_size)]


# ------------------------------------------------------------------------ B22: late, restarted, early


def test_b22_a_job_that_starts_after_five_versions_routes_its_first_token_with_the_fifth() -> None:
    loop = running()
    for seed in (1, 2, 3, 4, 5):
        loop.publish(placement_of(seed=seed))
        loop.vote(5)
    ranks = start_job(loop.core, JOB, run=500, now=loop.now)
    assert loop.core.newest is not None
    for rank in ranks:
        assert rank.live_placement().digest() == placement_of(seed=5).digest()
        assert rank.newest.key == loop.core.newest.key != (0, 0)


def test_b22_a_job_killed_at_one_version_and_restarted_two_later_starts_with_the_newest() -> None:
    loop = running()
    loop.publish(placement_of(seed=1))
    loop.vote(5)
    again = running(loop.store, ranks=loop.ranks)
    again.publish(placement_of(seed=2))
    again.vote(5)
    again.publish(placement_of(seed=3))
    restarted = Loop(again.store, start_job(again.core, JOB, run=900, now=again.now), now=again.now)
    restarted.core = again.core
    assert restarted.ranks[0].live_placement().digest() == placement_of(seed=3).digest()
    restarted.tick()
    restarted.tick()
    assert again.core.view is not None
    assert again.core.view.run == 900
    assert again.core.ranks_behind() == ()


def test_b22_counts_taken_before_there_is_a_rebalancer_are_not_lost_and_it_says_from_when_it_has_data() -> (
    None
):
    ranks = [rank_core(0), rank_core(1)]
    counts = np.full((3, 4), 4, np.int64)
    sent = [rank.add_counts(0, 2, 8, counts, 0.0) for rank in ranks]
    assert all(len(windows) == 1 for windows in sent)  # to nobody
    for rank in ranks:
        assert rank.add_counts(3, 9, 24, counts, 1.0) == []
    loop = Loop(ranks=ranks, now=3.0)
    for _ in range(6):
        loop.tick()
    loads = loop.core.loads()
    assert loads is not None
    assert (loads.complete, loads.tokens) == (True, 64)
    assert [(rank.first_step, rank.last_step, rank.num_missing) for rank in loads.ranks] == [(0, 9, 0)] * 2


def test_b22_an_unanswered_start_says_so_inside_its_limit() -> None:
    drawn = iter([1, 2])
    config = JobStartConfig(time_limit_s=2.0, required=True)
    start = JobStartCore(JOB, placement_of(), config, lambda bits: next(drawn))
    start.begin(0.0)
    start.receive(Snapshot(0, 5, 999))
    with pytest.raises(TimeoutError, match="no snapshot from the rebalancer within 2 s"):
        start.result(2.0)


# --------------------------------------------------------------------------- B23: nothing is dropped


def test_b23_a_reader_that_stands_still_costs_no_count_and_no_memory() -> None:
    job = JobShape(num_layers=58, num_logical_experts=256, num_slots=288, ep_size=2, top_k=8)
    ranks = [rank_core(rank, job) for rank in range(2)]
    loop = running(ranks=ranks)
    rng = np.random.default_rng(0)
    total = np.zeros((58, 256), np.int64)
    sent_bytes, now = 0, loop.now
    for step in range(100):  # five seconds at 20 steps a second; nobody answers
        now += 0.05
        for rank in ranks:
            counts = rng.multinomial(64 * 8, np.full(256, 1 / 256), size=58)
            total += counts
            out = [*rank.add_counts(step, step, 64, counts, now), *rank.tick(now)]
            sent_bytes += sum(len(message.counts) for message in out if isinstance(message, RankWindow))
    size = 58 * 256 * 8
    for rank in ranks:
        unsent = rank.unsent()
        assert (unsent.in_flight_steps, unsent.open_steps) == ((0, 0), (1, 99))  # two windows, whatever comes
    assert sent_bytes == 2 * size * 5  # the one in flight, once a second
    loop.now = now
    for _ in range(4):  # the reader goes on: whole again with the window that follows
        loop.tick()
    stored = loop.store.windows
    assert sorted((window.rank, window.seq, window.first_step, window.last_step) for window in stored) == [
        (0, 1, 0, 0),
        (0, 2, 1, 99),
        (1, 1, 0, 0),
        (1, 2, 1, 99),
    ]
    assert (sum(window.counts for window in stored) == total).all()
    loads = loop.core.loads()
    assert loads is not None
    assert (loads.complete, loads.coverage) == (True, 1.0)


def test_b23_holes_are_counted_per_rank_and_a_window_with_holes_is_not_whole() -> None:
    loop = running()
    frames: list[tuple[int, RankWindow]] = []
    for peer, rank in enumerate(loop.ranks):
        for step in range(6):
            (window,) = rank.add_counts(step, step, 8, np.full((3, 4), 4, np.int64), loop.now)
            assert isinstance(window, RankWindow)
            assert window_counts(window, JOB).sum() == 48
            frames.append((peer, window))
            rank.stream.acknowledged(window.run, window.seq, loop.now)  # a store that is lost had it
    for peer, window in frames:
        if (peer, window.seq) not in {(1, 3), (1, 4)}:
            loop.core.receive(peer, window, loop.now)
    loads = loop.core.loads()
    assert loads is not None
    assert not loads.complete
    assert [rank.num_missing for rank in loads.ranks] == [0, 2]


# ------------------------------------------------------- B26: versions that arrive at different times


def routed_with(loop: Loop, votes: int) -> list[set[tuple[tuple[int, int], ...]]]:
    """Per vote, the different sets of layer keys over ranks."""
    seen = []
    for _ in range(votes):
        loop.vote()
        seen.append({tuple(rank.state.live_keys) for rank in loop.ranks})
    return seen


def four_ranks() -> Loop:
    """A running job of four ranks."""
    job = replace(JOB, ep_size=4, num_slots=8)
    return running(ranks=[rank_core(rank, job) for rank in range(4)])


def test_b26_a_version_that_reaches_one_rank_late_is_taken_by_all_at_the_same_step() -> None:
    loop = four_ranks()
    job = loop.ranks[0].job
    loop.cut = {2}
    loop.publish(placement_of(job, seed=1))
    before = routed_with(loop, 40)
    assert [len(keys) for keys in before] == [1] * 40
    assert len({keys for step in before for keys in step}) == 1
    assert loop.core.ranks_behind() == (2,)
    loop.cut = set()
    loop.tick()  # its heartbeat is answered
    after = routed_with(loop, 10)
    assert [len(keys) for keys in after] == [1] * 10
    assert loop.core.newest is not None
    assert after[-1] == {(loop.core.newest.key,) * 3}


def test_b26_two_versions_in_quick_succession_of_which_a_rank_never_sees_the_first() -> None:
    loop = four_ranks()
    job = loop.ranks[0].job
    loop.cut = {2}
    loop.publish(placement_of(job, seed=1))
    assert [len(keys) for keys in routed_with(loop, 3)] == [1] * 3
    loop.now += 10.1  # the rebalancer gives up waiting for the first
    assert loop.core.may_publish(loop.now)
    loop.publish(placement_of(job, seed=2))
    loop.cut = set()
    loop.tick()
    steps = routed_with(loop, 10)
    assert [len(keys) for keys in steps] == [1] * 10
    versions = [min(version for _, version in next(iter(keys))) for keys in steps]
    assert versions == sorted(versions)
    assert loop.ranks[2].live_placement().digest() == placement_of(job, seed=2).digest()


def test_b26_a_rank_that_never_gets_a_version_keeps_all_at_the_one_before_and_is_named() -> None:
    loop = four_ranks()
    job = loop.ranks[0].job
    digest = loop.ranks[0].live_placement().digest()
    loop.cut = {2}
    loop.publish(placement_of(job, seed=1))
    routed_with(loop, 100)
    assert {rank.live_placement().digest() for rank in loop.ranks} == {digest}
    assert loop.core.ranks_behind() == (2,)


def test_rebalancers_that_serve_nobody_are_behind_nobody() -> None:
    assert rebalancer().ranks_behind() == ()
