"""Answers operators and viewers: who may ask for what, and what is done. Orders ranks to record, and hears them."""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

from evenroute.dist.log import LimitedLog, event
from evenroute.dist.protocol.rebalancer import RebalancerCore
from evenroute.dist.protocol.types import Phase
from evenroute.dist.rebalancer.plan_cycle import PlanCycle
from evenroute.dist.rebalancer.record_orders import PassOrders
from evenroute.dist.rebalancer.recording import Recorder
from evenroute.dist.rebalancer.tracing import SwitchTraces
from evenroute.dist.wire.control import (
    ALLOWED,
    Answer,
    Done,
    ForeignVersionError,
    LayerRequest,
    PlansOrder,
    RebalancerStatus,
    RecordRead,
    RecordStart,
    RecordStop,
    Refused,
    Request,
    StatusAnswer,
    StatusRequest,
    decode_request,
    encode_control,
)
from evenroute.dist.wire.keys import LOCAL_ROLE
from evenroute.dist.wire.membership import ScaleOrder
from evenroute.dist.wire.messages import MessageError
from evenroute.dist.wire.recording import RecordReport
from evenroute.dist.wire.tracing import TraceReport, TraceRequest
from evenroute.eplb.store.writer import StoreError

logger = logging.getLogger("evenroute.dist.rebalancer")

_ORDERS_EVERY_S = 0.1


class ControlService:
    """Requests in, answers out; `rejected` counts what was refused by kind (shared with the rebalancer).

    `passes` keeps what the ranks reported of a recording of passes.
    """

    def __init__(
        self,
        core: RebalancerCore,
        plans: PlanCycle,
        recorder: Recorder,
        build_status: Callable[[float], RebalancerStatus],
        rejected: Counter[str],
        log: LimitedLog,
    ) -> None:
        self._core = core
        self._plans = plans
        self._recorder = recorder
        self._build_status = build_status
        self._rejected = rejected
        self._log = log
        self._ordered_at = float("-inf")
        self.passes = PassOrders()
        self.scale: Callable[[int], str] | None = None  # orders another number of ranks
        self._traces = SwitchTraces()

    def answer(self, frame: bytes | memoryview, role: str, now: float) -> Answer | None:
        """The answer to a request frame; None for a frame that is not a request."""
        try:
            return self._answer(decode_request(frame), role, now)
        except ForeignVersionError as error:
            self._rejected["decode"] += 1
            self._log.log(logging.WARNING, "version", f"refused: {error}")
            return Refused(f"{error}; use the evenroute version that the rebalancer runs")
        except MessageError as error:
            self._rejected["decode"] += 1
            self._log.log(logging.WARNING, "decode", f"refused: {error}")
            return None
        except StoreError as error:
            return Refused(str(error))

    def orders(self, now: float) -> Iterator[tuple[object, bytes]]:
        """(peer, frame) of the orders about a recording of passes that ranks are due."""
        core = self._core
        if core.phase is not Phase.SERVING or core.view is None or now - self._ordered_at < _ORDERS_EVERY_S:
            return
        self._ordered_at = now
        if self._recorder.end_with_run(core.view.run, epoch=core.epoch, now=time.time()):
            core.keep_rank_detail = False
            logger.info("recording ended: the job that it was of has ended")
        for peer, wanted in self._traces.due(core.view, now):
            yield peer, encode_control(wanted)
        encoded: tuple[object, bytes] = (None, b"")
        for peer, order in self.passes.due(self._recorder.passes(), core.view, core.epoch, now):
            if encoded[0] is not order:
                encoded = (order, encode_control(order))
            yield peer, encoded[1]

    def _answer(self, request: Request, role: str, now: float) -> Answer | None:
        if role not in ALLOWED[type(request)]:
            self._rejected["role"] += 1
            needed = " or ".join(sorted(ALLOWED[type(request)] - {LOCAL_ROLE}))
            return Refused(f"the role {role} may not do this; it takes {needed}")
        match request:
            case StatusRequest():
                return StatusAnswer(self._build_status(now))
            case LayerRequest():
                return self._plans.loads.of_layer(request.layer)
            case RecordRead():
                return self._recorder.read(request)
            case RecordReport():
                return self._take(request)
            case TraceRequest():
                return self._traces.ask(request.trace, request.offset, self._core.view, now)
            case TraceReport():
                self._traces.take(request, self._core.view)
                return None
            case PlansOrder():
                return self._order_plans(request)
            case ScaleOrder():
                return self._order_ranks(request)
            case RecordStart():
                run = 0 if self._core.view is None else self._core.view.run
                done = self._recorder.start(
                    request,
                    run=run,
                    recording=secrets.randbits(62) or 1,
                    epoch=self._core.epoch,
                    now=time.time(),
                )
            case RecordStop():
                refused = self.passes.all_refused(self._recorder.passes(), self._core.view)
                done = self._recorder.stop(epoch=self._core.epoch, now=time.time(), all_refused=refused)
        self._core.keep_rank_detail = self._recorder.per_rank
        if isinstance(done, Done):
            logger.info("%s", done.text)
        return done

    def _order_plans(self, request: PlansOrder) -> Answer:
        if self._core.phase is not Phase.SERVING:
            return Refused("no job is heard in this life of the rebalancer yet; try again once there is one")
        if request.what == "rollback":
            try:
                text = self._plans.roll_back()
            except ValueError as error:
                return Refused(str(error))
        else:
            self._plans.pause(request.what == "pause")
            text = "plans are stopped, placements stay; `evenroute resume` goes on"
            if request.what == "resume":
                text = "plans go on"
        logger.info("%s: %s", request.what, text, extra=event(request.what))
        return Done(text)

    def _order_ranks(self, request: ScaleOrder) -> Answer:
        assert self.scale is not None
        try:
            text = self.scale(request.ranks)
        except ValueError as error:
            return Refused(str(error))
        logger.info("scale to %d ranks: %s", request.ranks, text)
        return Done(text)

    def _take(self, report: RecordReport) -> Answer | None:
        wanted = self._recorder.passes()
        if wanted is not None and report.run == wanted.run and report.path:  # it has files
            with suppress(StoreError):  # the next report has it again
                self._recorder.begun(report.recording, epoch=self._core.epoch)
        return self.passes.take(report, wanted, self._core.view, self._core.epoch)
