"""In the place of SGLang's recorder and EPLBManager: recording is the rebalancer's, planning too.

SGLang's three endpoints (`/start_expert_distribution_record`, `stop`, `dump`) end here in every rank's process, where
an exception would end the server: what can't be done is logged in one line.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from evenroute.dist.client import RefusedError, command, query_status, read_recording
from evenroute.dist.engines.plugin import read_settings, refuse
from evenroute.dist.engines.sglang import dump
from evenroute.dist.engines.sglang.attach import attached, is_on
from evenroute.dist.engines.sglang.seams import ENGINE
from evenroute.dist.wire.control import RankRecording, RecordStart, RecordStop
from evenroute.dist.wire.recording import OVER

logger = logging.getLogger("evenroute.sglang")

LIMIT_S = 5.0  # for each answer of the rebalancer, and for a rank's files
OPERATOR_KEYS = "EVENROUTE_OPERATOR_KEYS"  # a rank's own key may not order recordings


class EvenrouteRecorder:
    """What the engine calls as its recorder. Counting is the router's: the calls inside a pass do nothing."""

    def __init__(self, rank: int, mode: str) -> None:
        self.rank, self.mode = rank, "stat" if mode == "stat_approx" else mode
        settings = read_settings(ENGINE)
        assert settings is not None, "the hooks are registered with settings only"
        self._address = settings.agent.rebalancer
        self._keys = os.environ.get(OPERATOR_KEYS) or settings.agent.keys or None
        self._folder = os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", "/tmp")
        self.recording = True  # as SGLang's is under EPLB: counts are always taken

    # ------------------------------------------------------------------------------- inside a pass

    @contextmanager
    def _nothing(self, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        yield {}

    with_current_layer = with_debug_name = disable_this_region = with_forward_pass = _nothing

    def on_select_experts(self, topk_ids: Any) -> None:
        return None

    def get_current_pass_count_buffer(self, layer_idx: int) -> None:
        return None

    def on_deepep_dispatch_normal(self, *_: Any, **__: Any) -> None:
        return None

    on_deepep_dispatch_low_latency = on_deepep_dispatch_normal

    # ------------------------------------------------------------------------------------ endpoints

    def start_record(self) -> None:
        """Begin a recording of SGLang's `--expert-distribution-recorder-mode`; one that runs is begun anew."""
        self._safely("start", self._start)

    def stop_record(self) -> None:
        """End it; it can still be dumped."""
        self._safely("stop", lambda: self._ask(RecordStop()))

    def dump_record(self, output_mode: str = "file") -> dict[str, Any] | None:
        """Write it as SGLang's recorder would (rank 0; with passes every rank that records), and begin anew."""
        return self._safely("dump", lambda: self._dump(output_mode))

    def _safely(self, what: str, call: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        try:
            return call()
        except (OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            logger.warning("evenroute: rank %d: recording: %s: %s", self.rank, what, reason)
            return None

    def _ask(self, request: RecordStart | RecordStop) -> None:
        if self.rank == 0:
            told = command(self._address, request, keys=self._keys, timeout_s=LIMIT_S)
            logger.info("evenroute: recording: %s", told)

    def _start(self) -> None:
        order = RecordStart(mode=self.mode)  # type: ignore[arg-type]
        try:
            self._ask(order)
        except RefusedError:
            self._ask(RecordStop())
            self._ask(order)

    def _dump(self, output_mode: str) -> dict[str, Any] | None:
        rank = attached()
        if rank is None:
            raise RuntimeError("no model is loaded")
        layers = dump.Layers(rank.metadata.num_layers, tuple(rank.layer_ids))
        if self.mode != "stat":
            self._ask(RecordStop())
            records = dump.rank_records(self._rank_files(), self.rank, layers)
            dump.save(self._folder, records, rank=self.rank)
            return None
        if self.rank:
            return None
        runs = query_status(self._address, keys=self._keys, timeout_s=LIMIT_S).recording
        parts = list(read_recording(self._address, keys=self._keys, timeout_s=LIMIT_S))
        found = dump.stat_object(parts, layers)
        if output_mode == "object":
            return found
        logger.info("evenroute: recording: written to %s", dump.save(self._folder, found, rank=None))
        if runs:
            self._start()
        return None

    def _rank_files(self) -> str:
        """First file of this rank's recording, once it is finished."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            status = query_status(self._address, keys=self._keys, timeout_s=LIMIT_S)
            found: RankRecording | None = status.ranks[self.rank].recording
            if found is None and status.shared_counts and self.rank:
                raise RuntimeError("all ranks see the same tokens: rank 0 records for all")
            if found is not None and found.state in OVER:
                if found.state != "ended" or not found.path:
                    raise RuntimeError(f"{found.state}: {found.reason or 'nothing was recorded'}")
                return found.path
            if time.monotonic() > deadline:
                state = "not begun" if found is None else found.state
                raise RuntimeError(f"this rank's files are not finished within {LIMIT_S:g} s ({state})")
            time.sleep(0.05)


class EvenrouteManager:
    """In EPLBManager's place: planning is the rebalancer's, switching the agent's."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._checked = False

    def on_forward_pass_end(self) -> None:
        """Behind each pass; the first one shows whether evenroute is attached."""
        if not self._checked:
            self._checked = True
            if attached() is None:
                refuse(ENGINE, "ModelRunner.load_model could not be hooked (see SGLang's log)")

    def reset_generator(self) -> None:
        return None

    def disable_rebalance(self, reason: str) -> None:
        return None

    def enable_rebalance(self) -> None:
        return None

    def rebalance(self) -> Iterator[None]:
        """Nothing is rebalanced in here."""
        return iter(())


def init_recorder(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ExpertDistributionRecorder.init_new(expert_location_metadata, rank)`; 0.5.17 has server_args in front."""
    from sglang.srt.runtime_context import get_exec

    moe = get_exec().moe
    if not is_on(moe):
        return original(*args, **kwargs)
    rank = kwargs.get("rank", args[-1] if args else 0)
    return EvenrouteRecorder(int(rank), moe.expert_distribution_recorder_mode or "stat")
