"""A member that is slow to decide a vote which names an announced change."""

import numpy as np

from evenroute.dist.membership.member import MemberCore
from evenroute.dist.wire.membership import Member, MemberOrder, MembershipRecord, RecordMessage
from evenroute.dist.wire.messages import JobShape

EPOCH = 1 << 20
PEOPLE = tuple(Member(number, 100 + number, "host", 1) for number in range(3))
ROWS = np.array([[0, 1, 1, 0, 0, 1]], np.int32)


def record(number: int, prev: int, members: tuple[int, ...], columns: bytes = b"") -> MembershipRecord:
    shape = JobShape(1, 2, 2 * len(members), len(members))
    kind = "start" if number == 1 else "change"
    people = tuple(PEOPLE[one] for one in members)
    return MembershipRecord(
        7, number, prev, kind, number + 7, (EPOCH, number), people, shape, columns=columns
    )


def member(place: int) -> MemberCore:
    """Ready, and told to go, for membership 2, which member 0 leaves."""
    core = MemberCore(PEOPLE[place], record(1, 0, (0, 1, 2)))
    core.served()
    core.receive(RecordMessage(EPOCH, record(2, 1, (1, 2))), 0.0)
    core.formed(2)
    core.receive(MemberOrder(7, EPOCH, head=2, go=2), 0.0)
    assert core.go == 2
    return core


def test_a_change_that_follows_the_one_it_is_about_to_leave_by_takes_nothing_from_it() -> None:
    core = member(0)
    core.receive(RecordMessage(EPOCH, record(3, 2, (1, 2))), 0.0)  # the others serve in 2 by now
    assert (core.seen, core.ready, core.go) == (3, 2, 2)
    found = core.switch(2, ROWS, 2)
    assert found is not None
    assert core.left == core.installed == 2


def test_a_vote_for_a_change_that_others_have_refused_is_decided_after_the_next_offer() -> None:
    core = member(1)
    core.receive(RecordMessage(EPOCH, record(3, 1, (0, 1))), 0.0)  # 2 is void for the rebalancer
    core.formed(3)
    core.receive(MemberOrder(7, EPOCH, head=3, go=3), 0.0)
    uncovered = np.array([[1, 1, 0, 0, 0, 0]], np.int32)  # expert 1 only where member 0 is
    assert core.switch(2, uncovered, 2) is None
    assert (core.refused, core.go, core.ready) == (2, 3, 3)
    assert core.switch(3, uncovered, 2) is not None
    assert core.installed == 3
