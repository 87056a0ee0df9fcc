"""The rank's receipt, votes and stream."""

import numpy as np
import pytest

from evenroute.dist.protocol.agreement import Commit, Discard, Open
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.wire.messages import Ack, RankStatus, RankWindow, Rows, RowsRequest, Snapshot, Token, Up
from evenroute.dist.wire.placement import unpack_placement
from evenroute.dist.wire.received import live_digest_array, live_key_array
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
)

V1, V2 = version_of((5, 1), seed=1), version_of((5, 2), seed=2)
COUNTS = np.arange(12, dtype=np.int64).reshape(3, 4)


def only(messages: list[Up], kind: type) -> list[Up]:
    """Messages of one kind."""
    return [message for message in messages if isinstance(message, kind)]


def vote_together(cores: list[RankCore]) -> list[list[object]]:
    """One vote of all ranks, posted and decided."""
    number = cores[0].state.votes_decided
    reduced = minimum(*[core.vote() for core in cores])
    return [core.decide(number, reduced) for core in cores]


def stage_all(cores: list[RankCore]) -> None:
    """As a mover that is done at once."""
    for core in cores:
        core.set_staged(core.state.opened)


def test_the_first_tick_tells_who_this_is_and_what_is_live() -> None:
    core = RankCore(started(epoch=4 << 20, key=(3, 7)), rank=1, config=RankConfig())
    (status,) = core.tick(0.0)
    assert isinstance(status, RankStatus)
    assert (status.run, status.rank, status.job, status.vote) == (RUN, 1, JOB, 0)
    assert (status.held, status.fence) == ((3, 7), 4 << 20)
    assert live_key_array(status).tolist() == [[3, 7]] * 3
    assert live_digest_array(status).tolist() == placement_of().row_digests().tolist()


def test_a_placement_becomes_newest_and_is_reported_at_once() -> None:
    core = rank_core()
    (status,) = core.receive(placement_message(V1), 0.1)
    assert isinstance(status, RankStatus)
    assert (status.held, status.held_digest, status.fence) == ((5, 1), V1.digest, 5)


def test_messages_of_other_runs_change_nothing() -> None:
    core = rank_core()
    assert core.receive(placement_message(V1, run=RUN + 1), 0.1) == []
    assert core.receive(Snapshot(0, 9, 1), 0.1) == []
    assert (core.newest.key, core.fence) == ((0, 0), 0)


def test_lower_epochs_are_dropped_after_a_higher_one_was_heard() -> None:
    core = rank_core()
    core.receive(placement_message(V1), 0.1)
    old = version_of((4, 9), seed=3)
    assert core.receive(placement_message(old), 0.2) == []
    assert core.receive(placement_message(V2, epoch=4), 0.2) == []
    assert core.newest.key == (5, 1)


def test_a_higher_epoch_that_repeats_an_older_version_fences_but_keys_do_not_go_back() -> None:
    core = rank_core()
    core.receive(placement_message(V2), 0.1)
    (status,) = core.receive(placement_message(V1, epoch=6), 0.2)
    assert isinstance(status, RankStatus)
    assert (status.held, status.fence) == ((5, 2), 6)


def test_a_rebalancer_without_an_epoch_can_only_hand_out_tokens() -> None:
    core = rank_core(epoch=5)
    (status,) = core.receive(Token(RUN, 0, 99), 0.1)
    assert isinstance(status, RankStatus)
    assert (status.token, status.fence) == (99, 5)
    assert core.receive(Token(RUN, 4, 98), 0.2) == []
    assert core.receive(RowsRequest(RUN, 0), 0.2) == []
    assert core.token == 99


@pytest.mark.parametrize(
    "message",
    [
        placement_message(V2, digest=V2.digest ^ 1),
        placement_message(V2, placement=replace(placement_message(V2).placement, num_layers=2)),
        placement_message(
            V2, placement=replace(placement_message(V2).placement, physical_to_logical=b"\7" * 72)
        ),
    ],
)
def test_a_placement_that_does_not_fit_is_refused_and_the_one_before_stays(message: object) -> None:
    core = rank_core()
    core.receive(placement_message(V1), 0.1)
    for form in (message, core.prepare(message)):  # type: ignore[arg-type]
        (status,) = core.receive(form, 0.2)  # type: ignore[arg-type]
        assert isinstance(status, RankStatus)
        assert (status.held, status.refused) == ((5, 1), (5, 2))
    assert core.refusals[0].startswith("version (5, 2): ")


def test_the_same_key_with_another_digest_is_a_conflict_and_the_first_stays() -> None:
    core = rank_core()
    core.receive(placement_message(V1), 0.1)
    assert core.receive(placement_message(V1), 0.2) == []
    (status,) = core.receive(placement_message(version_of((5, 1), seed=2)), 0.3)
    assert isinstance(status, RankStatus)
    assert (status.conflict, status.held_digest) == ((5, 1), V1.digest)


def test_what_was_voted_stays_voted_when_something_newer_comes() -> None:
    cores = [rank_core(0), rank_core(1)]
    for core in cores:
        core.receive(placement_message(V1), 0.1)
    vectors = [core.vote() for core in cores]
    cores[0].receive(placement_message(V2), 0.2)
    actions = [core.decide(0, minimum(*vectors)) for core in cores]
    assert [type(action) for action in actions[0]] == [Discard, Open, Open]
    assert cores[0].state.target is not None
    assert cores[0].state.target.key == cores[1].state.target.key == (5, 1)  # type: ignore[union-attr]


def test_a_newer_epoch_heard_after_the_vote_does_not_undo_it() -> None:
    cores = [rank_core(0), rank_core(1)]
    for core in cores:
        core.receive(placement_message(V1), 0.1)
    vectors = [core.vote() for core in cores]
    cores[0].receive(RowsRequest(RUN, 9), 0.2)
    kinds = [[type(action) for action in core.decide(0, minimum(*vectors))] for core in cores]
    assert kinds[0] == kinds[1] == [Discard, Open, Open]


def test_a_switch_is_reported_layer_by_layer_with_rising_votes() -> None:
    cores = [rank_core(0), rank_core(1)]
    for core in cores:
        core.receive(placement_message(V1), 0.1)
    seen = []
    for _ in range(4):
        vote_together(cores)
        stage_all(cores)
        statuses = only(cores[0].tick(0.2), RankStatus)
        seen += [
            (s.vote, [version for _, version in live_key_array(s).tolist()])
            for s in statuses
            if isinstance(s, RankStatus)
        ]
    assert seen == [(1, [0, 0, 0]), (2, [1, 1, 0]), (3, [1, 1, 1])]


def test_an_error_of_one_rank_fails_the_version_on_all_and_is_forgotten_for_the_next() -> None:
    cores = [rank_core(0), rank_core(1)]
    for core in cores:
        core.receive(placement_message(V1), 0.1)
    vote_together(cores)
    stage_all(cores)
    cores[1].set_error(True)
    assert vote_together(cores) == [[Discard()]] * 2
    assert [core.status().failed for core in cores] == [(5, 1)] * 2
    for core in cores:
        core.receive(placement_message(V2), 0.3)
    for _ in range(4):
        vote_together(cores)
        stage_all(cores)
    assert [set(core.state.live_keys) for core in cores] == [{(5, 2)}] * 2


def test_commits_carry_row_and_key() -> None:
    core = rank_core()
    core.receive(placement_message(version_of((5, 1))), 0.1)
    (actions,) = vote_together([core])
    commits = [action for action in actions if isinstance(action, Commit)]
    assert [(commit.layer, commit.key) for commit in commits] == [(0, (5, 1)), (1, (5, 1)), (2, (5, 1))]


def test_ranks_with_other_settings_end_the_job_at_the_first_vote() -> None:
    cores = [rank_core(0, agree_every=1), rank_core(1, agree_every=2)]
    with pytest.raises(RuntimeError, match="agreed states differ"):
        cores[0].decide(0, np.minimum(*[core.vote() for core in cores]))


def test_rows_are_the_live_ones() -> None:
    cores = [rank_core(0), rank_core(1)]
    for core in cores:
        core.receive(placement_message(V1), 0.1)
    for _ in range(2):
        vote_together(cores)
        stage_all(cores)
    rows = only(cores[0].receive(RowsRequest(RUN, 5), 0.2), Rows)[0]
    assert isinstance(rows, Rows)
    live = unpack_placement(rows.placement, JOB)
    assert live.row_digests().tolist() == [*V1.row_digests[:2], placement_of().row_digests()[2]]


def test_heartbeats_come_when_nothing_else_does() -> None:
    core = rank_core(heartbeat_s=2.0)
    assert core.tick(1.9) == []
    assert core.next_time() == 2.0
    assert len(core.tick(2.0)) == 1
    assert core.tick(2.1) == []


def test_one_window_is_in_flight_unchanged_and_later_counts_merge_behind_it() -> None:
    core = rank_core(resend_s=1.0, heartbeat_s=100.0)
    source = COUNTS.copy()
    (first,) = core.add_counts(0, 0, 8, source, 0.0)
    source += 100  # the caller's buffer is used again
    assert core.add_counts(1, 1, 8, COUNTS, 0.1) == []
    assert core.add_counts(2, 4, 24, COUNTS * 3, 0.2) == []
    assert core.tick(0.9) == []
    assert core.tick(1.0) == [first]
    (second, status) = core.receive(Ack(RUN, 1, 1), 1.1)
    assert isinstance(first, RankWindow)
    assert isinstance(second, RankWindow)
    assert isinstance(status, RankStatus)  # a new epoch was heard
    assert (first.seq, first.first_step, first.last_step, first.tokens) == (1, 0, 0, 8)
    assert (second.seq, second.first_step, second.last_step, second.tokens) == (2, 1, 4, 32)
    assert np.frombuffer(first.counts, "<i8").tolist() == COUNTS.ravel().tolist()
    assert np.frombuffer(second.counts, "<i8").tolist() == (4 * COUNTS).ravel().tolist()


@pytest.mark.parametrize(
    "ack", [Ack(RUN, 5, 2), Ack(RUN, 5, 0), Ack(RUN + 1, 5, 1), Ack(RUN, 4, 1), Ack(RUN, 0, 1)]
)
def test_only_an_acknowledgement_of_the_window_in_flight_by_the_leading_epoch_counts(ack: Ack) -> None:
    core = rank_core(epoch=5)
    core.add_counts(0, 0, 8, COUNTS, 0.0)
    core.receive(ack, 0.1)
    assert core.unsent().in_flight_steps == (0, 0)
    core.receive(Ack(RUN, 5, 1), 0.2)
    assert core.unsent().in_flight_steps is None


def test_a_new_connection_gets_status_and_window_at_once() -> None:
    core = rank_core()
    core.add_counts(0, 0, 8, COUNTS, 0.0)
    assert [type(message) for message in core.reconnected(0.01)] == [RankStatus, RankWindow]


def test_what_is_unsent_is_known_at_the_end() -> None:
    core = rank_core()
    core.add_counts(0, 3, 8, COUNTS, 0.0)
    core.add_counts(4, 5, 7, COUNTS, 0.0)
    core.add_counts(6, 6, 7, COUNTS, 0.0)
    unsent = core.unsent()
    assert (unsent.in_flight_tokens, unsent.in_flight_steps) == (8, (0, 3))
    assert (unsent.open_tokens, unsent.open_steps) == (14, (4, 6))


def test_a_placement_that_is_held_already_is_not_checked_again() -> None:
    core = rank_core()
    message = placement_message(V1)
    assert core.prepare(message) is not message
    core.receive(core.prepare(message), 0.1)
    assert core.prepare(message) is message
    assert core.receive(core.prepare(message), 0.2) == []


def test_an_acknowledged_window_is_not_sent_again_by_the_acknowledgement() -> None:
    core = rank_core(resend_s=1.0, heartbeat_s=100.0)
    core.add_counts(0, 0, 8, COUNTS, 0.0)
    assert only(core.receive(Ack(RUN, 1, 1), 5.0), RankWindow) == []
