"""What operators and viewers say to the rebalancer, and its answers: the same socket as the ranks', another tag.

Roles: a viewer may ask for the status and a layer's loads, and read recordings; an operator may also start and
stop recordings, pause plans and roll back; a rank may only report on its recording of passes. On an address without
keys every local peer may do all.

Versions: every request carries `CONTROL_PROTOCOL`; one of another version is answered by `Refused`, which no version
changes, with both numbers.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from evenroute.dist.wire.keys import LOCAL_ROLE
from evenroute.dist.wire.membership import MembershipView, ScaleOrder
from evenroute.dist.wire.messages import MessageError
from evenroute.dist.wire.recording import (
    CONTROL_PROTOCOL,
    OPTIONAL_NAME,
    RecordingState,
    RecordMode,
    RecordOrder,
    RecordReport,
)
from evenroute.dist.wire.tracing import TraceAnswer, TraceOrder, TraceReport, TraceRequest

CONTROL_LIMIT_BYTES = 64 * 1024
ANSWER_LIMIT_BYTES = 32 * 1024 * 1024


class StatusRequest(Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Asks for the rebalancer's state."""

    protocol: int = CONTROL_PROTOCOL


class RecordStart(Struct, frozen=True, tag="record-start", forbid_unknown_fields=True):
    """Keep single windows from now on; `per_rank`: each rank's windows as well.

    Modes per_pass and per_token also have every rank write its own files, called `name` ("" = the time in UTC).
    """

    per_rank: bool = False
    mode: RecordMode = "stat"
    name: Annotated[str, Meta(pattern=OPTIONAL_NAME)] = ""
    protocol: int = CONTROL_PROTOCOL


class RecordStop(Struct, frozen=True, tag="record-stop", forbid_unknown_fields=True):
    """End the recording; it can still be dumped."""

    protocol: int = CONTROL_PROTOCOL


class RecordRead(Struct, frozen=True, tag="record-read", forbid_unknown_fields=True):
    """The next windows of the recording, from number `offset`; `rank` None: fleet-wide."""

    offset: Annotated[int, Meta(ge=0, lt=2**62)] = 0
    rank: Annotated[int, Meta(ge=0, lt=65536)] | None = None
    protocol: int = CONTROL_PROTOCOL


class PlansOrder(Struct, frozen=True, tag="plans", forbid_unknown_fields=True):
    """Stop plans (placements stay), go on with them, or publish the placement before as a new version."""

    what: Literal["pause", "resume", "rollback"]
    protocol: int = CONTROL_PROTOCOL


class LayerRequest(Struct, frozen=True, tag="layer", forbid_unknown_fields=True):
    """What did this layer's ranks and experts carry in the last interval?"""

    layer: Annotated[int, Meta(ge=0, lt=65536)]
    protocol: int = CONTROL_PROTOCOL


Request: TypeAlias = (
    StatusRequest
    | LayerRequest
    | TraceRequest
    | RecordStart
    | RecordStop
    | RecordRead
    | PlansOrder
    | ScaleOrder
    | RecordReport
    | TraceReport
)

ALLOWED: dict[type, frozenset[str]] = {
    StatusRequest: frozenset({LOCAL_ROLE, "operator", "viewer"}),
    LayerRequest: frozenset({LOCAL_ROLE, "operator", "viewer"}),
    TraceRequest: frozenset({LOCAL_ROLE, "operator", "viewer"}),
    RecordRead: frozenset({LOCAL_ROLE, "operator", "viewer"}),
    RecordStart: frozenset({LOCAL_ROLE, "operator"}),
    RecordStop: frozenset({LOCAL_ROLE, "operator"}),
    PlansOrder: frozenset({LOCAL_ROLE, "operator"}),
    ScaleOrder: frozenset({LOCAL_ROLE, "operator"}),
    RecordReport: frozenset({LOCAL_ROLE, "rank"}),
    TraceReport: frozenset({LOCAL_ROLE, "rank"}),
}
RANK_ROLES = frozenset({LOCAL_ROLE, "rank"})


class RankRecording(Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's part in a recording of passes, as it last reported; see `RecordReport`."""

    state: RecordingState
    passes: int
    tokens: int
    num_bytes: int
    dropped: int
    merged: int
    files: int
    reason: str
    host: str
    path: str


class RankHealth(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank as the rebalancer sees it; `heard_s_ago` None = never in this life. Keys are (epoch, version)."""

    rank: int
    heard_s_ago: float | None
    vote: int = 0
    held: tuple[int, int] = (0, 0)
    fence: int = 0
    last_seq: int = 0
    missing_windows: int = 0
    first_step: int | None = None
    last_step: int | None = None
    tokens: int = 0
    behind: bool = False
    ended: bool = False  # it has said goodbye
    shadow: bool = False  # it takes no placement up
    recording: RankRecording | None = None


class RebalancerStatus(Struct, frozen=True, forbid_unknown_fields=True):
    """The rebalancer's state; times in seconds. `degraded`: why, if at all.

    `state`: waiting, serving, finished (every rank of the job has said goodbye) or ended. `last_action` (stay, shares,
    moves, full; of a planner of one's own its policy) and `last_reason` are those of the last decision.
    """

    state: str
    degraded: list[str]
    pid: int
    uptime_s: float
    address: str
    store: str
    epoch: int
    version: int
    run: int
    model: str
    ep_size: int
    num_layers: int
    num_logical_experts: int
    num_slots: int
    newest: tuple[int, int]
    live_lowest: tuple[int, int]
    live_highest: tuple[int, int]
    settled: bool
    ranks: list[RankHealth]
    interval: float
    interval_unit: str
    until_next_plan: float
    plan_cycle: int
    plan_seconds: float | None
    plans_succeeded: int
    plan_errors: dict[str, int]
    last_plan_error: str
    placements: dict[str, int]
    balancedness_total: float | None
    balancedness_per_layer: list[float | None]
    balancedness_predicted: float | None
    counters: dict[str, int]
    lag_s: float
    recording: bool
    recording_per_rank: bool
    recording_mode: str = ""  # of the recording that runs or can be dumped, "" = none
    recording_name: str = ""
    paused: bool = False  # an operator has stopped the plans
    last_action: str = ""
    last_reason: str = ""
    membership: MembershipView = MembershipView()  # of a job whose ranks come and go
    costs: str = ""  # what moves and imbalance cost, and whose figures these are, in one line
    slot_seconds: float | None = None  # that a moved slot costs its rank, ...
    step_seconds: float | None = None  # ... and a step of the last interval, as measured
    saved_gpu_seconds: float | None = (
        None  # of this run so far, against its first placement; None: not known yet
    )
    cost_gpu_seconds: float | None = None  # that moves have taken
    worth: str = ""  # both in one line, and whose figures they are
    shared_counts: bool = False  # all ranks see the same tokens: rank 0 counts and records for all
    plans_overdue: bool = False  # several intervals went by without a plan that succeeded
    rank_load: list[
        float
    ] = []  # of each rank over the mean of ranks, all layers, last interval; [] = no data
    hottest_rank: list[int] = []  # of each layer, last interval; -1 = no data
    hottest_expert: list[int] = []
    hottest_expert_load: list[float] = []  # its part of the layer's load

    @property
    def healthy(self) -> bool:
        """Whether nothing is degraded."""
        return not self.degraded


class RecordedWindow(Struct, frozen=True, forbid_unknown_fields=True):
    """Counts int64 [L, E] (raw little-endian) of steps first_step..last_step."""

    time: float
    first_step: int
    last_step: int
    tokens: int
    complete: bool
    counts: bytes


class Recorded(Struct, frozen=True, tag="recorded", forbid_unknown_fields=True):
    """A part of a recording; `next_offset` None = this was the last part. The shape is the recorded run's."""

    windows: list[RecordedWindow]
    next_offset: int | None
    model: str
    num_layers: int
    num_logical_experts: int
    num_slots: int
    ep_size: int
    num_nodes: int
    top_k: int
    ranks: list[int]


class StatusAnswer(Struct, frozen=True, tag="status", forbid_unknown_fields=True):
    """Answer to `StatusRequest`."""

    status: RebalancerStatus


class ExpertLoad(Struct, frozen=True, forbid_unknown_fields=True):
    """An expert's part of its layer's load, and the ranks that hold it."""

    expert: int
    load: float
    ranks: list[int]


class LayerLoads(Struct, frozen=True, tag="layer", forbid_unknown_fields=True):
    """Answer to `LayerRequest`: each rank's load over the mean, and the hottest experts; both [] without load."""

    layer: int
    rank_load: list[float]
    experts: list[ExpertLoad]


class Done(Struct, frozen=True, tag="done", forbid_unknown_fields=True):
    """It is done; `text` says what."""

    text: str


class Refused(Struct, frozen=True, tag="refused", forbid_unknown_fields=True):
    """It is not done, and why."""

    reason: str


_Message = TypeVar("_Message", bound="Request | Order")
Order: TypeAlias = RecordOrder | TraceOrder
Answer: TypeAlias = StatusAnswer | LayerLoads | TraceAnswer | Recorded | Done | Refused | Order

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


class _Versioned(Struct):
    protocol: int


_versions = msgspec.msgpack.Decoder(_Versioned)


class ForeignVersionError(MessageError):
    """The sender speaks another version of the control messages."""


def encode_control(message: Request | Answer) -> bytes:
    """The frame of a request or an answer (msgpack)."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """A request; MessageError in one line if it cannot be decoded, ForeignVersionError if its version is another."""
    return _decode(_requests, frame, "control frame")


def decode_order(frame: bytes | memoryview) -> Order:
    """The rebalancer's order to a rank; MessageError in one line if it cannot be decoded."""
    return _decode(_orders, frame, "order")


def _decode(decoder: msgspec.msgpack.Decoder[_Message], frame: bytes | memoryview, name: str) -> _Message:
    if len(frame) > CONTROL_LIMIT_BYTES:
        raise MessageError(f"{name}: found {len(frame)} bytes, allowed at most {CONTROL_LIMIT_BYTES}")
    try:
        message = decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        _check_version(frame)
        raise MessageError(f"{name}: {_line(error)}") from None
    _check_protocol(message.protocol)
    return message


def decode_answer(frame: bytes | memoryview) -> Answer:
    """An answer; MessageError in one line if it cannot be decoded."""
    try:
        return _answers.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(
            f"answer of the rebalancer: {_line(error)}; is it of another evenroute version than this command?"
        ) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _check_version(frame: bytes | memoryview) -> None:
    """A frame of another version may fail on its fields; then the version is what to report."""
    try:
        version = _versions.decode(frame).protocol
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    _check_protocol(version)


def _check_protocol(version: int) -> None:
    if version != CONTROL_PROTOCOL:
        raise ForeignVersionError(f"control protocol: found {version}, expected {CONTROL_PROTOCOL}")
