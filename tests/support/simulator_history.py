"""What happened in a run of the simulator, and the protocol's promises as functions over it.

Each check takes plain records and returns violations, one line each, so that the chaos tests can give it the logs of
real processes too.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evenroute.dist.wire.messages import Key


class StepRecord(NamedTuple):
    """One rank's step: the key (and, if known, row digest) of each layer it was routed with."""

    run: int
    rank: int
    step: int
    keys: tuple[Key, ...]
    digests: tuple[int, ...] = ()


class CommitRecord(NamedTuple):
    """One rank's commit of a layer: what the weights hold then, and what the table says they hold."""

    run: int
    rank: int
    layer: int
    key: Key
    weights: tuple[int, ...]
    table: tuple[int, ...]


class TransferRecord(NamedTuple):
    """One rank's ``number``-th transfer on the migration's communicator."""

    run: int
    rank: int
    number: int
    what: Any


class TargetRecord(NamedTuple):
    """A rank made ``key`` its target (``failed`` False), or gave it up."""

    run: int
    rank: int
    key: Key
    failed: bool


class SealRecord(NamedTuple):
    """A rank sent a window; ``content`` stands for steps, tokens and counts."""

    run: int
    rank: int
    seq: int
    content: Any


class AckRecord(NamedTuple):
    """A rank took an acknowledgement; ``stored`` says whether a store of a leading epoch held the window then."""

    run: int
    rank: int
    seq: int
    fence: int
    stored: bool


class WriteRecord(NamedTuple):
    """A transaction of a store by ``epoch`` while ``last`` was the store's last one."""

    store: int
    epoch: int
    last: int
    what: str


class ViewRecord(NamedTuple):
    """A life's view after a status: current run and number of votes decided."""

    life: int
    run: int
    vote: int


@dataclass
class History:
    """Append-only. ``faults``: violations that were seen as they happened (an exception in a core, for one)."""

    steps: list[StepRecord] = field(default_factory=list)
    commits: list[CommitRecord] = field(default_factory=list)
    transfers: list[TransferRecord] = field(default_factory=list)
    targets: list[TargetRecord] = field(default_factory=list)
    published: list[tuple[Key, int, tuple[int, ...]]] = field(
        default_factory=list
    )  # key, digest, row digests
    seals: list[SealRecord] = field(default_factory=list)
    acks: list[AckRecord] = field(default_factory=list)
    writes: list[WriteRecord] = field(default_factory=list)
    views: list[ViewRecord] = field(default_factory=list)
    stored: list[tuple[int, SealRecord]] = field(default_factory=list)  # store, window as it was received
    fences: list[tuple[int, int, int]] = field(default_factory=list)  # run, rank, fence
    faults: list[str] = field(default_factory=list)


def same_keys_in_each_step(steps: Iterable[StepRecord]) -> list[str]:
    """No step is routed with different placements on different ranks."""
    first: dict[tuple[int, int], StepRecord] = {}
    found = []
    for record in steps:
        other = first.setdefault((record.run, record.step), record)
        if other.keys != record.keys or other.digests != record.digests:
            found.append(
                f"step {record.step}: rank {other.rank} routes with {other.keys} {other.digests}, "
                f"rank {record.rank} with {record.keys} {record.digests}"
            )
    return found


def keys_never_go_back(steps: Iterable[StepRecord]) -> list[str]:
    """The key of a layer never falls on any rank."""
    last: dict[tuple[int, int], StepRecord] = {}
    found = []
    for record in steps:
        before = last.get((record.run, record.rank))
        last[record.run, record.rank] = record
        if before is None or before.keys == record.keys:
            continue
        for layer, (old, new) in enumerate(zip(before.keys, record.keys, strict=True)):
            if new < old:
                found.append(
                    f"step {record.step}: rank {record.rank} layer {layer} goes back from {old} to {new}"
                )
    return found


def rows_belong_to_their_keys(
    steps: Iterable[StepRecord], published: Iterable[tuple[Key, int, tuple[int, ...]]]
) -> list[str]:
    """A layer whose key is K is routed with the row of version K."""
    rows = {key: digests for key, _, digests in published}
    found = []
    seen: set[tuple[tuple[Key, ...], tuple[int, ...]]] = set()
    for record in steps:
        if (record.keys, record.digests) in seen:
            continue
        seen.add((record.keys, record.digests))
        for layer, key in enumerate(record.keys):
            if key in rows and rows[key][layer] != record.digests[layer]:
                found.append(f"step {record.step}: layer {layer} has key {key} but not its row")
    return found


def tables_and_weights_agree(commits: Iterable[CommitRecord]) -> list[str]:
    """After each commit the slots hold the experts that the table says."""
    return [
        f"rank {c.rank} layer {c.layer} key {c.key}: weights are {c.weights}, the table says {c.table}"
        for c in commits
        if c.weights != c.table
    ]


def transfers_match(transfers: Iterable[TransferRecord]) -> list[str]:
    """All ranks enqueue the same transfers in the same order."""
    first: dict[tuple[int, int], TransferRecord] = {}
    found = []
    for record in transfers:
        other = first.setdefault((record.run, record.number), record)
        if other.what != record.what:
            found.append(
                f"transfer {record.number}: rank {other.rank} {other.what}, rank {record.rank} {record.what}"
            )
    return found


def keys_are_targets_once(targets: Iterable[TargetRecord]) -> list[str]:
    """A key is target at most once, and targets rise."""
    last: dict[tuple[int, int], Key] = {}
    found = []
    for record in targets:
        if record.failed:
            continue
        before = last.get((record.run, record.rank))
        if before is not None and record.key <= before:
            found.append(f"rank {record.rank}: target {record.key} after {before}")
        last[record.run, record.rank] = record.key
    return found


def keys_have_one_content(published: Iterable[tuple[Key, int, tuple[int, ...]]]) -> list[str]:
    """Whatever was published under a key, by whichever rebalancer, is one placement."""
    digests: dict[Key, int] = {}
    return [
        f"key {key} stands for digests {digests[key]:#x} and {digest:#x}"
        for key, digest, _ in published
        if digests.setdefault(key, digest) != digest
    ]


def windows_never_change(seals: Iterable[SealRecord], stored: Iterable[tuple[int, SealRecord]]) -> list[str]:
    """A window that was sent once is the same each time, and is stored as it was sent."""
    first: dict[tuple[int, int, int], SealRecord] = {}
    found = []
    for record in [*seals, *(record for _, record in stored)]:
        key = (record.run, record.rank, record.seq)
        if first.setdefault(key, record).content != record.content:
            found.append(f"rank {record.rank}: window {record.seq} changed after it was sent")
    return found


def windows_are_stored_once(stored: Iterable[tuple[int, SealRecord]]) -> list[str]:
    """No store holds a window twice, nor two windows that share a step of a rank."""
    seen: set[tuple[int, int, int, int]] = set()
    ends: dict[tuple[int, int, int], int] = {}
    found = []
    for store, record in stored:
        key = (store, record.run, record.rank, record.seq)
        if key in seen:
            found.append(f"rank {record.rank}: window {record.seq} is twice in store {store}")
        seen.add(key)
        first, last = record.content[0], record.content[1]
        if first <= ends.get(key[:3], -1):
            found.append(f"rank {record.rank}: step {first} is twice in store {store}")
        ends[key[:3]] = last
    return found


def acknowledged_is_stored(acks: Iterable[AckRecord]) -> list[str]:
    """What a rank stops keeping was committed by an epoch that leads it, in that epoch's store."""
    return [
        f"rank {a.rank}: window {a.seq} acknowledged, but in no store of epoch {a.fence} or later"
        for a in acks
        if not a.stored
    ]


def one_master_writes(writes: Iterable[WriteRecord]) -> list[str]:
    """Each transaction is of the store's last epoch."""
    return [
        f"store {w.store}: {w.what} by epoch {w.epoch} after epoch {w.last} began"
        for w in writes
        if w.epoch != w.last
    ]


def views_never_go_back(views: Iterable[ViewRecord]) -> list[str]:
    """Within a run the view's vote number rises; a run that was left is not taken up again by the same life."""
    last: dict[int, ViewRecord] = {}
    left: dict[int, set[int]] = defaultdict(set)
    found = []
    for record in views:
        before = last.get(record.life)
        last[record.life] = record
        if before is None:
            continue
        if before.run != record.run:
            left[record.life].add(before.run)
            if record.run in left[record.life]:
                found.append(f"life {record.life}: run {record.run:#x} is taken up again")
        elif record.vote < before.vote:
            found.append(f"life {record.life}: view goes back from vote {before.vote} to {record.vote}")
    return found


def fences_never_go_back(fences: Iterable[tuple[int, int, int]]) -> list[str]:
    """The highest epoch heard by a rank in a run never falls."""
    last: dict[tuple[int, int], int] = {}
    found = []
    for run, rank, fence in fences:
        if fence < last.get((run, rank), 0):
            found.append(f"rank {rank}: fence goes back from {last[run, rank]} to {fence}")
        last[run, rank] = fence
    return found


def counts_are_accounted_for(
    *,
    sealed: Mapping[int, int],
    stored: Mapping[int, Sequence[int]],
    missing: Mapping[int, int],
    held_elsewhere: Mapping[int, set[int]],
) -> list[str]:
    """At rest, for the ranks of a living run: windows 1..sealed are in the store once, but for those that the store
    reports missing; and each of these was acknowledged by a store that is lost."""
    found = []
    for rank, number in sealed.items():
        here = list(stored.get(rank, ()))
        gone = set(range(1, number + 1)) - set(here)
        if len(set(here)) != len(here) or len(gone) != missing.get(rank, 0):
            found.append(
                f"rank {rank}: {number} windows sealed, {len(here)} stored, {missing.get(rank, 0)} reported missing"
            )
        if not gone <= held_elsewhere.get(rank, set()):
            found.append(f"rank {rank}: windows {sorted(gone)} are lost though no lost store had them")
    return found


def violations(history: History) -> list[str]:
    """All promises that can be judged from a history alone."""
    return [
        *history.faults,
        *same_keys_in_each_step(history.steps),
        *keys_never_go_back(history.steps),
        *rows_belong_to_their_keys(history.steps, history.published),
        *tables_and_weights_agree(history.commits),
        *transfers_match(history.transfers),
        *keys_are_targets_once(history.targets),
        *keys_have_one_content(history.published),
        *windows_never_change(history.seals, history.stored),
        *windows_are_stored_once(history.stored),
        *acknowledged_is_stored(history.acks),
        *one_master_writes(history.writes),
        *views_never_go_back(history.views),
        *fences_never_go_back(history.fences),
    ]
