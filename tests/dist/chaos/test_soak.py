"""`make soak`: one hostile peer beside 32 honest ranks. What is honest is stored, whatever the peer sends.

EVENROUTE_SOAK_MINUTES says for how long (default 1).
"""

from __future__ import annotations

import os
import re
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from evenroute.dist.client import query_status
from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.store.writer import StoreReader
from evenroute.tools.run.simulated_job import SimulatedJob
from support.control_plane import RebalancerProcess, patience, wait_for
from support.hostile_peer import HostilePeer
from support.ports import free_port

RANKS = 32
JOB = JobShape(4, 32, 64, RANKS, 1, 2, False, "honest")
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")
SETTLE_S = 5.0


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def honest_reasons(reasons: list[str]) -> list[str]:
    """Degradations that do not come from the hostile peer's messages."""
    return [reason for reason in reasons if not re.search("is turned away: the ranks of job", reason)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_hostile_peer_harms_none_of_32_honest_ranks(tmp_path: Path) -> None:
    minutes = float(os.environ.get("EVENROUTE_SOAK_MINUTES", "1"))
    port = free_port()
    flags = ["--interval", "3600", "--http-bind", f"127.0.0.1:{port}"]
    toml = f"[rebalancer]\nmax_rank_silence_s = {10 * patience()}\n"
    with RebalancerProcess(tmp_path, flags=flags, toml=toml) as rebalancer:
        job = SimulatedJob(rebalancer.address, JOB, period_s=0.5)
        job.start(60)

        def all_heard() -> bool:
            job.turn(0.02, windows=False)
            status = rebalancer.status()
            return status.run == job.run and all(rank.heard_s_ago is not None for rank in status.ranks)

        wait_for(all_heard, 60, "all ranks heard")
        first = rebalancer.status()
        hostile = HostilePeer(rebalancer.address, ("127.0.0.1", port), JOB, job.run, first.epoch)
        try:
            memory, slowest, found = soak(rebalancer, job, hostile, minutes)
            assert job.drain(60 * patience()), "honest windows are not acknowledged"
            status = rebalancer.status()
        finally:
            hostile.close()
        acknowledged = sum(rank.stored for rank in job.ranks)
        print(
            f"{minutes:g} minutes: {hostile.sent} hostile messages, answered {hostile.answers}; "
            f"{acknowledged} honest windows acknowledged, {job.resent} sent again; slowest status {slowest:.2f} s; "
            f"memory {memory[0]:.0f} -> {memory[-1]:.0f} MB; counters {status.counters}"
        )
        assert hostile.answers.get("Refusal", 0) > 0
        assert "Ack" not in hostile.answers, "a window of a stranger was taken"
        assert (status.state, status.run, status.epoch, status.model) == (
            "serving",
            job.run,
            first.epoch,
            "honest",
        )
        assert [reason for reasons in found for reason in honest_reasons(reasons)] == []
        assert all(reason.isprintable() for reasons in found for reason in reasons)
        assert status.counters["store_errors"] == 0
        assert memory[-1] < memory[0] + 100, "it grows with what is refused"
        assert slowest < 5 * patience()
        body = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read()
        assert b"evenroute" in body
        job.close()
        assert rebalancer.stop() in (0, 1)
    check_store(rebalancer.store, job, acknowledged)
    log = rebalancer.log()
    assert "\x1b" not in log
    assert [line for line in log.splitlines() if not LOG_LINE.match(line)] == [], "a forged line"


def soak(rebalancer, job: SimulatedJob, hostile: HostilePeer, minutes: float):
    """Memory in MB, the slowest status in seconds, and the degradations seen, once every few seconds."""
    memory, found, slowest = [], [], 0.0
    end = time.monotonic() + 60 * minutes
    look_at = time.monotonic() + SETTLE_S
    while (now := time.monotonic()) < end:
        job.turn(0.005)
        hostile.turn()
        if now >= look_at:
            look_at = now + SETTLE_S
            began = time.monotonic()
            status = query_status(rebalancer.address, timeout_s=60.0)
            slowest = max(slowest, time.monotonic() - began)
            memory.append(resident_mb(rebalancer.process.pid))
            found.append(status.degraded)
    return memory, slowest, found


def check_store(path: Path, job: SimulatedJob, acknowledged: int) -> None:
    """What was acknowledged is stored once, and nothing else."""
    with StoreReader(path) as store:
        assert set(store.jobs()) == {job.run}
        assert [state.last_seq for state in store.rank_states(job.run)] == [rank.stored for rank in job.ranks]
        assert sum(state.num_windows for state in store.rank_states(job.run)) == acknowledged
        _, total = store.total_counts()
        windows = sum(rank.windows for rank in job.ranks)
        assert total is not None
        np.testing.assert_array_equal(total, windows * job.counts)
        assert {row.epoch for row in store.windows()} == {store.epochs()[-1].epoch}
