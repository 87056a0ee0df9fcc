"""A stand-in for a rebalancer that only answers status requests, from a list of statuses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from evenroute.dist.wire.control import (
    LayerLoads,
    LayerRequest,
    RankHealth,
    RebalancerStatus,
    Refused,
    StatusAnswer,
    decode_request,
    encode_control,
)
from evenroute.dist.wire.link import CONTROL_TAG


def status(num_ranks: int = 4, **changes: Any) -> RebalancerStatus:
    """A healthy rebalancer's status with so many ranks."""
    key = (5 << 20, 3)
    ranks = [
        RankHealth(rank, 0.1, vote=7, held=key, last_seq=9, first_step=0, last_step=100, tokens=1000)
        for rank in range(num_ranks)
    ]
    known = RebalancerStatus(
        state="serving",
        degraded=[],
        pid=1,
        uptime_s=100.0,
        address="ipc:///run/x.sock",
        store="run.db",
        epoch=5 << 20,
        version=3,
        run=99,
        model="dsv3",
        ep_size=num_ranks,
        num_layers=58,
        num_logical_experts=256,
        num_slots=288,
        newest=key,
        live_lowest=key,
        live_highest=key,
        settled=True,
        ranks=ranks,
        interval=60.0,
        interval_unit="seconds",
        until_next_plan=12.0,
        plan_cycle=4,
        plan_seconds=0.25,
        plans_succeeded=4,
        plan_errors={},
        last_plan_error="",
        placements={"published": 3},
        balancedness_total=0.93,
        balancedness_per_layer=[None, 0.5, *[0.95] * 56],
        balancedness_predicted=0.99,
        counters={"windows_stored": 1000},
        lag_s=0.01,
        recording=False,
        recording_per_rank=False,
    )
    return msgspec.structs.replace(known, **changes)


class FakeControl:
    """Answers the n-th request with the n-th status (the last one again and again); None = no answer."""

    def __init__(
        self, folder: Path, answers: Sequence[RebalancerStatus | str | None], layer: LayerLoads | None = None
    ) -> None:
        self._layer = layer
        self.address = f"ipc://{folder}/fake.sock"
        self.requests = 0
        self._answers = list(answers)
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(self.address)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        while not self._ending.is_set():
            if not self._socket.poll(50):
                continue
            peer, tag, frame = self._socket.recv_multipart()
            assert tag == CONTROL_TAG
            if isinstance(decode_request(frame), LayerRequest):
                assert self._layer is not None
                self._socket.send_multipart([peer, CONTROL_TAG, encode_control(self._layer)])
                continue
            answer = self._answers[min(self.requests, len(self._answers) - 1)]
            if isinstance(answer, RebalancerStatus):
                self._socket.send_multipart([peer, CONTROL_TAG, encode_control(StatusAnswer(answer))])
            elif answer is not None:
                self._socket.send_multipart([peer, CONTROL_TAG, encode_control(Refused(answer))])
            self.requests += 1  # whoever sees it counted knows that the answer is out, not that it was read

    def __enter__(self) -> FakeControl:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(5)
        self._socket.close()
