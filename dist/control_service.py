"""Answers operators and viewers: who may ask for what, and what is done."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from evenroute.dist.control import (
    ALLOWED,
    Answer,
    Done,
    RecordRead,
    RecordStart,
    RecordStop,
    Refused,
    Request,
    Status,
    StatusAnswer,
    StatusRequest,
    decode_request,
)
from evenroute.dist.keys import LOCAL_ROLE
from evenroute.dist.limited_log import LimitedLog
from evenroute.dist.messages import MessageError
from evenroute.dist.rebalancer_core import RebalancerCore
from evenroute.dist.recording import Recorder
from evenroute.eplb.store import StoreError

logger = logging.getLogger("evenroute.dist.rebalancer")


class ControlService:
    """Requests in, answers out; `rejected` counts what was refused by kind (shared with the rebalancer)."""

    def __init__(
        self,
        core: RebalancerCore,
        recorder: Recorder,
        build_status: Callable[[float], Status],
        rejected: Counter[str],
        log: LimitedLog,
    ) -> None:
        self._core = core
        self._recorder = recorder
        self._build_status = build_status
        self._rejected = rejected
        self._log = log

    def answer(self, frame: bytes | memoryview, role: str, now: float) -> Answer | None:
        """The answer to a request frame; None for a frame that is no request."""
        try:
            return self._answer(decode_request(frame), role, now)
        except MessageError as error:
            self._rejected["decode"] += 1
            self._log.tell(logging.WARNING, "decode", f"refused: {error}")
            return None
        except StoreError as error:
            return Refused(str(error))

    def _answer(self, request: Request, role: str, now: float) -> Answer:
        if role not in ALLOWED[type(request)]:
            self._rejected["role"] += 1
            needed = " or ".join(sorted(ALLOWED[type(request)] - {LOCAL_ROLE}))
            return Refused(f"the role {role} may not do this; it takes {needed}")
        match request:
            case StatusRequest():
                return StatusAnswer(self._build_status(now))
            case RecordRead():
                return self._recorder.read(request)
            case RecordStart(per_rank=per_rank):
                run = 0 if self._core.view is None else self._core.view.run
                done = self._recorder.start(
                    run=run, per_rank=per_rank, epoch=self._core.epoch, now=time.time()
                )
            case RecordStop():
                done = self._recorder.stop(epoch=self._core.epoch, now=time.time())
        self._core.keep_rank_detail = self._recorder.per_rank
        if isinstance(done, Done):
            logger.info("%s", done.text)
        return done
