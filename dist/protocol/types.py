"""Settings, counters and small records of the rebalancer core."""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.wire.messages import Down

Peer: TypeAlias = Hashable
EPOCH_RANDOM_BITS = 20
MAX_LIVES_AHEAD = 1 << 20
"""Lives by which a rank's fence may lie above what this store knows (others were lost): above that it is no fence."""


class Phase(Enum):
    """Waiting to hear the job, serving with an epoch, or ended."""

    WAITING = "waiting"
    SERVING = "serving"
    ENDED = "ended"


@dataclass(frozen=True)
class Outgoing:
    """A message for one peer."""

    peer: Peer
    message: Down


@dataclass(frozen=True)
class Timeouts:
    """``publish_timeout_s``: how long a version may stay unfinished before a newer one may follow; doubles each time
    that was needed, up to ``max_publish_timeout_s``. ``live_s``: a rank that was heard so
    lately is alive. ``pid`` is noted with the epoch."""

    publish_timeout_s: float = 60.0
    max_publish_timeout_s: float = 3600.0
    rows_resend_s: float = 1.0
    live_s: float = 5.0
    pid: int = 0


@dataclass(frozen=True, eq=False)
class PlacementInfo:
    """What is kept with a published placement: ``moves`` int64 [L], slots moved as planned."""

    moves: NDArray[np.int64]
    policy: str
    reason: str
    balancedness_before: float | None = None
    balancedness_predicted: float | None = None


@dataclass(frozen=True)
class Notice:
    """Something to log (and to count): ``kind`` is a short fixed word, ``text`` one line."""

    kind: str
    text: str


@dataclass
class RebalancerCounters:
    """What this life saw; for metrics."""

    statuses: int = 0
    statuses_of_other_runs: int = 0
    windows_stored: int = 0
    windows_duplicate: int = 0
    windows_missing: int = 0
    windows_rejected: int = 0
    windows_over_announced: int = 0  # stored, though they hold more counts than their tokens can make
    windows_ignored: int = 0  # come again: of another run, before the life began, of an unknown peer
    messages_rejected: int = 0
    placements_published: int = 0
    placements_resent: int = 0
    store_errors: int = 0
