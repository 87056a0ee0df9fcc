"""Pure functions of the protocol, computed once for equal contents: what makes the simulator fast."""

from __future__ import annotations

from evenroute.dist.protocol.agreement import Version
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import PreparedPlacement, prepare_placement
from evenroute.dist.wire.messages import (
    JobShape,
    PlacementMessage,
)
from evenroute.eplb.placement.classes import pack_shares
from evenroute.eplb.placement.placement import PlacementRow, row_digest

_prepared: dict[tuple[object, ...], PreparedPlacement] = {}
_slots: dict[bytes, tuple[int, ...]] = {}
_digests: dict[tuple[bytes, bytes | None], int] = {}
_started: dict[tuple[object, ...], Version] = {}


def prepare_cached(message: PlacementMessage, job: JobShape) -> PreparedPlacement:
    """`prepare_placement`, which is pure, computed once for equal contents."""
    wire = message.placement
    key = (message.key, message.digest, wire.physical_to_logical, wire.shares, job)
    if key not in _prepared:
        if len(_prepared) > 20_000:
            _prepared.clear()
        _prepared[key] = prepare_placement(message, job)
    known = _prepared[key]
    return PreparedPlacement(message, known.version, known.error)


def slots_of(row: PlacementRow) -> tuple[int, ...]:
    """The row's experts as a tuple."""
    data = row.slots.tobytes()
    if data not in _slots:
        _slots[data] = tuple(row.slots.tolist())
    return _slots[data]


def digest_of(row: PlacementRow) -> int:
    """The row's digest."""
    key = (row.slots.tobytes(), pack_shares(*row))
    if key not in _digests:
        _digests[key] = row_digest(*row)
    return _digests[key]


def start_version(started: StartedJob) -> Version:
    """`started.version()`, computed once for equal contents."""
    key = (started.key, started.placement.physical_to_logical, started.placement.shares, started.job)
    if key not in _started:
        if len(_started) > 5_000:
            _started.clear()
        _started[key] = started.version()
    return _started[key]
