"""Mutated frames against the daemon itself: its decoders, roles, handlers and store, everything but the socket.

The normal suite runs a slice; the long run is `pytest -m slow tests/dist/rebalancer/test_fuzz_daemon.py` (10^6 frames;
EVENROUTE_FUZZ_FRAMES for another number).
"""

import os
import random
from dataclasses import replace

import pytest

from evenroute.dist.protocol.types import Phase
from evenroute.dist.wire.control import RecordRead, RecordStart, RecordStop, StatusRequest, encode_control
from evenroute.dist.wire.keys import LOCAL_ROLE
from evenroute.dist.wire.messages import Rows, SnapshotRequest, encode
from evenroute.dist.wire.placement import pack_placement
from evenroute.dist.wire.recording import RecordReport
from support.fake_daemon import JOB, RUN, START, bring_up, deliver, make_daemon, status, window

REFUSALS = ("rejected_decode", "rejected_content", "rejected_role", "windows_rejected")


@pytest.fixture
def daemon(tmp_path):
    made = make_daemon(tmp_path)
    yield made
    made._release()


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
        return make_daemon(folder)

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
