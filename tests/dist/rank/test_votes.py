"""Votes that fail: every rank knows soon, and names the one that is missing, not those that only wait for it."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as torch_dist

from evenroute.dist.groups import RollCall
from evenroute.dist.rank.votes import VoteError, VoteThread


class Calls:
    """A roll call that another rank has begun after `after` looks."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.looks = 0

    def called(self, operation: str) -> bool:
        assert operation == "vote-7"
        self.looks += 1
        return self.looks > self.after

    def missing(self, operation: str, wait_s: float) -> str:
        return f"missing: rank 3 ({operation}, {wait_s:g} s)"


def test_a_rank_that_waits_for_a_living_one_learns_of_the_failure_long_before_its_limit() -> None:
    """The neighbour of a dead rank sees the connection break; the others wait in the collective for one another."""
    roll_call = Calls(after=1)
    votes = VoteThread(None, limit_s=60.0, roll_call=roll_call)  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(VoteError, match=r"vote 7 \(step 5\).*missing: rank 3 \(vote-7, 3 s\)"):
        votes.wait(7, lambda: "step 5")
    assert 1.5 < time.monotonic() - began < 30.0  # of 60
    assert votes.waited_s > 1.5
    assert votes.close(60.0)


def test_a_limit_below_a_second_is_kept() -> None:
    votes = VoteThread(None, limit_s=-1.5, roll_call=Calls(after=99))  # type: ignore[arg-type]
    with pytest.raises(VoteError, match=r"no result within 0\.5 s"):
        votes.wait(7, lambda: "")
    assert votes.waited_s < 5.0
    assert votes.close(60.0)


class GoingStore:
    """The job's store: its host ends in the middle of the roll call."""

    def __init__(self, lives: int) -> None:
        self.kept: set[str] = set()
        self.lives = lives

    def set_timeout(self, limit: timedelta) -> None: ...

    def set(self, name: str, value: str) -> None:
        self.kept.add(name)

    def check(self, names: list[str]) -> bool:
        self.lives -= 1
        if self.lives < 0:
            raise torch_dist.DistNetworkError("Broken pipe")
        return all(name in self.kept for name in names)


def roll_call(store: GoingStore) -> RollCall:
    call = RollCall.__new__(RollCall)
    call._store, call._rank, call._ep_size = store, 0, 3  # type: ignore[assignment]
    return call


def test_a_roll_call_names_who_was_missing_when_the_store_went() -> None:
    store = GoingStore(lives=4)  # one round of three ranks, and one more look
    store.kept.add("vote-7/2")
    call = roll_call(store)
    assert not call.called("vote-8")
    store.lives = 4
    assert call.missing("vote-7", 3.0) == "missing: rank 1 (when the job's store went)"
    assert not call.called("vote-7"), "a store that is gone calls nobody"
    assert "vote-7/called" in store.kept
    assert roll_call(GoingStore(lives=0)).missing("vote-7", 3.0).startswith("the job's store is gone too")
