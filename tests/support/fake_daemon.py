"""A rebalancer in the test's process whose socket is a list: frames are delivered, answers are read, nothing waits."""

from collections import deque

import numpy as np

from evenroute.dist.config import PlannerSettings, RebalancerConfig, RebalancerSettings
from evenroute.dist.protocol.agreement import Version
from evenroute.dist.protocol.types import Phase
from evenroute.dist.rebalancer.process import Rebalancer
from evenroute.dist.wire.control import decode_answer, encode_control
from evenroute.dist.wire.keys import LOCAL_ROLE
from evenroute.dist.wire.link import Received
from evenroute.dist.wire.messages import JobShape, RankStatus, RankWindow, SnapshotRequest, encode
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

JOB = JobShape(2, 4, 6, 2, 1, 2, False, "fuzz")
START = Version.of((0, 0), Placement.initial(2, 4, 6, Topology(2)))
RUN = 77


class FakeLink:
    """A `RouterLink` without a socket."""

    endpoint = "ipc://fuzz"
    zap = None
    dropped = malformed = 0

    def __init__(self):
        self.incoming = deque()
        self.sent = []

    def receive(self, limit):
        while self.incoming:
            yield self.incoming.popleft()

    def send(self, peer, frame, *, control=False):
        self.sent.append((peer, frame, control))
        return True

    def close(self):
        pass


def give_fake_link(made):
    made._link.close()
    made._link = made._ranks._link = FakeLink()


def make_daemon(folder, **planner):
    """A rebalancer with its store in `folder`; without plans unless settings are given."""
    settings = RebalancerSettings(
        bind=f"ipc://{folder}/r.sock", store=str(folder / "run.db"), log_level="error"
    )
    made = Rebalancer(RebalancerConfig(settings, PlannerSettings(**(planner or {"enabled": False}))))
    give_fake_link(made)
    return made


def ask(daemon, request, *, role=LOCAL_ROLE):
    """The answer to an operator's request."""
    daemon._link.sent.clear()
    deliver(daemon, encode_control(request), control=True, role=role)
    return next(decode_answer(frame) for _, frame, control in daemon._link.sent if control)


def deliver(daemon, frame, *, control=False, peer=b"p", role=LOCAL_ROLE):
    daemon._link.incoming.append(Received(peer, role, control, frame))
    daemon._turn(1.0)
    daemon._ranks.store()


def status(daemon, rank, **changes):
    keys = np.zeros((2, 2), "<i8").tobytes()
    digests = np.array(START.row_digests, "<i8").tobytes()
    fence = daemon.core.epoch
    fields = {"vote": 0, "held": (0, 0), "held_digest": START.digest, "token": daemon.core._token, **changes}
    return RankStatus(
        RUN,
        rank,
        JOB,
        rank + 1,  # its identity
        fields.pop("vote"),
        fields.pop("held"),
        fields.pop("held_digest"),
        fence,
        keys,
        digests,
        **fields,
    )


def bring_up(daemon):
    """A running job of two ranks, each with one window stored."""
    deliver(daemon, encode(SnapshotRequest(0, 1, JOB)))
    for rank in (0, 1):
        deliver(daemon, encode(status(daemon, rank)), peer=bytes([rank]))
    for rank in (0, 1):
        deliver(daemon, encode(window(rank, 1)), peer=bytes([rank]))
    assert daemon.core.phase is Phase.SERVING
    assert daemon.core.counters.windows_stored == 2


def window(rank, seq):
    return RankWindow(RUN, rank, seq, 10 * (seq - 1), 10 * seq - 1, 8, np.full((2, 4), 4, "<i8").tobytes())
