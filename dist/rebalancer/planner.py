"""The planner, seen from the rebalancer: an exception, a hang, a crash or garbage there never harms the rebalancer.

Parent and child (`planner_child`) speak length-prefixed msgpack over the child's stdin and stdout; nothing is ever
unpickled. The child plans one request at a time and lives on (its compiled code stays warm); the parent kills it when
the time limit is up and starts another. A child says when it is ready and when it compiles: the time limit is the
plan's alone.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress

import msgspec
import numpy as np
from numpy.typing import NDArray

from evenroute.dist.config import PlannerSettings
from evenroute.dist.rebalancer.planner_child import (
    COMPILING,
    LENGTH_BYTES,
    READY,
    DecideRequest,
    PlanReply,
    PlanRequest,
)
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.planner.policy import PolicySettings, Question

_CHILD = "evenroute.dist.rebalancer.planner_child"
_MAX_REPLY_BYTES = 64 * 1024 * 1024
CHECK_LIMIT_S = 60.0
START_LIMIT_S = 1800.0  # to import and to compile, on a host however busy


def plan_request(
    settings: PlannerSettings, cycle: int, loads: NDArray[np.float64], current: Placement
) -> PlanRequest:
    """A request with the settings' planner and limits; loads [L, E]."""
    return PlanRequest(
        cycle=cycle,
        function=settings.function,
        loads=loads.astype("<f8").tobytes(),
        current=pack_placement(current),
        policy=settings.policy,
        num_groups=settings.num_groups,
        target=settings.target,
        max_moves=settings.max_moves,
    )


def decide_request(
    question: Question, settings: PolicySettings, cycle: int, current: Placement
) -> DecideRequest:
    """The policy's question as a request."""
    return DecideRequest(
        cycle=cycle,
        windows=question.expected.windows.astype("<f8").tobytes(),
        weights=question.expected.weights.astype("<f8").tobytes(),
        max_moves=question.max_moves,
        noise=question.noise,
        full=question.full,
        costs=question.costs,
        settings=settings,
        current=pack_placement(current),
    )


class PlannerError(RuntimeError):
    """The planner failed; `kind` is exception, timeout, crash or garbage."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class PlannerProcess:
    """The parent's side. `request` returns at once; `fileno` gets readable, then `receive` until it returns a reply."""

    def __init__(self, time_limit_s: float, function: str = "") -> None:
        self._time_limit_s = time_limit_s
        self._function = function
        self._child: subprocess.Popen[bytes] | None = None
        self._buffer = bytearray()
        self._to_send = memoryview(b"")
        self._cycle = 0
        self._started_at = 0.0
        self._ready = False
        self.busy = False

    @property
    def pid(self) -> int | None:
        """The child's process id, if there is one."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Start the child ahead of the first request, so that no request waits for its imports."""
        if self._child is None:
            self._ready = False
            self._buffer.clear()
            self._child = subprocess.Popen(
                [sys.executable, "-m", _CHILD, self._function],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._stdin, self._stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
            for pipe in (self._stdin, self._stdout):
                os.set_blocking(pipe, False)

    def request(self, request: PlanRequest | DecideRequest) -> None:
        """Hand a request to the child; one at a time."""
        assert not self.busy
        self.start()
        body = msgspec.msgpack.encode(request)
        self._to_send = memoryview(len(body).to_bytes(LENGTH_BYTES, "little") + body)
        self._cycle, self._started_at, self.busy = request.cycle, time.monotonic(), True

    def poll_fds(self) -> tuple[int | None, int | None]:
        """(readable, writable) file descriptors to wait for; None where there is nothing to wait for."""
        if not self.busy:
            return None, None
        return self._stdout, self._stdin if self._to_send else None

    def remaining_s(self) -> float | None:
        """Seconds until the time limit; None when idle."""
        limit_s = self._time_limit_s if self._ready else START_LIMIT_S
        return None if not self.busy else self._started_at + limit_s - time.monotonic()

    def receive(self) -> PlanReply | None:
        """Go on sending and reading, without waiting. A reply, or None while it plans; PlannerError when it failed."""
        if not self.busy:
            return None
        try:
            self._write()
            reply = self._read()
        except (OSError, EOFError):
            status = self._stop()
            raise PlannerError("crash", f"planner process ended with status {status}") from None
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            self._stop()
            raise PlannerError(
                "garbage", f"planner process answered with garbage: {str(error)[:200]}"
            ) from None
        if reply is not None:
            self.busy = False
            if reply.error:
                raise PlannerError("exception", reply.error)
            return reply
        remaining = self.remaining_s()
        if remaining is not None and remaining <= 0:
            what = f"took longer than {self._time_limit_s:g} s" if self._ready else "was not ready in time"
            self._stop()
            raise PlannerError("timeout", f"planner {what} and was stopped")
        return None

    def _write(self) -> None:
        while self._to_send:
            try:
                sent = os.write(self._stdin, self._to_send)
            except BlockingIOError:
                return
            self._to_send = self._to_send[sent:]

    def _read(self) -> PlanReply | None:
        while True:
            try:
                chunk = os.read(self._stdout, 1 << 20)
            except BlockingIOError:
                break
            if not chunk:
                raise EOFError
            self._buffer += chunk
            if len(self._buffer) > _MAX_REPLY_BYTES + LENGTH_BYTES:
                break
        return self._parse()

    def _parse(self) -> PlanReply | None:
        if len(self._buffer) < LENGTH_BYTES:
            return None
        head = bytes(self._buffer[:LENGTH_BYTES])
        if head in (READY, COMPILING):
            self._ready, self._started_at = head == READY, time.monotonic()
            del self._buffer[:LENGTH_BYTES]
            return self._parse()
        size = int.from_bytes(head, "little")
        if size > _MAX_REPLY_BYTES:
            raise ValueError(f"reply of {size} bytes")
        if len(self._buffer) < LENGTH_BYTES + size:
            return None
        reply = msgspec.msgpack.decode(
            bytes(self._buffer[LENGTH_BYTES : LENGTH_BYTES + size]), type=PlanReply
        )
        del self._buffer[: LENGTH_BYTES + size]
        if reply.cycle != self._cycle:
            raise ValueError(f"reply to cycle {reply.cycle}, expected {self._cycle}")
        return reply

    def _stop(self) -> int | None:
        child, self._child, self.busy = self._child, None, False
        if child is None:
            return None
        with suppress(ProcessLookupError):
            child.kill()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        try:
            return child.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the child."""
        self._stop()


def plan_now(planner: PlannerProcess, request: PlanRequest | DecideRequest) -> PlanReply:
    """Request and wait: for scripts and tests. Raises PlannerError."""
    planner.request(request)
    with selectors.DefaultSelector() as selector:
        while True:
            reply = planner.receive()
            if reply is not None:
                return reply
            readable, writable = planner.poll_fds()
            for descriptor, event in ((readable, selectors.EVENT_READ), (writable, selectors.EVENT_WRITE)):
                if descriptor is not None:
                    selector.register(descriptor, event)
            selector.select(min(0.5, max(0.0, planner.remaining_s() or 0.0)))
            for key in list(selector.get_map().values()):
                selector.unregister(key.fileobj)


def check_planner(function: str, limit_s: float = CHECK_LIMIT_S) -> None:
    """ValueError in one line unless `function` imports, in a process of its own, and takes a planner's arguments."""
    command = [sys.executable, "-m", _CHILD, "--check", function]
    field = f"planner.function (--planner): {function!r}"
    expected = "expected MODULE:FUNCTION with the signature of evenroute.eplb.planner.plan.plan_placement"
    try:
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{field} was not imported within {limit_s:g} s; {expected}") from None
    if found.returncode:
        lines = found.stderr.decode(errors="replace").strip().splitlines()
        said = lines[-1] if found.returncode == 1 and lines else f"ended its process with {found.returncode}"
        raise ValueError(f"{field} {said}; {expected}")
