"""One hostile peer beside 32 honest ranks, for minutes, against a real rebalancer: `make soak MINUTES=30`.

It sends what once ended a rebalancer or its store: fences out of reach, windows of impossible steps, numbers of other
ranks' windows, half-open requests to the metrics port, names that write lines of their own into the log.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.messages import (
    JobShape,
    MessageError,
    RankStatus,
    RankWindow,
    SnapshotRequest,
    Token,
    Up,
    decode_down,
    encode,
)
from evenroute.eplb.store.writer import StoreReader
from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import RebalancerProcess, wait_for

JOB = JobShape(4, 64, 96, 32, 1, 2, False, "soak")
MINUTES = float(os.environ.get("EVENROUTE_SOAK_MINUTES", "2"))
FLAGS = ["--interval", "3600", "--planner", "support.stub_planner:plan", "--metrics-bind", "127.0.0.1:0"]


class Hostile(threading.Thread):
    """Everything at once, until `stop` is set; it may learn the job's run, as any viewer may, and echoes tokens."""

    def __init__(self, address: str, metrics: str, run: int) -> None:
        super().__init__(name="hostile", daemon=True)
        self.stop = threading.Event()
        self.sent = 0
        self._run = run
        self._token = 0
        self._rng = random.Random(5)
        host, _, port = metrics.removeprefix("http://").partition("/")[0].rpartition(":")
        self._metrics = (host, int(port))
        self._address = address
        self._held: list[socket.socket] = []

    def run(self) -> None:
        link = DealerLink(parse_address(self._address, field="address"), keys=None, max_message_bytes=1 << 24)
        while not self.stop.is_set():
            for message in self._messages():
                self.sent += link.send(encode(message))
            link.send(self._rng.randbytes(200))
            self._half_open()
            for frames in link.receive(100):
                with suppress(MessageError):
                    answer = decode_down(frames[0])
                    self._token = answer.token if isinstance(answer, Token) else self._token
            time.sleep(0.005)
        link.close(0)
        for connection in self._held:
            connection.close()

    def _messages(self) -> Iterator[Up]:
        rank, counts = self._rng.randrange(32), np.ones((4, 64), "<i8").tobytes()
        keys, digests = np.zeros((4, 2), "<i8").tobytes(), np.zeros(4, "<i8").tobytes()
        for run in (self._run, self._run ^ 1):
            for fence in (2**62 - 1, 5 << 20):
                yield RankStatus(run, rank, JOB, 7, 2**40, (0, 0), 0, fence, keys, digests, token=self._token)
            for last in (2**44 - 1, 2**62 - 1):
                yield RankWindow(run, rank, 1, 0, last, 8, counts)
            yield RankWindow(run, rank, 2**40, 0, 2**42, 0, bytes(len(counts)))
        forged = JobShape(4, 64, 96, 32, 1, 2, False, "x\x1b[2J\n2099-01-01 ERROR forged line")
        yield SnapshotRequest(0, 1, forged)

    def _half_open(self) -> None:
        with suppress(OSError):
            connection = socket.create_connection(self._metrics, timeout=1.0)
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")
            self._held.append(connection)
        while len(self._held) > 300:
            self._held.pop(0).close()


@pytest.mark.slow
@pytest.mark.timeout(int(60 * MINUTES) + 600)
def test_a_hostile_peer_takes_nothing_from_the_others(tmp_path):
    with RebalancerProcess(tmp_path, bind="tcp://127.0.0.1:0", flags=FLAGS) as rebalancer:
        job = SimulatedJob(rebalancer.address, JOB, period_s=0.5)
        job.start(60)
        wait_for(lambda: job.turn(0.05) or rebalancer.status().run == job.run, 60, "the job's run")
        epoch = rebalancer.status().epoch
        metrics = json.loads(rebalancer.ready.read_text())["metrics"]
        hostile = Hostile(rebalancer.address, metrics, job.run)
        hostile.start()
        end = time.monotonic() + 60 * MINUTES
        looked_at = 0.0
        while time.monotonic() < end:
            job.turn(0.05)
            if time.monotonic() - looked_at > 5.0:
                looked_at = time.monotonic()
                status = rebalancer.status()
                assert (status.run, status.epoch, status.state) == (job.run, epoch, "serving")
                assert len(os.listdir(f"/proc/{rebalancer.process.pid}/fd")) < 600
        hostile.stop.set()
        hostile.join(30)
        assert job.drain(60), "every window of the honest ranks is acknowledged"
        status = rebalancer.status()
        assert status.counters["rejected_internal"] == 0
        wait_for(
            lambda: urllib.request.urlopen(
                f"http://{hostile._metrics[0]}:{hostile._metrics[1]}/metrics"
            ).read(),
            60,
            "the metrics",
        )
        stored = job.sent
        job.close()
        assert rebalancer.stop() == 0
    assert hostile.sent > 100 * MINUTES
    with StoreReader(rebalancer.store) as reader:
        states = reader.rank_states(job.run)
        assert sum(state.num_windows for state in states) == stored
        assert [state.missing for state in states] == [0] * JOB.ep_size
        assert [row.epoch for row in reader.epochs()] == [epoch]
    log = rebalancer.log()
    assert "\x1b" not in log
    assert not [line for line in log.splitlines() if line.startswith("2099")]
    print(f"{MINUTES:g} minutes, {hostile.sent} hostile messages, {stored} windows stored")
