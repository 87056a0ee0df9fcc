"""The planner in a process of its own: an exception, a hang, a crash or garbage there never harms the rebalancer.

Parent and child speak length-prefixed msgpack over the child's stdin and stdout; nothing is ever unpickled. The child
plans one request at a time and lives on (its compiled code stays warm); the parent kills it when the time limit is up
and starts another. A child says when it is ready (imports and compilation done): the time limit is the plan's alone.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from evenroute.dist.config import DEFAULT_PLANNER, PlannerSettings
from evenroute.dist.wire.messages import WirePlacement, pack_placement
from evenroute.eplb.loads.balance import Balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

_LENGTH_BYTES = 4
_MAX_REPLY_BYTES = 64 * 1024 * 1024
_DEFAULT_FUNCTION = DEFAULT_PLANNER
CHECK_LIMIT_S = 60.0
START_LIMIT_S = 300.0  # until a child is ready; a first compilation takes a minute on a busy host


class PlanRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What to plan from: loads float64 [L, E], the placement in use, and the planner's settings."""

    cycle: int
    function: str
    loads: bytes
    current: WirePlacement
    policy: str
    num_groups: int
    target: float | None
    max_moves: int | None


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


class PlanReply(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan, or `error` in one line. Balancedness of the total, None where no layer has load."""

    cycle: int
    error: str = ""
    placement: WirePlacement | None = None
    policy: str = ""
    reason: str = ""
    before: float | None = None
    predicted: float | None = None
    moves: bytes = b""


class PlannerError(RuntimeError):
    """The planner failed; `kind` is exception, timeout, crash or garbage."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def _placement(wire: WirePlacement) -> Placement:
    shape = (wire.num_layers, wire.num_slots)
    shares = (
        None if wire.shares is None else np.frombuffer(wire.shares, "<u2").astype(np.uint16).reshape(shape)
    )
    slots = np.frombuffer(wire.physical_to_logical, "<i4").astype(np.int32).reshape(shape)
    return Placement(slots, wire.num_logical_experts, Topology(wire.ep_size, wire.num_nodes), shares)


# ------------------------------------------------------------------------------------------ parent


class PlannerProcess:
    """The parent's side. `request` returns at once; `fileno` gets readable, then `receive` until it returns a reply."""

    def __init__(self, time_limit_s: float, function: str = _DEFAULT_FUNCTION) -> None:
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
        """Start the child ahead of the first request, so that its imports cost nobody a wait."""
        if self._child is None:
            self._ready = False
            self._buffer.clear()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "evenroute.dist.rebalancer.planner", self._function],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for pipe in (self._child.stdin, self._child.stdout):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)

    def request(self, request: PlanRequest) -> None:
        """Hand a request to the child; one at a time."""
        assert not self.busy
        self.start()
        body = msgspec.msgpack.encode(request)
        self._to_send = memoryview(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
        self._cycle, self._started_at, self.busy = request.cycle, time.monotonic(), True

    def poll_fds(self) -> tuple[int | None, int | None]:
        """(readable, writable) file descriptors to wait for; None where there is nothing to wait for."""
        if self._child is None or not self.busy:
            return None, None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        return self._child.stdout.fileno(), self._child.stdin.fileno() if self._to_send else None

    def remaining_s(self) -> float | None:
        """Seconds until the time limit; None when idle."""
        limit_s = self._time_limit_s if self._ready else START_LIMIT_S
        return None if not self.busy else self._started_at + limit_s - time.monotonic()

    def receive(self) -> PlanReply | None:
        """Go on sending and reading, without waiting. A reply, or None while it plans; PlannerError when it failed."""
        if not self.busy:
            return None
        assert self._child is not None
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
        assert self._child is not None
        assert self._child.stdin is not None
        while self._to_send:
            try:
                sent = os.write(self._child.stdin.fileno(), self._to_send)
            except BlockingIOError:
                return
            self._to_send = self._to_send[sent:]

    def _read(self) -> PlanReply | None:
        assert self._child is not None
        assert self._child.stdout is not None
        while True:
            try:
                chunk = os.read(self._child.stdout.fileno(), 1 << 20)
            except BlockingIOError:
                break
            if not chunk:
                raise EOFError
            self._buffer += chunk
            if len(self._buffer) > _MAX_REPLY_BYTES + _LENGTH_BYTES:
                break
        return self._parse()

    def _parse(self) -> PlanReply | None:
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        size = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
        if size == 0 and not self._ready:  # "ready"
            self._ready, self._started_at = True, max(self._started_at, time.monotonic())
            del self._buffer[:_LENGTH_BYTES]
            return self._parse()
        if size > _MAX_REPLY_BYTES:
            raise ValueError(f"reply of {size} bytes")
        if len(self._buffer) < _LENGTH_BYTES + size:
            return None
        reply = msgspec.msgpack.decode(
            bytes(self._buffer[_LENGTH_BYTES : _LENGTH_BYTES + size]), type=PlanReply
        )
        del self._buffer[: _LENGTH_BYTES + size]
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


# ------------------------------------------------------------------------------------------- child


def _read_exactly(stream: IO[bytes], size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def _total(found: object) -> float | None:
    assert isinstance(found, Balancedness)
    return found.total


def _arguments(
    loads: NDArray[np.float64], current: Placement, request: PlanRequest
) -> tuple[tuple[NDArray[np.float64]], dict[str, Any]]:
    """How a planner is called: what `check_planner` binds and `plan` passes."""
    return (loads,), {
        "topology": current.topology,
        "num_slots": current.num_slots,
        "num_groups": request.num_groups,
        "current": current,
        "policy": request.policy,
        "target": request.target,
        "max_moves": request.max_moves,
    }


def _find(function: str) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def plan(request: PlanRequest) -> PlanReply:
    """Run the planner on one request; its exceptions come back as text."""
    try:
        function = _find(request.function)
        current = _placement(request.current)
        loads: NDArray[np.float64] = (
            np.frombuffer(request.loads, "<f8").reshape(current.num_layers, -1).astype(np.float64)
        )
        positional, named = _arguments(loads, current, request)
        found = function(*positional, **named)
        return PlanReply(
            cycle=request.cycle,
            placement=pack_placement(found.placement),
            policy=found.policy,
            reason=found.reason,
            before=_total(found.before),
            predicted=_total(found.predicted),
            moves=np.asarray(found.moves, "<i8").tobytes(),
        )
    except Exception as error:  # whatever it is, the rebalancer only wants to know that there is no plan
        return PlanReply(
            cycle=request.cycle, error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        )


def _misfit(function: str) -> str | None:
    """Why `function` cannot be a planner: not importable, not callable, or not with a planner's arguments."""
    try:
        found = _find(function)
    except Exception as error:
        return f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not callable(found):
        return f"is a {type(found).__name__}, not a function"
    current = Placement.initial(1, 1, 1, Topology(1))
    wire = pack_placement(current)
    positional, named = _arguments(
        np.zeros((1, 1)), current, PlanRequest(0, "", b"", wire, "", 1, None, None)
    )
    try:
        inspect.signature(found).bind(*positional, **named)
    except (TypeError, ValueError) as error:
        return f"does not take a planner's arguments (loads, {', '.join(named)}): {error}"
    return None


def check_planner(function: str, limit_s: float = CHECK_LIMIT_S) -> None:
    """ValueError in one line unless `function` imports, in a process of its own, and takes a planner's arguments."""
    command = [sys.executable, "-m", "evenroute.dist.rebalancer.planner", "--check", function]
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


def _warm_up(function: str) -> None:
    """Import the planner; compile the built-in one."""
    try:
        importlib.import_module(function.partition(":")[0])
        if function == _DEFAULT_FUNCTION:
            importlib.import_module("evenroute.eplb.planner.warm_up").warm_up()
    except Exception as error:  # each request will fail with the same, and be answered with it
        print(f"planner {function}: {error}", file=sys.stderr)


def _die_with_parent() -> None:
    """Linux: SIGKILL when the rebalancer is gone, so that a hanging planner never outlives it."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


def main() -> None:
    """The child: read a request, plan, answer; until stdin ends. `--check FUNCTION`: say why it is no planner."""
    _die_with_parent()
    if len(sys.argv) > 2 and sys.argv[1] == "--check":
        misfit = _misfit(sys.argv[2])
        if misfit is not None:
            print(misfit, file=sys.stderr)
        sys.exit(misfit is not None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a planner prints goes to the log, never into the replies
    requests = sys.stdin.buffer
    _warm_up(sys.argv[1] if len(sys.argv) > 1 else _DEFAULT_FUNCTION)
    replies.write(bytes(_LENGTH_BYTES))
    replies.flush()
    while (head := _read_exactly(requests, _LENGTH_BYTES)) is not None:
        body = _read_exactly(requests, int.from_bytes(head, "little"))
        if body is None:
            return
        reply = msgspec.msgpack.encode(plan(msgspec.msgpack.decode(body, type=PlanRequest)))
        replies.write(len(reply).to_bytes(_LENGTH_BYTES, "little") + reply)
        replies.flush()


def plan_now(planner: PlannerProcess, request: PlanRequest) -> PlanReply:
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


if __name__ == "__main__":
    main()
