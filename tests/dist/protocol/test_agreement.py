"""Decide: the five rules, one by one, on vectors as the all-reduce gives them."""

import numpy as np
import pytest

from evenroute.dist.protocol.agreement import (
    Action,
    AgreedState,
    AgreementError,
    Commit,
    Discard,
    Open,
    Version,
    vote_vector,
)
from evenroute.dist.wire.messages import NO_KEY
from support.protocol_helpers import minimum, placement_of, replace, version_of, with_shares

START = version_of((1, 0))
A, B = version_of((1, 1), seed=1), version_of((1, 2), seed=2)


class Ranks:
    """Agreed states of several ranks that vote together; `vote` checks that all do the same."""

    def __init__(self, num_ranks: int = 2, num_buffers: int = 2, start: Version = START) -> None:
        self.states = [AgreedState(start, num_buffers=num_buffers) for _ in range(num_ranks)]

    def vote(
        self,
        voted: Version | list[Version | None] | None = None,
        staged: int | list[int] = 0,
        error: int | None = None,
    ) -> list[Action]:
        """``error``: the rank that reports one. Returns the actions of all ranks."""
        count = len(self.states)
        voted = voted if isinstance(voted, list) else [voted] * count
        staged = staged if isinstance(staged, list) else [staged] * count
        vectors = [
            vote_vector(voted[rank], staged[rank], error == rank, state.state_hash())
            for rank, state in enumerate(self.states)
        ]
        reduced = minimum(*vectors)
        actions = [state.decide(reduced, voted[rank]) for rank, state in enumerate(self.states)]
        assert len({state.state_hash() for state in self.states}) == 1
        kinds = [[(type(action), getattr(action, "layer", None)) for action in one] for one in actions]
        assert all(one == kinds[0] for one in kinds)
        return actions[0]

    @property
    def state(self) -> AgreedState:
        return self.states[0]


def opened(actions: list[Action]) -> list[int]:
    """Layers opened, in order."""
    return [action.layer for action in actions if isinstance(action, Open)]


def committed(actions: list[Action]) -> list[int]:
    """Layers committed, in order."""
    return [action.layer for action in actions if isinstance(action, Commit)]


def test_a_version_opens_up_to_the_number_of_buffers_and_commits_what_all_have_staged() -> None:
    ranks = Ranks(num_buffers=2)
    first = ranks.vote(A)
    assert first[0] == Discard()
    assert opened(first) == [0, 1]
    assert ranks.vote(A, staged=[2, 0]) == []
    step = ranks.vote(A, staged=[2, 1])
    assert committed(step) == [0]
    assert opened(step) == [2]
    assert ranks.state.live_keys == [(1, 1), (1, 0), (1, 0)]
    assert committed(ranks.vote(A, staged=3)) == [1, 2]
    assert ranks.state.target is None
    assert ranks.state.live_digests == list(A.row_digests)
    assert ranks.vote(A) == []


def test_opened_layers_carry_live_and_target_row() -> None:
    ranks = Ranks()
    action = ranks.vote(A)[1]
    assert isinstance(action, Open)
    assert (action.live_row.slots == START.placement.row(0).slots).all()
    assert (action.target_row.slots == A.placement.row(0).slots).all()


def test_layers_whose_slots_stay_commit_at_once_with_shares_and_key() -> None:
    ranks = Ranks()
    version = Version.of((1, 1), with_shares(placement_of(seed=5, layers={2}), 0))
    actions = ranks.vote(version)
    assert committed(actions) == [0, 1]
    assert opened(actions) == [2]
    assert ranks.state.live_rows[0].shares is not None
    assert ranks.state.live_keys == [(1, 1), (1, 1), (1, 0)]


def test_a_version_that_moves_nothing_is_done_at_once() -> None:
    ranks = Ranks()
    actions = ranks.vote(version_of((1, 1)))
    assert committed(actions) == [0, 1, 2]
    assert ranks.state.target is None
    assert ranks.state.live_keys == [(1, 1)] * 3


def test_nothing_happens_while_one_rank_lacks_the_version() -> None:
    ranks = Ranks(num_ranks=3)
    for _ in range(5):
        assert ranks.vote([A, A, START]) == []
    assert opened(ranks.vote(A)) == [0, 1]


def test_a_key_is_target_at_most_once() -> None:
    ranks = Ranks()
    ranks.vote(version_of((1, 1)))
    assert ranks.vote(version_of((1, 1))) == []
    assert ranks.vote(version_of((0, 9), seed=4)) == []


def test_the_same_key_with_two_digests_is_a_conflict_and_nothing_switches() -> None:
    ranks = Ranks()
    assert ranks.vote([A, version_of((1, 1), seed=2)]) == []
    assert ranks.state.conflict == (1, 1)
    assert ranks.state.target is None
    assert opened(ranks.vote(B)) == [0, 1]


def test_an_error_stops_commits_and_the_version_fails_once_all_opened_layers_are_staged() -> None:
    ranks = Ranks()
    ranks.vote(A)
    assert ranks.vote(A, staged=[2, 1], error=1) == []
    assert ranks.state.failing
    assert ranks.vote(A, staged=[2, 1]) == []
    assert ranks.vote(A, staged=2) == [Discard()]
    assert ranks.state.failed == (1, 1)
    assert ranks.state.live_keys == [(1, 0)] * 3
    assert ranks.vote(A) == []


def test_layers_committed_before_an_error_stay_and_a_newer_version_moves_from_the_live_rows() -> None:
    ranks = Ranks(num_buffers=1)
    ranks.vote(A)
    ranks.vote(A, staged=1)
    assert ranks.vote(A, staged=2, error=0) == [Discard()]
    assert ranks.state.live_keys == [(1, 1), (1, 0), (1, 0)]
    again = Version.of((1, 2), A.placement)
    actions = ranks.vote(again)
    assert committed(actions) == [0]
    assert opened(actions) == [1]
    assert (actions[2].live_row.slots == START.placement.row(1).slots).all()  # type: ignore[union-attr]


def test_a_newer_version_waits_until_all_opened_layers_are_committed_and_nothing_more_is_opened() -> None:
    ranks = Ranks(num_buffers=1)
    ranks.vote(A)
    assert ranks.vote(B) == []
    assert ranks.state.target is A
    actions = ranks.vote(B, staged=1)
    assert committed(actions)[0] == 0
    assert ranks.state.target is B
    assert ranks.state.live_keys[0] == (1, 1)
    assert opened(actions) == [ranks.state.moved[0]]


def test_a_failing_version_is_not_replaced_before_it_has_failed() -> None:
    ranks = Ranks(num_buffers=2)
    ranks.vote(A)
    assert ranks.vote(B, staged=0, error=0) == []
    assert ranks.state.target is A
    actions = ranks.vote(B, staged=2)
    assert actions[0] == Discard()
    assert ranks.state.failed == (1, 1)
    assert ranks.state.target is B


def test_an_error_without_a_target_means_nothing() -> None:
    ranks = Ranks()
    assert ranks.vote(None, error=1) == []
    assert not ranks.state.failing


def test_states_that_differ_end_the_job() -> None:
    state, other = AgreedState(START, num_buffers=2), AgreedState(START, num_buffers=3)
    vectors = [vote_vector(None, 0, False, one.state_hash()) for one in (state, other)]
    with pytest.raises(AgreementError, match="agreed states differ"):
        state.decide(np.minimum(*vectors), None)


def test_every_part_of_the_agreed_state_is_in_the_hash() -> None:
    ranks = Ranks()
    seen = {ranks.state.state_hash()}
    ranks.vote([A, version_of((1, 1), seed=2)])
    seen.add(ranks.state.state_hash())
    ranks.vote(B)
    seen.add(ranks.state.state_hash())
    ranks.vote(B, staged=1)
    seen.add(ranks.state.state_hash())
    ranks.vote(B, staged=2, error=0)
    seen.add(ranks.state.state_hash())
    ranks.vote(B, staged=3)
    seen.add(ranks.state.state_hash())
    assert len(seen) == 6


def test_62_bit_values_keep_their_negatives_apart() -> None:
    top = 2**62 - 1
    version = replace(START, key=(top, top), digest=top)
    vector = vote_vector(version, 3, True, top)
    assert vector.dtype == np.int64
    assert vector.tolist() == [top, -top, top, -top, top, -top, 3, -1, top, -top, 0]


def test_no_version_is_never_a_candidate() -> None:
    ranks = Ranks(start=version_of(NO_KEY))
    assert ranks.vote(None) == []


def test_a_version_has_the_rows_and_digests_of_its_placement() -> None:
    for placement in (placement_of(seed=3), with_shares(placement_of(seed=3), 1)):
        version = Version.of((1, 1), placement)
        assert version.digest == placement.digest()
        assert list(version.row_digests) == placement.row_digests().tolist()
        for layer, row in enumerate(version.rows):
            expected = placement.row(layer)
            assert (row.slots == expected.slots).all()
            assert (row.shares is None) == (expected.shares is None)
            assert row.shares is None or (row.shares == expected.shares).all()


def test_votes_are_counted_from_none() -> None:
    job = Ranks()
    assert job.state.votes_decided == 0
    for vote in range(1, 4):
        job.vote()
        assert job.state.votes_decided == vote


def test_nothing_is_opened_while_a_candidate_waits_for_what_is_open() -> None:
    ranks = Ranks(num_buffers=2)
    ranks.vote(A)
    assert (ranks.state.opened, len(ranks.state.moved)) == (2, 3)
    actions = ranks.vote(B, staged=1)
    assert (committed(actions), opened(actions)) == ([0], [])
    actions = ranks.vote(B, staged=2)
    assert ranks.state.target is B
