"""Every reachable state of a small agreement: two ranks, three layers, three versions that arrive whenever they like,
transfers that end whenever they like, with good or bad content. The real `AgreedState` and votes, all interleavings."""

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from evenroute.dist.protocol.agreement import AgreedState, Commit, Discard, Open, Version, vote_vector
from support.protocol_helpers import placement_of, with_shares

START, A, B, C = (
    Version.of(key, placement)
    for key, placement in (
        ((1, 0), placement_of()),
        ((1, 1), placement_of(seed=1)),
        ((1, 2), with_shares(placement_of(seed=2, layers={0, 1}), 2)),
        ((2, 1), placement_of(seed=1)),
    )
)
ORDER = (START, A, B, C)


class Rank(NamedTuple):
    """What one rank knows beyond the agreed state: newest version, and quality of each staged layer (prefix)."""

    newest: int = 0
    staged: tuple[bool, ...] = ()


class World(NamedTuple):
    """A state between two votes."""

    agreed: AgreedState
    ranks: tuple[Rank, Rank]


def clone(state: AgreedState) -> AgreedState:
    """A copy that shares nothing that changes."""
    copy = object.__new__(AgreedState)
    copy.__dict__ = {k: list(v) if isinstance(v, list) else v for k, v in state.__dict__.items()}
    return copy


def choices(rank: Rank, opened: int) -> list[Rank]:
    """All that can happen on a rank until the next vote: newer versions come, transfers end, well or badly."""
    return [
        Rank(newest, rank.staged + quality)
        for newest in range(rank.newest, len(ORDER))
        for number in range(opened - len(rank.staged) + 1)
        for quality in product((True, False), repeat=number)
    ]


def vote(world: World, ranks: tuple[Rank, Rank]) -> World:
    """Post, reduce and decide on both ranks; check what may never be."""
    before = world.agreed
    has_target = before.target is not None
    vectors = [
        vote_vector(
            ORDER[rank.newest],
            len(rank.staged) if has_target else 0,
            not all(rank.staged),
            before.state_hash(),
        )
        for rank in ranks
    ]
    reduced = np.minimum(*vectors)
    states = [clone(before), clone(before)]
    actions = [state.decide(reduced, ORDER[rank.newest]) for state, rank in zip(states, ranks, strict=True)]
    assert states[0].state_hash() == states[1].state_hash()
    assert [describe(action) for action in actions[0]] == [describe(action) for action in actions[1]]
    after = states[0]
    check(before, after, actions[0], ranks)
    restarted = any(isinstance(action, Discard) for action in actions[0])
    return World(after, tuple(Rank(rank.newest, () if restarted else rank.staged) for rank in ranks))  # type: ignore[arg-type]


def describe(action: object) -> tuple[object, ...]:
    """An action as a value."""
    layer, key = getattr(action, "layer", None), getattr(action, "key", None)
    return type(action).__name__, layer, key


def check(before: AgreedState, after: AgreedState, actions: list[object], ranks: tuple[Rank, Rank]) -> None:
    """The promises, for one vote."""
    live = list(before.live_keys)
    committed, new_target = before.committed, False
    for action in actions:
        match action:
            case Discard():
                under_way = before.opened > min(len(rank.staged) for rank in ranks)
                assert new_target or not under_way or before.target is None, "discards a transfer under way"
                new_target = True
            case Commit(layer, _, key):
                assert key > live[layer], "a key goes back or stays"
                live[layer] = key
                if not new_target:
                    assert before.moved[committed] == layer
                    assert all(rank.staged[committed] for rank in ranks), (
                        "commits what is not staged well everywhere"
                    )
                    committed += 1
            case Open(layer, live_row, _):
                assert live_row is after.live_rows[layer], "moves from another row than the live one"
    assert live == after.live_keys
    assert after.last_target >= before.last_target
    assert after.failed >= before.failed
    if after.target is not None:
        assert after.target.key == after.last_target
        assert after.target.key > after.failed
        assert after.committed <= after.opened <= after.committed + after.num_buffers


def reachable(num_buffers: int) -> tuple[list[World], int]:
    """All states, and the number of votes tried."""
    first = World(AgreedState(START, num_buffers=num_buffers), (Rank(), Rank()))
    known = {(first.agreed.state_hash(), first.ranks): first}
    todo, votes = [first], 0
    while todo:
        world = todo.pop()
        opened = world.agreed.opened if world.agreed.target is not None else 0
        staged = (
            world.ranks if world.agreed.target is not None else tuple(Rank(r.newest) for r in world.ranks)
        )
        for ranks in product(*(choices(rank, opened) for rank in staged)):
            following = vote(world, ranks)  # type: ignore[arg-type]
            votes += 1
            key = (following.agreed.state_hash(), following.ranks)
            if key not in known:
                known[key] = following
                todo.append(following)
    return list(known.values()), votes


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_no_reachable_state_breaks_a_promise_and_each_can_still_finish(num_buffers: int) -> None:
    worlds, votes = reachable(num_buffers)
    assert votes > 5000
    print(f"{len(worlds)} states, {votes} votes")
    assert any(world.agreed.failing for world in worlds)
    assert any(len(set(world.agreed.live_keys)) == 2 for world in worlds)
    assert {world.agreed.failed for world in worlds} >= {(0, 0), A.key, B.key, C.key}
    for world in worlds:
        finish(world)


def finish(world: World) -> None:
    """From here on everything arrives and ends well: C is live everywhere, or has failed and nothing is under way."""
    for _ in range(12):
        opened = world.agreed.opened if world.agreed.target is not None else 0
        staged = [rank.staged[:opened] for rank in world.ranks]
        ranks = [Rank(3, there + (True,) * (opened - len(there))) for there in staged]
        world = vote(world, (ranks[0], ranks[1]))
    assert world.agreed.target is None
    assert world.agreed.failed == C.key or set(world.agreed.live_keys) == {C.key}
