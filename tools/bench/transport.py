"""Load generator for the transport: many simulated ranks against one real rebalancer process. No torch.

    evenroute bench transport --ranks 1024 --seconds 60 --rate 1
    evenroute bench transport --ranks 1024 --seconds 20 --rate 0      # as fast as it goes

Simulated ranks follow the protocol (one window in flight, resent until acknowledged) but route nothing and vote
nothing: a rank reports a placement as live as soon as it holds it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from evenroute.dist.client import query_status
from evenroute.dist.protocol.agreement import Version
from evenroute.dist.wire.link import raise_file_limit
from evenroute.dist.wire.messages import (
    NO_KEY,
    Ack,
    Down,
    JobShape,
    Key,
    PlacementMessage,
    Rows,
    RowsRequest,
    Snapshot,
    SnapshotRequest,
    Status,
    Token,
    Up,
    Window,
    decode_down,
    encode,
    pack_placement,
    unpack_placement,
)
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.store.writer import StoreReader
from evenroute.tools.run.folder import RunFolder, end_with_parent

HEARTBEAT_S = 1.0
RESEND_S = 2.0
MIN_TURN_S = 0.008
M_TRIM_THRESHOLD = -1  # malloc.h


@dataclass
class SimulatedRank:
    """One rank's side: its socket and what it is waiting for."""

    rank: int
    socket: zmq.Socket[bytes]
    next_window_at: float
    next_status_at: float
    seq: int = 0
    in_flight: Window | None = None
    sent_at: float = 0.0
    held: Key = NO_KEY
    held_at: float = 0.0
    token: int = 0
    stored: int = 0


def _keep_freed_memory() -> None:
    """glibc gives memory above 128 KB back at once: 20 page faults a window here, none in a rank that sends its own."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 256 << 20)


class SimulatedJob:
    """`job.ep_size` ranks in one process. `turn` does what is due and reads what came, for at most `wait_s`."""

    def __init__(self, address: str, job: JobShape, *, seed: int = 0, period_s: float = 1.0) -> None:
        raise_file_limit()
        _keep_freed_memory()
        self.job = job
        self.run = secrets.randbits(62) or 1
        self.period_s = period_s
        self.latencies: list[float] = []
        self.sent = 0
        self.resent = 0
        self.counting = True
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, job.ep_size + 16)
        self._poller = zmq.Poller()
        self._by_socket: dict[object, SimulatedRank] = {}
        self._fence = 0
        self._next_turn_at = 0.0
        start = Placement.initial(
            job.num_layers, job.num_logical_experts, job.num_slots, Topology(job.ep_size, job.num_nodes)
        )
        self._live = Version.of(NO_KEY, start)
        self._versions: dict[Key, Version] = {NO_KEY: self._live}
        rng = np.random.default_rng(seed)
        weights = rng.pareto(1.2, job.num_logical_experts) + 0.05
        self._tokens = 4096
        one = rng.multinomial(self._tokens * job.top_k, weights / weights.sum(), size=job.num_layers)
        self.counts: NDArray[np.int64] = one.astype(np.int64)
        self._counts_bytes = self.counts.astype("<i8").tobytes()
        now = time.monotonic()
        self.ranks = [self._connect(address, rank, now) for rank in range(job.ep_size)]

    def _connect(self, address: str, rank: int, now: float) -> SimulatedRank:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.SNDHWM, 16)
        socket.connect(address)
        # Ranks take their windows at the same step, but not at the same microsecond.
        offset = rank / self.job.ep_size
        simulated = SimulatedRank(rank, socket, now + self.period_s * offset, now + HEARTBEAT_S * offset)
        self._poller.register(socket, zmq.POLLIN)
        self._by_socket[socket] = simulated
        return simulated

    def start(self, limit_s: float = 60.0) -> None:
        """Ask for a snapshot as rank 0 of a starting job does, and wait until all ranks' statuses are known."""
        first = self.ranks[0]
        nonce = secrets.randbits(62)
        self._send(first, SnapshotRequest(0, nonce, self.job))
        deadline = time.monotonic() + limit_s
        while self._fence == 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"rebalancer: no snapshot within {limit_s:g} s")
            self.turn(0.05, windows=False)

    def _send(self, rank: SimulatedRank, message: Up) -> None:
        with suppress(zmq.Again):  # whatever matters comes again
            rank.socket.send(
                encode(message), zmq.NOBLOCK
            )  # a copy of 0.1 MB is cheaper than a watch over its end

    def turn(self, wait_s: float, *, windows: bool = True) -> None:
        """One round over all ranks."""
        now = time.monotonic()
        if now < self._next_turn_at:  # asking 1,024 sockets costs the same for one answer as for many
            time.sleep(self._next_turn_at - now)
            now = self._next_turn_at
        self._next_turn_at = now + MIN_TURN_S
        for rank in self.ranks:
            if now >= rank.next_status_at:
                rank.next_status_at = now + HEARTBEAT_S
                self._send(rank, self._status(rank))
            if rank.in_flight is None:
                if windows and self.counting and now >= rank.next_window_at:
                    self._window(rank, now)
            elif now - rank.sent_at >= RESEND_S:
                self.resent += 1
                rank.sent_at = now
                self._send(rank, rank.in_flight)
        for socket, _ in self._poller.poll(max(0, int(1000 * wait_s))):
            self._receive(self._by_socket[socket])

    def _window(self, rank: SimulatedRank, now: float) -> None:
        rank.seq += 1
        first = (rank.seq - 1) * 16
        rank.in_flight = Window(
            self.run, rank.rank, rank.seq, first, first + 15, self._tokens, self._counts_bytes
        )
        rank.sent_at = now
        rank.next_window_at = max(rank.next_window_at + self.period_s, now - self.period_s)
        self.sent += 1
        self._send(rank, rank.in_flight)

    def _status(self, rank: SimulatedRank) -> Status:
        live = self._live
        keys = np.array([live.key] * self.job.num_layers, "<i8").tobytes()
        digests = np.array(live.row_digests, "<i8").tobytes()
        held = self._versions[rank.held]
        # The agreed part counts votes; here a vote is decided whenever the live version changes.
        vote = len(self._versions) - 1
        return Status(
            self.run,
            rank.rank,
            self.job,
            vote,
            rank.held,
            held.digest,
            self._fence,
            keys,
            digests,
            token=rank.token,
        )

    def _receive(self, rank: SimulatedRank) -> None:
        while True:
            try:
                frame = rank.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(rank, decode_down(frame), time.monotonic())

    def _take(self, rank: SimulatedRank, message: Down, now: float) -> None:
        self._fence = max(self._fence, message.epoch)
        match message:
            case Ack(seq=seq):
                if rank.in_flight is not None and rank.in_flight.seq == seq:
                    self.latencies.append(now - rank.sent_at)
                    rank.in_flight = None
                    rank.stored += 1
            case Token(token=token):
                rank.token, rank.next_status_at = token, now
            case PlacementMessage(key=key):
                self._hold(rank, message, key, now)
            case RowsRequest():
                self._send(
                    rank,
                    Rows(self.run, rank.rank, len(self._versions) - 1, pack_placement(self._live.placement)),
                )
            case Snapshot():
                pass

    def _hold(self, rank: SimulatedRank, message: PlacementMessage, key: Key, now: float) -> None:
        if key not in self._versions:
            self._versions[key] = Version.of(key, unpack_placement(message.placement, self.job))
        if key > rank.held:
            rank.held, rank.held_at, rank.next_status_at = key, now, now
        if all(other.held >= key for other in self.ranks) and key > self._live.key:
            self._live = self._versions[key]

    def drain(self, limit_s: float) -> bool:
        """No new windows; wait until all are acknowledged."""
        self.counting = False
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all(rank.in_flight is None for rank in self.ranks):
                return True
            self.turn(0.02)
        return False

    def close(self) -> None:
        """Close all sockets."""
        for rank in self.ranks:
            rank.socket.close(linger=0)
        self._context.term()


@contextmanager
def own_rebalancer(
    folder: Path, *, plan_interval_s: float, planner: str | None = None
) -> Iterator[tuple[str, int]]:
    """A rebalancer process for the bench: its address and pid. RuntimeError when it does not start."""
    ready = folder / "ready.json"
    flags = [
        "--bind",
        f"ipc://{folder}/bench.sock",
        "--store",
        str(folder / "run.db"),
        "--ready-file",
        str(ready),
    ]
    flags += ["--interval", f"{plan_interval_s:g}", "--policy", "global", "--log-level", "warning"]
    flags += [] if planner is None else ["--planner", planner]
    process = subprocess.Popen(
        [sys.executable, "-m", "evenroute.tools", "rebalancer", *flags],
        stdout=sys.stderr,
        preexec_fn=end_with_parent,
    )
    try:
        deadline = time.monotonic() + 60
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("bench: the rebalancer did not start")
            time.sleep(0.05)
        yield json.loads(ready.read_text())["address"], process.pid
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(5)


def cpu_seconds(pid: int) -> float:
    """User and system time of one process (its children not included)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int, field: str) -> float:
    """`VmHWM` (peak) or `VmRSS` of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


@dataclass(frozen=True)
class TransportOptions:
    """`rate`: windows a second and rank, 0 = as fast as it goes; `plan_after` seconds: the one plan of the run."""

    ranks: int = 1024
    layers: int = 58
    experts: int = 256
    seconds: float = 60.0
    rate: float = 1.0
    plan_after: float = 0.0
    planner: str | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "layers", "experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name}: {getattr(self, name)} found, expected at least 1")
        for name, least in (("seconds", "above 0"), ("rate", "at least 0"), ("plan_after", "at least 0")):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and least == "above 0"):
                raise ValueError(f"--{name.replace('_', '-')}: {value:g} found, expected a number {least}")


def _job(options: TransportOptions) -> JobShape:
    slots = (
        -(-options.experts // options.ranks) * options.ranks
    )  # no more redundancy than divisibility asks for
    return JobShape(options.layers, options.experts, slots, options.ranks, 1, 8, False, "bench")


def run_transport(options: TransportOptions) -> dict[str, float | int | bool | None]:
    """Run the bench; the figures by name (README, "Transport")."""
    job = _job(options)
    with RunFolder() as folder:
        interval = options.plan_after or 1e6
        with own_rebalancer(folder, plan_interval_s=interval, planner=options.planner) as (address, pid):
            simulated = SimulatedJob(address, job, period_s=1.0 / options.rate if options.rate else 0.0)
            try:
                figures = _measure(options, simulated, address, pid)
            finally:
                simulated.close()
        with StoreReader(folder / "run.db") as reader:
            _, total = reader.total_counts(simulated.run)
        acknowledged = sum(rank.stored for rank in simulated.ranks)
        exact = total is not None and bool((total == simulated.counts * acknowledged).all())
    return {**figures, "windows_acknowledged": acknowledged, "stored_equals_acknowledged": exact}


def _measure(
    options: TransportOptions, simulated: SimulatedJob, address: str, pid: int
) -> dict[str, float | int | bool | None]:
    simulated.start()
    deadline = time.monotonic() + 60
    while query_status(address).run != simulated.run or not _all_heard(address):
        if time.monotonic() > deadline:
            raise TimeoutError("bench: not all ranks were heard within 60 s")
        for _ in range(20):
            simulated.turn(0.02, windows=False)
    began, cpu = time.monotonic(), cpu_seconds(pid)
    own_cpu = time.process_time()
    while time.monotonic() - began < options.seconds:
        simulated.turn(0.005)
    elapsed, used = time.monotonic() - began, cpu_seconds(pid) - cpu
    acknowledged = len(simulated.latencies)
    last = sorted(simulated.latencies[-min(acknowledged, options.ranks) :])
    drained = simulated.drain(30.0)
    reach = _reach(simulated)
    return {
        "ranks": options.ranks,
        "seconds": round(elapsed, 2),
        "windows_a_second": round(acknowledged / elapsed, 1),
        "rebalancer_cores": round(used / elapsed, 3),
        "rebalancer_us_a_window": round(1e6 * used / max(1, acknowledged), 1),
        "generator_cores": round((time.process_time() - own_cpu) / (time.monotonic() - began), 3),
        "lag_median_s": round(last[len(last) // 2], 4) if last else None,
        "lag_max_s": round(last[-1], 4) if last else None,
        "resent": simulated.resent,
        "drained": drained,
        "rebalancer_peak_mb": round(memory_mb(pid, "VmHWM"), 1),
        "placement_reach_s": reach,
    }


def _all_heard(address: str) -> bool:
    found = query_status(address)
    return found.state == "serving" and all(rank.heard_s_ago is not None for rank in found.ranks)


def _reach(simulated: SimulatedJob) -> float | None:
    """Seconds between the first and the last rank that got the newest placement all have; None without one."""
    key = min(rank.held for rank in simulated.ranks)
    if key == NO_KEY:
        return None
    times = [rank.held_at for rank in simulated.ranks if rank.held == key]
    return round(max(times) - min(times), 4)


def main(argv: list[str] | None = None) -> int:
    """`evenroute bench transport`: run and print one JSON object. Exit status 1 when a count was lost."""
    parser = argparse.ArgumentParser(
        prog="evenroute bench transport", description=(__doc__ or "").split("\n")[0]
    )
    defaults = TransportOptions()
    parser.add_argument("--ranks", type=int, default=defaults.ranks)
    parser.add_argument("--layers", type=int, default=defaults.layers)
    parser.add_argument("--experts", type=int, default=defaults.experts)
    parser.add_argument("--seconds", type=float, default=defaults.seconds)
    parser.add_argument(
        "--rate", type=float, default=defaults.rate, help="windows a second and rank; 0: no pause"
    )
    parser.add_argument(
        "--plan-after",
        type=float,
        default=0.0,
        help="seconds until a placement is planned and sent (0: none)",
    )
    parser.add_argument("--planner", default=None, help="MODULE:FUNCTION in place of the built-in planner")
    given = parser.parse_args(argv)
    try:
        options = TransportOptions(**{name.replace("-", "_"): value for name, value in vars(given).items()})
    except ValueError as error:
        parser.error(str(error))
    figures = run_transport(options)
    print(json.dumps(figures))
    return 0 if figures["stored_equals_acknowledged"] and figures["drained"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
