"""The planner's own process: reads a request from stdin, plans, answers on stdout; keeps nothing between two requests.

Both directions are length-prefixed msgpack; `COMPILING` and `READY` stand between messages. Started by
`evenroute.dist.rebalancer.planner`.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import signal
import sys
import threading
from contextlib import suppress
from typing import IO, Any

import msgspec
import numpy as np
from msgspec import Struct
from numba.core.event import Listener, register
from numpy.typing import NDArray

from evenroute.dist.wire.messages import JobShape, WirePlacement
from evenroute.dist.wire.placement import pack_placement, unpack_placement
from evenroute.eplb.loads.balance import Balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.cost import TimeCosts
from evenroute.eplb.planner.history.expected import Expected
from evenroute.eplb.planner.policy import PolicySettings, Question, answer

LENGTH_BYTES = 4
READY = bytes(LENGTH_BYTES)  # in place of a length: waits for a request, or goes on with one
COMPILING = b"\xff" * LENGTH_BYTES


class PlanRequest(Struct, frozen=True, tag="plan", forbid_unknown_fields=True):
    """For a planner of one's own: loads float64 [L, E], the placement in use, and the planner's settings."""

    cycle: int
    function: str
    loads: bytes
    current: WirePlacement
    policy: str
    num_groups: int
    target: float | None
    max_moves: int | None


class DecideRequest(Struct, frozen=True, tag="decide", forbid_unknown_fields=True):
    """For the policy: a `Question` (windows float64 [W, L, E], weights [W]), its settings and the placement in use."""

    cycle: int
    windows: bytes
    weights: bytes
    max_moves: int
    noise: float
    full: bool
    costs: TimeCosts
    settings: PolicySettings
    current: WirePlacement


class PlanReply(Struct, frozen=True, forbid_unknown_fields=True):
    """A plan, or `error` in one line; a decision of the policy has an `action`, and no placement for "stay".

    Balancedness is the total, and the mean over layers; None where no layer has load.
    """

    cycle: int
    error: str = ""
    action: str = ""
    placement: WirePlacement | None = None
    policy: str = ""
    reason: str = ""
    before: float | None = None
    predicted: float | None = None
    mean_before: float | None = None
    mean_predicted: float | None = None
    moves: bytes = b""


def _read_exactly(stream: IO[bytes], size: int) -> bytes | None:
    data = stream.read(size)
    return data if len(data) == size else None


def _total(found: object) -> float | None:
    assert isinstance(found, Balancedness)
    return found.total


def _current(wire: WirePlacement) -> Placement:
    sizes = (wire.num_layers, wire.num_logical_experts, wire.num_slots, wire.ep_size, wire.num_nodes)
    return unpack_placement(wire, JobShape(*sizes))


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
        current = _current(request.current)
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


def decide(request: DecideRequest) -> PlanReply:
    """Answer the policy's question; exceptions come back as text."""
    try:
        current = _current(request.current)
        weights = np.frombuffer(request.weights, "<f8").copy()
        windows = np.frombuffer(request.windows, "<f8").reshape(len(weights), current.num_layers, -1).copy()
        question = Question(
            Expected(windows, weights), request.max_moves, request.noise, request.full, request.costs
        )
        decision = answer(question, current, request.settings)
        reply = PlanReply(request.cycle, action=decision.action, reason=decision.reason)
        if decision.plan is None:
            return reply
        plan = decision.plan
        return msgspec.structs.replace(
            reply,
            placement=pack_placement(plan.placement),
            policy=plan.policy,
            before=plan.before.total,
            predicted=plan.predicted.total,
            mean_before=plan.before.mean,
            mean_predicted=plan.predicted.mean,
            moves=np.asarray(plan.moves, "<i8").tobytes(),
        )
    except Exception as error:
        return PlanReply(request.cycle, error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


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


def _warm_up(function: str) -> None:
    """Import a planner of one's own; compile the built-in ones."""
    try:
        if function:
            importlib.import_module(function.partition(":")[0])
        if not function or function.startswith("evenroute."):
            importlib.import_module("evenroute.eplb.planner.warm_up").warm_up()
    except Exception as error:  # each request will fail with the same, and be answered with it
        print(f"planner {function}: {error}", file=sys.stderr)


class _CompileWatch(Listener):
    """Reports to the parent when a compilation begins and ends: it does not count against the plan's time limit."""

    def __init__(self, replies: IO[bytes]) -> None:
        self._replies = replies
        self._running = 0
        self._lock = threading.Lock()  # planners compile in several threads

    def _change(self, by: int) -> None:
        with self._lock:
            before, self._running = self._running, self._running + by
            if not before or not self._running:
                self._replies.write(COMPILING if self._running else READY)
                self._replies.flush()

    def on_start(self, event: object) -> None:
        """A compilation begins."""
        self._change(1)

    def on_end(self, event: object) -> None:
        """It has ended."""
        self._change(-1)


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
    _warm_up(sys.argv[1] if len(sys.argv) > 1 else "")
    replies.write(READY)
    replies.flush()
    register("numba:compile", _CompileWatch(replies))  # type: ignore[no-untyped-call]
    while (head := _read_exactly(requests, LENGTH_BYTES)) is not None:
        body = _read_exactly(requests, int.from_bytes(head, "little"))
        if body is None:
            return
        request = msgspec.msgpack.decode(body, type=PlanRequest | DecideRequest)
        found = plan(request) if isinstance(request, PlanRequest) else decide(request)
        reply = msgspec.msgpack.encode(found)
        replies.write(len(reply).to_bytes(LENGTH_BYTES, "little") + reply)
        replies.flush()


if __name__ == "__main__":
    main()
