"""The client side of operators and viewers: one question, one answer, within a time limit. No torch."""

from __future__ import annotations

import math
import socket
import time
import typing
from collections.abc import Iterator
from os import PathLike

import msgspec

from evenroute.dist.wire.address import Address, parse_address
from evenroute.dist.wire.control import (
    ANSWER_LIMIT_BYTES,
    Answer,
    RebalancerStatus,
    Recorded,
    RecordRead,
    Refused,
    Request,
    StatusAnswer,
    StatusRequest,
    decode_answer,
    decode_request,
    encode_control,
)
from evenroute.dist.wire.keys import load_client_keys
from evenroute.dist.wire.link import CONTROL_TAG, DealerLink
from evenroute.eplb._checks import describe, require_number, shown

_REQUESTS = typing.get_args(Request)
_Kind = typing.TypeVar("_Kind")


class UnreachableError(OSError):
    """The rebalancer did not answer in time: not there, stopped, or it does not know the key."""


class RefusedError(ValueError):
    """The rebalancer answered that it will not do it, and why."""


class ControlClient:
    """A connection to a rebalancer for one or more requests."""

    def __init__(
        self, address: str, *, keys: str | PathLike[str] | None = None, timeout_s: float = 5.0
    ) -> None:
        _require_limit(timeout_s)
        self._address = address
        self._timeout_s = timeout_s
        self._keys = keys
        self._parsed = parse_address(address, field="address")
        self._own = None if keys is None else load_client_keys(keys)
        self._link = self._connected()

    def _connected(self) -> DealerLink:
        return DealerLink(self._parsed, keys=self._own, max_message_bytes=ANSWER_LIMIT_BYTES, queues=True)

    def ask(self, request: Request) -> Answer:
        """Send and wait; UnreachableError past the time limit, MessageError for an answer that cannot be decoded.

        The client may be asked again after an UnreachableError: it connects anew, so that a late answer to one question
        is never taken for the answer to the next. A request that no rebalancer could read is refused with ValueError
        and not sent.
        """
        frame = _checked_frame(request)
        deadline = time.monotonic() + self._timeout_s
        self._link.send(CONTROL_TAG, frame)
        while (left := deadline - time.monotonic()) > 0:
            if self._link.socket.poll(math.ceil(1000 * left)):
                for frames in self._link.receive(1):
                    if len(frames) == 2 and frames[0] == CONTROL_TAG:
                        return decode_answer(frames[1])
        self._link.close(linger_ms=0)
        self._link = self._connected()
        raise UnreachableError(
            f"rebalancer at {self._address}: no answer within {self._timeout_s:g} s; {self._hint()}"
        )

    def expect(self, request: Request, kind: type[_Kind]) -> _Kind:
        """`ask`, for an answer of one kind; RefusedError with the rebalancer's reason for any other."""
        answer = self.ask(request)
        if isinstance(answer, kind):
            return answer
        unexpected = f"unexpected answer {type(answer).__name__}"
        raise RefusedError(answer.reason if isinstance(answer, Refused) else unexpected)

    def status(self) -> RebalancerStatus:
        """The rebalancer's status; raises as `expect`."""
        return self.expect(StatusRequest(), StatusAnswer).status

    def _hint(self) -> str:
        """What to look at; an address with keys does not answer peers without one."""
        found = _connection_problem(self._parsed)
        if found:
            return found
        if self._keys is None:
            return "something listens there: does it hang, or use keys (pass --keys)?"
        return f"something listens there: does it hang, or not know the key in {self._keys}?"

    def close(self) -> None:
        """Close at once."""
        self._link.close(linger_ms=0)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connection_problem(address: Address) -> str:
    """Why no connection to the address can be made now; empty where one can."""
    try:
        if address.ipc_path is not None:
            with socket.socket(socket.AF_UNIX) as found:
                found.settimeout(1.0)
                found.connect(str(address.ipc_path))
        else:
            socket.create_connection((address.host.strip("[]"), address.port), 1.0).close()
    except FileNotFoundError:
        return f"there is no socket {address.ipc_path}: is the rebalancer running, and is this its address?"
    except PermissionError:
        return f"the socket {address.ipc_path} is another user's: run this as the user of the rebalancer"
    except socket.gaierror as error:
        return f"the name {shown(address.host)} does not resolve ({error.strerror})"
    except ConnectionRefusedError:
        return "nothing listens there: is the rebalancer running?"
    except OSError as error:
        return f"no connection: {error.strerror or error}"
    return ""


def _require_limit(timeout_s: float) -> None:
    if isinstance(timeout_s, float) and not 0 < timeout_s <= 3600:  # also not finite
        raise ValueError(f"timeout: found {timeout_s:g} s, expected above 0 and at most 3600")
    require_number("timeout", timeout_s)
    if not 0 < timeout_s <= 3600:
        raise ValueError(f"timeout: found {describe(timeout_s)} s, expected above 0 and at most 3600")


def _checked_frame(request: Request) -> bytes:
    """The frame of a request, read again as the rebalancer will: a field may hold anything until then."""
    if not isinstance(request, _REQUESTS):
        names = ", ".join(kind.__name__ for kind in _REQUESTS)
        raise ValueError(f"request must be one of {names}, found {describe(request)}")
    try:
        frame = encode_control(request)
        decode_request(frame)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"request {type(request).__name__}: {reason}") from None
    return frame


def query_status(
    address: str, *, keys: str | PathLike[str] | None = None, timeout_s: float = 5.0
) -> RebalancerStatus:
    """The rebalancer's status. Raises UnreachableError, RefusedError, or ValueError for a bad address or key file."""
    with ControlClient(address, keys=keys, timeout_s=timeout_s) as client:
        return client.status()


def command(
    address: str, request: Request, *, keys: str | PathLike[str] | None = None, timeout_s: float = 5.0
) -> str:
    """Have something done; the text of what was done. Raises as `query_status`."""
    with ControlClient(address, keys=keys, timeout_s=timeout_s) as client:
        answer = client.ask(request)
    if isinstance(answer, Refused):
        raise RefusedError(answer.reason)
    return str(getattr(answer, "text", type(answer).__name__))


def read_recording(
    address: str,
    *,
    rank: int | None = None,
    keys: str | PathLike[str] | None = None,
    timeout_s: float = 30.0,
) -> Iterator[Recorded]:
    """A recording in parts of a few MB. Raises as `query_status`."""
    with ControlClient(address, keys=keys, timeout_s=timeout_s) as client:
        offset: int | None = 0
        while offset is not None:
            answer = client.expect(RecordRead(offset=offset, rank=rank), Recorded)
            yield answer
            offset = answer.next_offset
