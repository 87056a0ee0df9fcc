"""Mutated frames against the daemon itself: its decoders, roles, handlers and store, everything but the socket.

The normal suite runs a slice; the long run is `pytest -m slow tests/dist/rebalancer/test_fuzz_daemon.py` (10^6 frames;
EVENROUTE_FUZZ_FRAMES for another number).
"""

import os
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from evenroute.dist.config import PlannerSettings, RebalancerConfig, RebalancerSettings
from evenroute.dist.protocol.agreement import Version
from evenroute.dist.protocol.types import Phase
from evenroute.dist.rebalancer.process import Rebalancer
from evenroute.dist.wire.control import RecordRead, RecordStart, RecordStop, StatusRequest, encode_control
from evenroute.dist.wire.keys import LOCAL_ROLE
from evenroute.dist.wire.link import Received
from evenroute.dist.wire.messages import JobShape, RankStatus, RankWindow, Rows, SnapshotRequest, encode
from evenroute.dist.wire.placement import pack_placement
from evenroute.dist.wire.recording import RecordReport
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

JOB = JobShape(2, 4, 6, 2, 1, 2, False, "fuzz")
START = Version.of((0, 0), Placement.initial(2, 4, 6, Topology(2)))
RUN = 77
REFUSALS = ("rejected_decode", "rejected_content", "rejected_role", "windows_rejected")


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


@pytest.fixture
def daemon(tmp_path):
    settings = RebalancerSettings(
        bind=f"ipc://{tmp_path}/r.sock", store=str(tmp_path / "run.db"), log_level="error"
    )
    config = RebalancerConfig(settings, PlannerSettings(enabled=False))
    made = Rebalancer(config)
    give_fake_link(made)
    yield made
    made._release()


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
        1000 + rank,  # its identity
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


def corpus(daemon):
    ups = [
        encode(status(daemon, 0)),
        encode(status(daemon, 1, vote=1, token=5)),
        encode(window(0, 2)),
        encode(window(1, 2)),
        encode(Rows(RUN, 0, 0, pack_placement(START.placement))),
        encode(SnapshotRequest(0, 9, JOB)),
    ]
    controls = [
        encode_control(r)
        for r in (
            StatusRequest(),
            RecordStart(),
            RecordStart(mode="per_token", name="fuzz"),
            RecordStop(),
            RecordRead(),
            RecordRead(5, 1),
            RecordReport(RUN, 1, 7, "recording", 5, 40, 1000, host="h", path="/tmp/x"),
            RecordReport(RUN, 0, 7, "failed", reason="disk"),
        )
    ]
    return [(frame, False) for frame in ups] + [(frame, True) for frame in controls]


def mutate(rng, frame):
    data = bytearray(frame)
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(6)
        at = rng.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC0, 0xC1, 0xDF, 0xFF))
        elif kind == 2:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 4:
            data = data[: rng.randrange(len(data) + 1)]
        else:
            data += data[at : at + 16]
    return bytes(data)


def state(daemon):
    """What a refused frame must not move."""
    core = daemon.core
    ranks = {} if core.view is None else {r: (v.vote, v.held, v.fence) for r, v in core.view.ranks.items()}
    stored = replace(core.counters, **dict.fromkeys(("messages_rejected", "windows_rejected"), 0))
    return (
        core.phase,
        core.epoch,
        core.version,
        core.newest,
        core.view,
        core.job,
        ranks,
        stored,
        daemon.recorder.active,
    )


def fuzz(daemon, number, seed):
    """Deliver `number` mutated frames; the number of those refused."""
    rng = random.Random(seed)
    frames = corpus(daemon)
    refused = 0
    for count in range(number):
        frame, control = rng.choice(frames)
        broken = mutate(rng, frame)
        before, counts = state(daemon), refusals(daemon)
        deliver(
            daemon,
            broken,
            control=control,
            peer=rng.choice((bytes([0]), bytes([1]), rng.randbytes(5))),
            role=rng.choice((LOCAL_ROLE, "rank", "viewer")),
        )
        if refusals(daemon) > counts:
            refused += 1
            assert state(daemon) == before, (seed, count, broken)
        assert daemon._rejected["internal"] == 0, (seed, count, broken)
        daemon._link.sent.clear()
        if daemon.core.phase is not Phase.SERVING:
            return refused, count + 1
    return refused, number


def refusals(daemon):
    rejected = sum(daemon._rejected[kind] for kind in ("decode", "content", "role"))
    counters = daemon.core.counters
    return rejected + counters.messages_rejected + counters.windows_rejected


def run_fuzz(daemon_of, number, seed):
    """A frame may, rightly, end a life (a fence above its own): then the next life goes on."""
    refused = done = lives = 0
    while done < number:
        daemon = daemon_of(lives)
        bring_up(daemon)
        more, count = fuzz(daemon, number - done, seed + lives)
        refused, done, lives = refused + more, done + count, lives + 1
        daemon._release()
    assert refused > number // 2, "most mutations are refused"
    return refused, lives


def daemons(tmp_path):
    def make(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        settings = RebalancerSettings(
            bind=f"ipc://{folder}/r.sock", store=str(folder / "run.db"), log_level="error"
        )
        made = Rebalancer(RebalancerConfig(settings, PlannerSettings(enabled=False)))
        give_fake_link(made)
        return made

    return make


@pytest.mark.parametrize("seed", [1, 2])
def test_refused_frames_change_nothing_and_nothing_crashes(tmp_path, seed):
    refused, _ = run_fuzz(daemons(tmp_path), 3000, 1000 * seed)  # which asserts after every frame
    assert refused > 0.9 * 3000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_mutated_frames(tmp_path):
    frames = int(os.environ.get("EVENROUTE_FUZZ_FRAMES", "1000000"))
    refused, lives = run_fuzz(daemons(tmp_path), frames, 7)
    assert refused > 0.9 * frames
    print(f"refused {refused}, lives {lives}")


def test_the_unchanged_frames_are_all_taken(daemon):
    """So that the fuzz starts from frames that do get in."""
    bring_up(daemon)
    for frame, control in corpus(daemon):
        before = refusals(daemon)
        deliver(daemon, frame, control=control)
        assert refusals(daemon) == before
    assert daemon.core.counters.windows_stored == 4
