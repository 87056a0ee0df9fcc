"""The start of a job: rank 0 alone asks for a snapshot, draws the run, and broadcasts both. No I/O, no clock.

Driver: on rank 0 `JobStartCore.begin`, then `receive` / `tick` until `result` is not None (or raises); broadcast
`encode_started(result)` on the CPU group; every rank, rank 0 too, loads what `decode_started` gives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from evenroute.dist.protocol.agreement import Version
from evenroute.dist.wire.messages import (
    NO_KEY,
    Down,
    Int62,
    JobShape,
    Key,
    MessageError,
    Refusal,
    Snapshot,
    SnapshotRequest,
    Up,
    WirePlacement,
)
from evenroute.dist.wire.placement import pack_placement, unpack_placement
from evenroute.eplb.placement.placement import Placement


@dataclass(frozen=True)
class JobStartConfig:
    """Times in seconds. ``required``: end with TimeoutError if no rebalancer answers, else start without one."""

    time_limit_s: float = 10.0
    resend_s: float = 0.5
    required: bool = False


class StartedJob(Struct, frozen=True, forbid_unknown_fields=True):
    """What rank 0 broadcasts: with this, and nothing else, each rank makes its `RankCore`.

    ``epoch`` is the first fence, 0 if no rebalancer answered; ``key`` is NO_KEY for the job's own placement.
    """

    run: Annotated[int, Meta(ge=1, lt=2**62)]
    epoch: Int62
    key: Key
    job: JobShape
    placement: WirePlacement

    def version(self) -> Version:
        """The placement that is live in all layers at step 0."""
        return Version.of(self.key, unpack_placement(self.placement, self.job))


_decoder = msgspec.msgpack.Decoder(StartedJob)


def encode_started(started: StartedJob) -> bytes:
    """Bytes to broadcast."""
    return msgspec.msgpack.encode(started)


def decode_started(data: bytes) -> StartedJob:
    """What rank 0 broadcast. Raises MessageError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"job start: {error}") from None


class JobStartCore:
    """Rank 0 of a starting job. ``random_bits(n)`` draws n bits (production: `secrets.randbits`)."""

    def __init__(
        self, job: JobShape, initial: Placement, config: JobStartConfig, random_bits: Callable[[int], int]
    ) -> None:
        self._job = job
        self._initial = initial
        self._config = config
        self._run = random_bits(62) or 1
        self._nonce = random_bits(62)
        self._sent_at = 0.0
        self._begun_at = 0.0
        self._result: StartedJob | None = None
        self.refused: str | None = (
            None  # why the request or the answered placement was not taken; for the log
        )

    def begin(self, now: float) -> list[Up]:
        """The first request."""
        self._begun_at = self._sent_at = now
        return [self._request()]

    def receive(self, message: Down) -> None:
        """Take the answer to this request; all else is ignored."""
        if isinstance(message, Refusal) and message.number in (0, self._nonce):
            self.refused = f"refused by the rebalancer: {message.reason}"
        if self._result is not None or not isinstance(message, Snapshot):
            return
        if message.run != 0 or message.nonce != self._nonce or message.epoch == 0:
            return
        self._result = self._started(message)

    def tick(self, now: float) -> list[Up]:
        """The request again, if it is time."""
        if self._result is not None or now - self._sent_at < self._config.resend_s:
            return []
        self._sent_at = now
        return [self._request()]

    def result(self, now: float) -> StartedJob | None:
        """What to broadcast; None = go on waiting. Raises TimeoutError past the limit, if a rebalancer is required."""
        if self._result is None and now - self._begun_at >= self._config.time_limit_s:
            if self._config.required:
                why = "" if self.refused is None else f" ({self.refused})"
                raise TimeoutError(
                    f"job start: no snapshot from the rebalancer within {self._config.time_limit_s:g} s{why}"
                )
            self._result = self._own(epoch=0)
        return self._result

    def _request(self) -> SnapshotRequest:
        return SnapshotRequest(run=0, nonce=self._nonce, job=self._job)

    def _own(self, *, epoch: int) -> StartedJob:
        return StartedJob(
            run=self._run, epoch=epoch, key=NO_KEY, job=self._job, placement=pack_placement(self._initial)
        )

    def _started(self, message: Snapshot) -> StartedJob:
        if message.placement is None:
            return self._own(epoch=message.epoch)
        try:
            version = Version.of(message.key, unpack_placement(message.placement, self._job))
            if version.digest != message.digest:
                raise MessageError(f"digest: found {version.digest:#x}, expected {message.digest:#x}")
        except ValueError as error:
            self.refused = f"snapshot of version {message.key} refused: {error}"
            return self._own(epoch=message.epoch)
        return StartedJob(
            run=self._run, epoch=message.epoch, key=message.key, job=self._job, placement=message.placement
        )
