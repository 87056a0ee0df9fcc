"""The rebalancer process: one loop around the protocol core, the store, the socket and the planner's process. No torch.

The loop never waits for a rank, a planner or a scraper. Whatever fails inside it is counted and logged; it ends for a
signal, when another rebalancer has taken over, or when it is fenced by a higher epoch.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from evenroute.dist.config import RebalancerConfig, set_up_logging
from evenroute.dist.protocol.rebalancer import Outgoing, Phase, RebalancerCore
from evenroute.dist.protocol.rebalancer import RebalancerConfig as CoreConfig
from evenroute.dist.rebalancer.control import ControlService
from evenroute.dist.rebalancer.core_store import CoreStore
from evenroute.dist.rebalancer.file_watch import FileWatch
from evenroute.dist.rebalancer.in_use import InUseLog
from evenroute.dist.rebalancer.job_gate import JobGate
from evenroute.dist.rebalancer.job_lock import JobLock
from evenroute.dist.rebalancer.log import LimitedLog
from evenroute.dist.rebalancer.metrics import MetricsServer
from evenroute.dist.rebalancer.plan_cycle import PlanCycle
from evenroute.dist.rebalancer.recording import Recorder
from evenroute.dist.rebalancer.status import StatusBuilder
from evenroute.dist.wire.address import Address, parse_address
from evenroute.dist.wire.control import RANK_ROLES, Status, encode_control
from evenroute.dist.wire.keys import load_server_keys
from evenroute.dist.wire.link import Received, RouterLink
from evenroute.dist.wire.messages import (
    Down,
    JobShape,
    MessageError,
    PlacementMessage,
    Window,
    decode_up,
    encode,
)
from evenroute.eplb._checks import require_bool, require_instance
from evenroute.eplb.store.writer import RankState, StaleEpochError, StoreError

__all__ = ["Rebalancer", "run_rebalancer"]

logger = logging.getLogger("evenroute.dist.rebalancer")

_STORE_FIELD = "rebalancer.store (--store)"
_TICK_S = 0.1
_STATUS_EVERY_S = 1.0
_HOUSEKEEPING_S = 5.0
_FRAMES_PER_TURN = 512
_WINDOWS_PER_BATCH = 128
_PLACEMENT_AGAIN_S = 0.9  # not to one peer again before so long
_BATCH_S = 0.02  # windows wait so long for company: one store transaction serves all of a batch


class Rebalancer:
    """One life. `run` returns the exit status: 0 asked to end, 1 another rebalancer has taken over."""

    def __init__(self, config: RebalancerConfig, *, take_over: bool = False) -> None:
        settings = config.rebalancer
        self.config = config
        self.address = parse_address(settings.bind, field="rebalancer.bind (--bind)")
        self._lock = JobLock(_lock_paths(settings.store, self.address), take_over=take_over)
        self._metrics: MetricsServer | None = None
        self._link: RouterLink | None = None
        self._store: CoreStore | None = None
        self._wake: tuple[socket.socket, socket.socket] | None = None
        try:
            self._open(time.monotonic())
        except BaseException:
            self._release()
            raise

    def _open(self, now: float) -> None:
        settings, security = self.config.rebalancer, self.config.security
        self._lock.hold_store(_STORE_FIELD, Path(settings.store))
        self._store = CoreStore(Path(settings.store), self._shape)
        self._lock.hold_store(_STORE_FIELD, Path(settings.store))  # it is there now at the latest
        keys = load_server_keys(Path(security.keys)) if security.keys else None
        self._link = RouterLink(
            self.address,
            field="rebalancer.bind (--bind)",
            keys=keys,
            max_message_bytes=settings.max_message_bytes,
        )
        core_config = CoreConfig(
            publish_timeout_s=settings.version_limit_s,
            max_publish_timeout_s=max(3600.0, settings.version_limit_s),
            pid=os.getpid(),
        )
        self.core = RebalancerCore(
            self._store,
            core_config,
            random_bits=secrets.randbits,
            stamp=time.time,
            accept_job=self._accept_job,
        )
        self.plans = PlanCycle(self.core, self.config.planner, now)
        self.recorder = Recorder(self._store)
        self.core.keep_rank_detail = self.recorder.per_rank
        self._in_use = InUseLog(self.core, self._add_event)
        self._status_builder = StatusBuilder(self.config, self.core, self.plans, now)
        self._rejected: Counter[str] = Counter()
        self._log = LimitedLog(logger)
        self._jobs = JobGate(self.core, self._log)
        self._files = FileWatch(self._lock, self._link, self._store, self._log)
        self._control = ControlService(
            self.core, self.recorder, self._build_status, self._rejected, self._log
        )
        self._lag_s = 0.0
        self._status_at = self._housekeeping_at = now
        self._encoded: tuple[Down | None, bytes] = (None, b"")
        self._stop_signal = 0
        self._windows: list[tuple[bytes, Window]] = []
        self._batch_at = 0.0
        self._placed_message: PlacementMessage | None = None
        self._placed_at: dict[bytes, float] = {}
        self._merged = self._merged_run = self._shortest = 0
        self._last_status = self._build_status(now)
        if settings.metrics_bind:
            metrics = parse_address(f"tcp://{settings.metrics_bind}", field="rebalancer.metrics_bind")
            self._metrics = MetricsServer(
                metrics.host,
                metrics.port,
                lambda: self._last_status,
                settings.max_rank_silence_s,
            )

    def _shape(self) -> JobShape:
        assert self.core.view is not None
        return self.core.view.job

    def _accept_job(self, job: JobShape) -> str | None:
        groups, nodes = self.config.planner.num_groups, job.num_nodes
        if job.num_logical_experts % groups:
            return f"planner.num_groups {groups} does not divide its {job.num_logical_experts} experts"
        if self.config.planner.policy == "hierarchical" and groups % nodes:
            return f"planner.policy hierarchical needs groups ({groups}) that divide over its {nodes} nodes"
        return None

    # ----------------------------------------------------------------------------------------- loop

    def run(self) -> int:
        """Serve until a signal or the end of this life."""
        assert self._link is not None
        self._catch_signals()
        self._write_ready_file()
        self.plans.warm_up()
        logger.info("effective settings: %s", self.config.effective())
        logger.info(
            "serving %s, store %s, pid %d", self._link.endpoint, self.config.rebalancer.store, os.getpid()
        )
        while not self._stop_signal and self.core.phase is not Phase.ENDED:
            self._wait()
            started = time.monotonic()
            self._turn(started)
            self._lag_s = time.monotonic() - started
        return self._end()

    def _catch_signals(self) -> None:
        self._wake = socket.socketpair()
        for side in self._wake:
            side.setblocking(False)
        signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = number

    def _wait(self) -> None:
        assert self._link is not None
        assert self._wake is not None
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._wake[0], zmq.POLLIN)
        if self._link.zap is not None:
            poller.register(self._link.zap.socket, zmq.POLLIN)
        readable, writable = self.plans.planner.poll_fds()
        if readable is not None:
            poller.register(readable, zmq.POLLIN)
        if writable is not None:
            poller.register(writable, zmq.POLLOUT)
        remaining = self.plans.planner.remaining_s()
        limit_s = _TICK_S if remaining is None else min(_TICK_S, remaining)
        if self._windows:
            limit_s = min(limit_s, self._batch_at - time.monotonic())
        poller.poll(max(0, math.ceil(1000 * limit_s)))
        with suppress(BlockingIOError):
            self._wake[0].recv(64)

    def _turn(self, now: float) -> None:
        assert self._link is not None
        for step in (self._serve_keys, self._receive, self._tick, self._housekeep):
            try:
                step(now)
            except StaleEpochError as error:
                self.core.ended, self.core.phase = str(error), Phase.ENDED
            except StoreError as error:
                self.core.counters.store_errors += 1
                self._log.tell(logging.ERROR, "store", str(error))
            except Exception:  # a defect here must not take the service with it
                self._rejected["internal"] += 1
                if self._rejected["internal"] <= 10:
                    logger.exception("error %d in the main loop, goes on", self._rejected["internal"])
        self._tell_notices()

    def _serve_keys(self, now: float) -> None:
        assert self._link is not None
        if self._link.zap is not None:
            self._link.zap.serve()

    def _receive(self, now: float) -> None:
        assert self._link is not None
        for number, received in enumerate(self._link.receive(_FRAMES_PER_TURN)):
            if received.control:
                answer = self._control.answer(received.frame, received.role, now)
                if answer is not None:
                    self._link.send(received.peer, encode_control(answer), control=True)
                continue
            message = self._decode(received)
            if isinstance(message, Window):
                self._note_merged(message)
                if not self._windows:
                    self._batch_at = now + _BATCH_S
                self._windows.append((received.peer, message))
                if len(self._windows) >= _WINDOWS_PER_BATCH:
                    self._store_batch()
            elif message is not None and not self._jobs.refuses(message, now):
                self._send(self._guarded(received.peer, message, now))
            if number % 64 == 63:
                self._serve_keys(now)
        if self._windows and time.monotonic() >= self._batch_at:
            self._store_batch()

    def _note_merged(self, window: Window) -> None:
        """A rank's window that covers more steps than the run's shortest: unsent ones were merged in it."""
        if window.run != self._merged_run:
            self._merged_run, self._shortest = window.run, 0
        steps = window.last_step - window.first_step + 1
        if self._shortest and steps > self._shortest:
            self._merged += 1
        self._shortest = min(self._shortest, steps) if self._shortest else steps

    def _store_batch(self) -> None:
        windows, self._windows = self._windows, []
        self._send(self.core.receive_windows(windows))

    def _decode(self, received: Received) -> object | None:
        if received.role not in RANK_ROLES:
            self._rejected["role"] += 1
            text = f"a {received.role} sent a rank's message; refused"
            self._log.tell(logging.WARNING, "role", text, limit=1)
            return None
        try:
            return decode_up(received.frame, limit=self.config.rebalancer.max_message_bytes)
        except MessageError as error:
            self._rejected["decode"] += 1
            self._log.tell(logging.WARNING, "decode", f"refused: {error}")
            return None

    def _guarded(self, peer: bytes, message: object, now: float) -> list[Outgoing]:
        try:
            return self.core.receive(peer, message, now)  # type: ignore[arg-type]
        except (ValueError, OverflowError) as error:
            self._rejected["content"] += 1
            self._log.tell(logging.WARNING, "content", f"refused: {error}")
            return []

    def _tick(self, now: float) -> None:
        self._send(self.core.tick(now))
        self._send(self.plans.turn(now))
        assert self._link is not None
        for peer, frame in self._control.orders(now):
            assert isinstance(peer, bytes)
            self._link.send(peer, frame, control=True)
        self._in_use.note(now, time.time())

    def _send(self, out: Sequence[Outgoing]) -> None:
        assert self._link is not None
        for outgoing in out:
            assert isinstance(outgoing.peer, bytes)
            if isinstance(outgoing.message, PlacementMessage) and self._just_sent(
                outgoing.peer, outgoing.message
            ):
                continue
            if self._encoded[0] is not outgoing.message:  # one placement goes to all ranks
                self._encoded = (outgoing.message, encode(outgoing.message))
            self._link.send(outgoing.peer, self._encoded[1])

    def _just_sent(self, peer: bytes, message: PlacementMessage) -> bool:
        """Statuses that crossed the placement ask for it again; it is on its way, and the next heartbeat tells."""
        now = time.monotonic()
        if message is not self._placed_message:
            self._placed_message, self._placed_at = message, {}
        if now - self._placed_at.get(peer, -_PLACEMENT_AGAIN_S) < _PLACEMENT_AGAIN_S:
            return True
        self._placed_at[peer] = now
        return False

    # --------------------------------------------------------------------------------------- status

    def _build_status(self, now: float) -> Status:
        assert self._store is not None
        assert self._link is not None
        store = self._store

        def rank_states(run: int) -> list[RankState]:
            try:
                return store.rank_states(run)
            except StoreError:
                return []

        zap = self._link.zap
        extra = {
            f"rejected_{kind}": self._rejected[kind] for kind in ("decode", "content", "role", "internal")
        }
        extra["rejected_other_job"] = self._jobs.refused
        extra["windows_merged"] = self._merged
        extra["frames_dropped"] = self._link.dropped
        extra["rejected_decode"] += self._link.malformed
        extra["rejected_content"] += self.core.counters.messages_rejected
        extra["keys_refused"] = 0 if zap is None else zap.refused
        return self._status_builder.build(
            now,
            address=self._link.endpoint,
            lag_s=self._lag_s,
            extra_counters=extra,
            rank_states=rank_states,
            problems=[*self._files.problems, *self._jobs.problems(now)],
            recorder=self.recorder,
            rank_recordings=self._control.passes.of_ranks(self.recorder.passes()),
        )

    def _add_event(self, kind: str, text: str, stamp: float) -> None:
        assert self._store is not None
        self._store.add_event(kind, text, epoch=self.core.epoch, now=stamp)

    # ---------------------------------------------------------------------------------- housekeeping

    def _housekeep(self, now: float) -> None:
        assert self._store is not None
        if now - self._status_at >= _STATUS_EVERY_S:
            self._status_at = now
            self._log.turn(now)
            self.core.counters.store_errors += self._files.look()
            self._last_status = self._build_status(now)
        if now - self._housekeeping_at >= _HOUSEKEEPING_S and self.core.phase is Phase.SERVING:
            settings = self.config.rebalancer
            before = time.time() - settings.keep_windows_s
            if self.recorder.keep_from is not None:
                before = min(before, self.recorder.keep_from)
            if not self._store.roll_up(before=before, span_s=settings.roll_up_s, epoch=self.core.epoch):
                self._housekeeping_at = now

    def _tell_notices(self) -> None:
        while self.core.notices:
            notice = self.core.notices.popleft()
            level = logging.INFO if notice.kind == "run" else logging.WARNING
            told = self._log.tell(level, notice.kind, notice.text)
            if told and notice.kind not in ("store", "ended") and self.core.phase is Phase.SERVING:
                assert self._store is not None
                with suppress(StoreError, StaleEpochError):
                    self._store.add_event(notice.kind, notice.text, epoch=self.core.epoch, now=time.time())

    # ------------------------------------------------------------------------------------ beginning, end

    def _write_ready_file(self) -> None:
        path = self.config.rebalancer.ready_file
        if not path:
            return
        assert self._link is not None
        metrics = "" if self._metrics is None else self._metrics.address
        data = {"address": self._link.endpoint, "metrics": metrics, "pid": os.getpid()}
        partial = Path(f"{path}.{os.getpid()}.partial")
        partial.write_bytes(msgspec.json.encode(data) + b"\n")
        partial.replace(path)

    def _end(self) -> int:
        if self._windows:
            self._store_batch()
        if self.core.ended is not None:
            logger.error("this life ends: %s", self.core.ended)
        else:
            logger.info("ends on signal %d", self._stop_signal)
        counters = self.core.counters
        logger.info(
            "stored %d windows, published %d placements, dropped %d frames to peers that do not read",
            counters.windows_stored,
            counters.placements_published,
            0 if self._link is None else self._link.dropped,
        )
        if self.core.newest is not None and (behind := self.core.ranks_behind()):
            logger.info("%d ranks are not known to hold the newest placement; they ask again", len(behind))
        self._release()
        return 1 if self.core.ended is not None else 0

    def _release(self) -> None:
        if hasattr(self, "plans"):
            self.plans.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._link is not None:
            self._link.close()
        if self._store is not None:
            self._store.close()
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            for side in self._wake:
                side.close()
        if self.config.rebalancer.ready_file:
            with suppress(FileNotFoundError):
                Path(self.config.rebalancer.ready_file).unlink()
        self._lock.release()


def _lock_paths(store: str, address: Address) -> list[tuple[str, Path]]:
    paths = [(_STORE_FIELD, Path(store))]
    if address.ipc_path is not None:
        paths.append(("rebalancer.bind (--bind)", address.ipc_path))
    return paths


def run_rebalancer(config: RebalancerConfig, *, take_over: bool = False) -> int:
    """Check the settings, then serve until a signal. Returns the exit status.

    Raises ValueError or OSError in one line when it cannot start (settings, lock, address, store).
    """
    require_instance("config", config, RebalancerConfig)
    require_bool("take_over", take_over)
    warnings = config.check()
    set_up_logging(config.rebalancer.log_level)
    for warning in warnings:
        logger.warning("%s", warning)
    return Rebalancer(config, take_over=take_over).run()
