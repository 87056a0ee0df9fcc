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
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from evenroute.dist.config import RebalancerConfig
from evenroute.dist.log import LimitedLog, event, set_up_logging
from evenroute.dist.membership.rebalancer import ElasticRebalancerCore
from evenroute.dist.membership.service import MembershipService
from evenroute.dist.protocol.types import Phase, Timeouts
from evenroute.dist.rebalancer.control import ControlService
from evenroute.dist.rebalancer.decisions import policy_settings
from evenroute.dist.rebalancer.guards import FileWatch, JobGate, JobLock
from evenroute.dist.rebalancer.host_checks import STORE_FIELD, check_host, lock_paths, read_http_token
from evenroute.dist.rebalancer.plan_cycle import PlanCycle
from evenroute.dist.rebalancer.recording import Recorder
from evenroute.dist.rebalancer.status import InUseLog, StatusBuilder
from evenroute.dist.rebalancer.traffic import RankTraffic
from evenroute.dist.spans import export_spans
from evenroute.dist.web.process import WebProcess
from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.control import RebalancerStatus, encode_control
from evenroute.dist.wire.keys import load_server_keys
from evenroute.dist.wire.link import RouterLink
from evenroute.dist.wire.messages import JobShape
from evenroute.eplb._checks import require_bool, require_instance
from evenroute.eplb.store.writer import HistoryStore, StaleEpochError, StoreError

__all__ = ["Rebalancer", "run_rebalancer"]

logger = logging.getLogger("evenroute.dist.rebalancer")

_TICK_S = 0.1
_STATUS_EVERY_S = 1.0
_HOUSEKEEPING_S = 5.0
_FRAMES_PER_TURN = 512


class Rebalancer:
    """One life. `run` returns the exit status: 0 asked to end, 1 another rebalancer has taken over."""

    def __init__(self, config: RebalancerConfig, *, take_over: bool = False) -> None:
        settings = config.rebalancer
        self.config = config
        self.address = parse_address(settings.bind, field="rebalancer.bind (--bind)")
        with ExitStack() as parts:  # closed in the reverse order, here if opening fails
            self._lock = JobLock(lock_paths(settings.store, self.address), take_over=take_over)
            parts.callback(self._lock.release)
            self._open(parts, time.monotonic())
            self._parts = parts.pop_all()
        self._release = self._parts.close

    def _open(self, parts: ExitStack, now: float) -> None:
        settings, security = self.config.rebalancer, self.config.security
        Path(settings.store).touch(mode=0o600)  # for this user alone, as the ipc socket
        self._lock.hold_store(STORE_FIELD, Path(settings.store))
        if settings.ready_file:
            parts.callback(Path(settings.ready_file).unlink, missing_ok=True)
        self._store = HistoryStore(Path(settings.store), background_checkpoint=True)
        parts.callback(self._store.close)
        keys = load_server_keys(Path(security.keys)) if security.keys else None
        self._link = RouterLink(
            self.address,
            field="rebalancer.bind (--bind)",
            keys=keys,
            max_message_bytes=settings.max_message_bytes,
        )
        parts.callback(self._link.close)
        timeouts = Timeouts(
            publish_timeout_s=settings.version_limit_s,
            max_publish_timeout_s=max(3600.0, settings.version_limit_s),
            pid=os.getpid(),
        )
        self.core = ElasticRebalancerCore(
            self._store,
            timeouts,
            random_bits=secrets.randbits,
            stamp=time.time,
            accept_job=self._accept_job,
        )
        self.plans = PlanCycle(self.core, self._store, self.config.planner, now)
        parts.callback(self.plans.close)
        self.recorder = Recorder(self._store)
        self.core.keep_rank_detail = self.recorder.per_rank
        self._in_use = InUseLog(self.core, self._add_event)
        self._status_builder = StatusBuilder(self.config, self.core, self.plans, self._store, now)
        self._rejected: Counter[str] = Counter()
        self._log = LimitedLog(logger)
        self._jobs = JobGate(self.core, self._log)
        about = (self.core, self._link, self._jobs, self._rejected, self._log)
        self._ranks = RankTraffic(*about, settings.max_message_bytes, self.plans.costs.report)
        self._files = FileWatch(self._lock, self._link, self._store, self._log)
        self.membership = MembershipService(self.core, self._store, self._link, settings, self._rejected)
        self._control = ControlService(
            self.core, self.plans, self.recorder, self._build_status, self._rejected, self._log
        )
        self._control.scale = self.membership.scale
        self._lag_s = 0.0
        self._status_at = self._housekeeping_at = now
        self._stop_signal = 0
        self._last_status = self._build_status(now)
        self._web = WebProcess.of(self.config, read_http_token(security))
        if self._web is not None:
            parts.callback(self._web.close)
            self._web.feed(self._last_status, now)

    def _accept_job(self, job: JobShape) -> str | None:
        if not self.config.planner.function:
            try:
                policy_settings(self.config.planner, job)
            except ValueError as error:
                return str(error)
        return None

    # ----------------------------------------------------------------------------------------- loop

    def run(self) -> int:
        """Serve until a signal or the end of this life."""
        self._catch_signals()
        self._write_ready_file()
        self.plans.warm_up()
        logger.info("effective settings: %s", self.config.effective(), extra=event("settings"))
        told = {"address": self._link.endpoint, "store": self.config.rebalancer.store, "pid": os.getpid()}
        logger.info("serving %s, store %s, pid %d", *told.values(), extra=event("serving", **told))
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
            self._parts.callback(side.close)
        signal.set_wakeup_fd(self._wake[1].fileno(), warn_on_full_buffer=False)
        self._parts.callback(signal.set_wakeup_fd, -1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = number

    def _wait(self) -> None:
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
        batch_s = self._ranks.wait_s(time.monotonic())
        if batch_s is not None:
            limit_s = min(limit_s, batch_s)
        poller.poll(max(0, math.ceil(1000 * limit_s)))
        with suppress(BlockingIOError):
            self._wake[0].recv(64)

    def _turn(self, now: float) -> None:
        for step in (self._serve_keys, self._receive, self._tick, self._housekeep):
            try:
                step(now)
            except StaleEpochError as error:
                self.core.ended, self.core.phase = str(error), Phase.ENDED
            except StoreError as error:
                self.core.counters.store_errors += 1
                self._log.log(logging.ERROR, "store", str(error))
            except Exception:  # a defect here must not take the service with it
                self._rejected["internal"] += 1
                if self._rejected["internal"] <= 10:
                    logger.exception("error %d in the main loop, goes on", self._rejected["internal"])
        self._log_notices()

    def _serve_keys(self, now: float) -> None:
        if self._link.zap is not None:
            self._link.zap.serve()

    def _receive(self, now: float) -> None:
        for number, received in enumerate(self._link.receive(_FRAMES_PER_TURN)):
            if received.control:
                answer = self._control.answer(received.frame, received.role, now)
                if answer is not None:
                    self._link.send(received.peer, encode_control(answer), control=True)
            elif received.member:
                self.membership.take(received, now)
            else:
                self._ranks.take(received, now)
            if number % 64 == 63:
                self._serve_keys(now)
        self._ranks.store_due(time.monotonic())

    def _tick(self, now: float) -> None:
        self._ranks.send(self.core.tick(now))
        self._ranks.send(self.plans.turn(now))
        self._ranks.send(self.membership.turn(now))
        if self._web is not None:
            self._web.turn(now)
        for peer, frame in self._control.orders(now):
            assert isinstance(peer, bytes)
            self._link.send(peer, frame, control=True)
        self._in_use.note(now, time.time())

    # --------------------------------------------------------------------------------------- status

    def _build_status(self, now: float) -> RebalancerStatus:
        zap = self._link.zap
        extra = {
            f"rejected_{kind}": self._rejected[kind] for kind in ("decode", "content", "role", "internal")
        }
        extra["rejected_other_job"] = self._jobs.refused
        extra["windows_merged"] = self._ranks.merged
        extra["frames_dropped"] = self._link.dropped
        extra["rejected_decode"] += self._link.malformed
        extra["rejected_content"] += self.core.counters.messages_rejected
        extra["keys_refused"] = 0 if zap is None else zap.refused
        return self._status_builder.build(
            now,
            address=self._link.endpoint,
            lag_s=self._lag_s,
            extra_counters=extra,
            problems=[*self._files.problems, *self._jobs.problems(now)],
            recorder=self.recorder,
            rank_recordings=self._control.passes.of_ranks(self.recorder.passes()),
            ended=self._ranks.ended(),
            membership=self.membership.view(now),
        )

    def _add_event(self, kind: str, text: str, stamp: float) -> None:
        self._store.add_event(kind, text, epoch=self.core.epoch, now=stamp)

    # ---------------------------------------------------------------------------------- housekeeping

    def _housekeep(self, now: float) -> None:
        if now - self._status_at >= _STATUS_EVERY_S:
            self._status_at = now
            self._log.turn(now)
            self.core.counters.store_errors += self._files.look()
            self._last_status = self._build_status(now)
            if self._web is not None:
                self._web.feed(self._last_status, now)
        if now - self._housekeeping_at >= _HOUSEKEEPING_S and self.core.phase is Phase.SERVING:
            settings = self.config.rebalancer
            before = time.time() - settings.keep_windows_s
            if self.recorder.keep_from is not None:
                before = min(before, self.recorder.keep_from)
            if not self._store.roll_up(before=before, span_s=settings.roll_up_s, epoch=self.core.epoch):
                self._housekeeping_at = now

    def _log_notices(self) -> None:
        while self.core.notices:
            notice = self.core.notices.popleft()
            level = logging.INFO if notice.kind == "run" else logging.WARNING
            logged = self._log.log(level, notice.kind, notice.text)
            if logged and notice.kind not in ("store", "ended") and self.core.phase is Phase.SERVING:
                with suppress(StoreError, StaleEpochError):
                    self._store.add_event(notice.kind, notice.text, epoch=self.core.epoch, now=time.time())

    # ------------------------------------------------------------------------------------ beginning, end

    def _write_ready_file(self) -> None:
        path = self.config.rebalancer.ready_file
        if not path:
            return
        http = "" if self._web is None else self._web.address
        data = {"address": self._link.endpoint, "http": http, "metrics": http, "pid": os.getpid()}
        partial = Path(f"{path}.{os.getpid()}.partial")
        partial.write_bytes(msgspec.json.encode(data) + b"\n")
        partial.replace(path)

    def _end(self) -> int:
        self._ranks.store()
        if self.core.ended is not None:
            logger.error("this life ends: %s", self.core.ended, extra=event("ended"))
        else:
            logger.info("ends on signal %d", self._stop_signal, extra=event("ended"))
        counters = self.core.counters
        logger.info(
            "stored %d windows, published %d placements, dropped %d frames to peers that do not read",
            counters.windows_stored,
            counters.placements_published,
            self._link.dropped,
        )
        if (savings := self.plans.costs.savings()) is not None:
            logger.info("%s", savings.told())
        if self.core.newest is not None and (behind := self.core.ranks_behind()):
            logger.info("%d ranks are not known to hold the newest placement; they ask again", len(behind))
        self._release()
        return 1 if self.core.ended is not None else 0


def run_rebalancer(config: RebalancerConfig, *, take_over: bool = False) -> int:
    """Check the settings, then serve until a signal. Returns the exit status.

    Raises ValueError or OSError in one line when it cannot start (settings, lock, address, store).
    """
    require_instance("config", config, RebalancerConfig)
    require_bool("take_over", take_over)
    warnings = check_host(config)
    export_spans("evenroute-rebalancer")
    set_up_logging(config.rebalancer.log_level, config.rebalancer.log_format)
    for warning in warnings:
        logger.warning("%s", warning)
    return Rebalancer(config, take_over=take_over).run()
