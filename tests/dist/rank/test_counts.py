"""What is counted is sent or told: takes that wait for a copy, buffers that are all under way, the end of a job."""

from __future__ import annotations

import logging
import os
import threading
import time

import numpy as np
import pytest
import zmq

from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.rank.counts import CountTaker
from evenroute.dist.rank.thread import AgentThread, Take
from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.messages import JobShape
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters

pytestmark = pytest.mark.timeout(60)


class NoRecorder:
    session = None

    def due(self, now):
        return []

    def close(self, limit_s):
        pass


class SlowBuffer:
    """A copy off the device that lies behind a long forward pass."""

    counts = np.ones((2, 8), np.int64)

    def __init__(self, copied):
        self.copied = copied

    def wait(self):
        assert self.copied.wait(30)


@pytest.fixture
def thread(tmp_path):
    """An agent's thread whose rebalancer takes the connection and never acknowledges."""
    placement = Placement.initial(2, 8, 8, Topology(1))
    job = JobShape(2, 8, 8, 1, top_k=8)  # a row of `SlowBuffer` in each layer
    started = StartedJob(run=5, epoch=0, key=(0, 0), job=job, placement=pack_placement(placement))
    core = RankCore(started, rank=0, config=RankConfig())
    address = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.bind(address)
        link = DealerLink(parse_address(address, field="a"), keys=None, max_message_bytes=1 << 26)
        found = AgentThread(
            core, threading.RLock(), link, silence_limit_s=60, recorder=lambda wake: NoRecorder()
        )
        found.start()
        yield found
        if found._thread.is_alive():
            found.close(0.0, goodbye=False)


def waiting(thread):
    with thread.lock:
        return thread.waiting(), thread.core.unsent()


def test_a_take_whose_copy_is_under_way_is_not_drained(thread):
    copied = threading.Event()
    thread.hand_over(Take(0, 3, 4, SlowBuffer(copied), lambda buffer: None))
    time.sleep(0.2)
    assert not thread.drained()
    assert waiting(thread)[0] == (4, (0, 3))
    copied.set()
    assert not thread.close(0.5, goodbye=False)  # never acknowledged
    (tokens, steps), unsent = waiting(thread)
    assert (tokens, steps) == (0, None)
    assert unsent.in_flight_tokens + unsent.open_tokens == 4


def test_parts_of_a_window_are_told_once(thread):
    ready = threading.Event()
    ready.set()
    for step in range(3):
        thread.hand_over(Take(step, step, 2, SlowBuffer(ready), lambda buffer: None, ends_window=False))
    deadline = time.monotonic() + 10
    while thread._takes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert waiting(thread)[0] == (6, (0, 2))
    thread.close(0.5, goodbye=False)
    (tokens, _), unsent = waiting(thread)
    assert tokens + unsent.in_flight_tokens + unsent.open_tokens == 6


def test_a_failed_copy_does_not_hold_up_the_next(thread, caplog):
    class Bad(SlowBuffer):
        def wait(self):
            raise RuntimeError("the copy failed")

    ready, freed = threading.Event(), []
    ready.set()
    with caplog.at_level(logging.CRITICAL, "evenroute.dist.agent"):
        thread.hand_over(Take(0, 0, 1, Bad(ready), freed.append))
        thread.hand_over(Take(1, 1, 1, SlowBuffer(ready), freed.append))
        deadline = time.monotonic() + 10
        while len(freed) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(freed) == 2
    assert thread.errors == 1
    assert waiting(thread)[1].in_flight_steps == (1, 1)


def test_a_wake_after_the_end_writes_into_nobodys_file(thread, tmp_path):
    descriptor = thread._wake
    thread.close(0.0, goodbye=False)
    files = [(tmp_path / "first").open("wb", buffering=0)]
    while files[-1].fileno() < descriptor:
        files.append((tmp_path / str(len(files))).open("wb", buffering=0))
    thread.wake()
    assert not any(os.fstat(file.fileno()).st_size for file in files)
    for file in files:
        file.close()


def taker(window_steps=1):
    counters, handed = ExpertCounters(1, 4, device="cpu"), []
    taken = CountTaker(counters, handed.append, reports=True, window_steps=window_steps, wait_limit_s=1.0)
    return taken, counters, handed


def run_steps(taken, counters, first, last):
    for step in range(first, last):
        taken.begin_step(step, count=True, per_pass=False)
        taken.begin_pass(step, 8, count=True, per_pass=False)
        counters.counts += 1


def test_the_end_waits_for_a_buffer_and_takes_what_is_left():
    taken, counters, handed = taker()
    run_steps(taken, counters, 0, 4)
    assert [(take.first_step, take.last_step) for take in handed] == [(0, 0), (1, 1), (2, 2)]
    timer = threading.Timer(0.2, lambda: handed[0].release(handed[0].buffer))
    timer.start()
    assert taken.finish(4, 10.0)
    assert (handed[-1].first_step, handed[-1].last_step, handed[-1].tokens) == (3, 3, 8)
    assert not counters.counts.any()


def test_the_end_tells_what_it_could_not_take():
    taken, counters, _ = taker()
    run_steps(taken, counters, 0, 4)
    assert not taken.finish(4, 0.05)
    assert taken.first_step == 3
    assert counters.counts.sum() == 4


def test_buffers_taken_last_in_first_out_are_never_refilled_before_their_release():
    """Every take holds the counts of its own steps, whatever order the buffers come back in."""
    draw = np.random.default_rng(0)
    taken, counters, handed = taker()
    out, seen = [], 0
    for step in range(200):
        taken.begin_step(step, count=True, per_pass=False)
        out.extend(handed)
        handed.clear()
        while out and draw.random() < 0.6:
            take = out.pop(int(draw.integers(len(out))))
            assert take.buffer.counts.sum() == 4 * sum(range(take.first_step, take.last_step + 1))
            assert take.tokens == 8 * (take.last_step - take.first_step + 1)
            seen += 1
            take.release(take.buffer)
        taken.begin_pass(step, 8, count=True, per_pass=False)
        counters.counts += step
    assert seen > 60
