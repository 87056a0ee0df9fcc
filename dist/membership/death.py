"""What a death record says: pure functions of the reports about the head and of the records before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from evenroute.dist.membership.ledger import Ledger
from evenroute.dist.wire.membership import CaughtVote, Member, MemberReport, MembershipRecord, nodes_of
from evenroute.dist.wire.messages import JobShape, Key

Reports = Mapping[int, MemberReport]
"""By member number."""


def top_of(ledger: Ledger, got: Reports) -> MembershipRecord:
    """What the death record follows: the highest that some report has installed, or the last that is a fact."""
    facts = [record.number for record in ledger.records if record.kind != "change"]
    number = max([*(report.installed for report in got.values()), *facts[-1:]])
    record = ledger.find(number)
    assert record is not None
    return record


def last_done(ledger: Ledger, top: MembershipRecord, report: MemberReport) -> int:
    """The last step that counts as done as far as this member knows; deaths that it has not heard of bound it."""
    bounds = [
        record.done
        for record in ledger.records
        if report.installed < record.number <= top.number and record.kind == "death"
    ]
    return min([report.completed, *bounds])


def caught_votes(got: Reports) -> tuple[CaughtVote, ...]:
    """Of each membership the highest vote that somebody has decided."""
    highest: dict[int, CaughtVote] = {}
    for report in got.values():
        for vote in report.votes:
            if vote.membership not in highest or vote.vote > highest[vote.membership].vote:
                highest[vote.membership] = vote
    return tuple(highest[one] for one in sorted(highest))


def death_record(
    ledger: Ledger,
    top: MembershipRecord,
    numbers: Sequence[int],
    got: Reports,
    *,
    number: int,
    run: int,
    key: Key,
) -> MembershipRecord | None:
    """The members ``numbers`` of ``top`` go on; None where their slots can't hold all experts."""
    members = tuple(member for member in top.members if member.number in numbers)
    if len(members) * top.num_local_slots < top.shape.num_logical_experts:
        return None
    gone = [one for one in top.numbers if one not in numbers]
    text = f"membership {number}: {len(members)} ranks of {len(top.members)}"
    if gone:
        text += f", gone: member{'s' if len(gone) > 1 else ''} {', '.join(map(str, gone[:8]))}"
    return MembershipRecord(
        job=top.job,
        number=number,
        prev=top.number,
        kind="death",
        run=run,
        key=key,
        members=members,
        shape=shape_of(top, members),
        done=min(last_done(ledger, top, got[one]) for one in numbers),
        catch=caught_votes(got),
        text=text,
    )


def too_few(top: MembershipRecord, ranks: int) -> str:
    """Why the job can't go on with so many ranks."""
    local, experts = top.num_local_slots, top.shape.num_logical_experts
    return (
        f"{ranks} ranks with {local} slots each are left, they can't hold {experts} experts: "
        f"{-(-experts // local)} are needed"
    )


def shape_of(record: MembershipRecord, members: tuple[Member, ...]) -> JobShape:
    """The job's shape with these members: as many slots a rank as before."""
    slots, ranks = record.num_local_slots * len(members), len(members)
    return msgspec.structs.replace(record.shape, num_slots=slots, ep_size=ranks, num_nodes=nodes_of(members))
