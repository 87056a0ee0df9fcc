"""Recordings of single passes: the rebalancer's order to a rank, and the rank's report. Both travel on the control
channel, beside the ranks' own messages, so a rank or a rebalancer that does not know them is not disturbed.

An order says what is wanted (this recording, running or ended) and may be repeated; a rank only reports once it was
ordered. A rank writes into the folder of its own configuration; an order carries a name, never a path.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, TypeAlias

from msgspec import Meta, Struct

from evenroute.dist.wire.messages import Count, Int62

CONTROL_PROTOCOL: Final = 4
"""Version of everything on the control channel: 2 brought recordings of passes, 3 pause and rollback.
Another version is refused by name."""

PassMode: TypeAlias = Literal["per_pass", "per_token"]
RecordMode: TypeAlias = Literal["stat", "per_pass", "per_token"]
PASS_MODES: Final[tuple[PassMode, ...]] = ("per_pass", "per_token")

NAME_RULE: Final = "1 to 64 letters, digits, '.', '_' or '-', the first a letter or a digit"
_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
OPTIONAL_NAME: Final = rf"\A({_NAME})?\Z"
RecordingName: TypeAlias = Annotated[str, Meta(pattern=rf"\A{_NAME}\Z")]
RecordingId: TypeAlias = Annotated[int, Meta(ge=1, lt=2**62)]
RankState: TypeAlias = Literal["starting", "recording", "ending", "ended", "refused", "failed"]
RecordingState: TypeAlias = RankState | Literal["lost"]
"""As an operator sees it; "lost": a rank that fell silent without reporting its end."""
RUNNING: Final = frozenset({"starting", "recording", "ending"})
OVER: Final = frozenset({"ended", "refused", "failed"})


def is_name(text: str) -> bool:
    """Whether a recording may be called so: `NAME_RULE`."""
    return re.search(rf"\A{_NAME}\Z", text) is not None


class RecordOrder(Struct, frozen=True, tag="record-order", forbid_unknown_fields=True):
    """What a rank is to do: this recording runs, or has ended. Orders of other runs or lower epochs are dropped."""

    run: Int62
    epoch: Int62
    recording: RecordingId
    mode: PassMode
    name: RecordingName
    running: bool
    protocol: int = CONTROL_PROTOCOL


class RecordReport(Struct, frozen=True, tag="record-report", forbid_unknown_fields=True):
    """What a rank's recording has come to.

    `passes`, `tokens`, `num_bytes` are in its files; `dropped` passes are not (no buffer was free, or too large);
    `merged` came together with their predecessor (mode per_pass). `reason`: why it ended by itself, was refused or
    failed, or what is odd about it. `path`: its first file; `files`: how many there are.
    """

    run: Int62
    rank: Annotated[int, Meta(ge=0, lt=65536)]
    recording: RecordingId
    state: RankState
    passes: Count = 0
    tokens: Count = 0
    num_bytes: Count = 0
    dropped: Count = 0
    merged: Count = 0
    files: Count = 0
    reason: Annotated[str, Meta(max_length=400)] = ""
    host: Annotated[str, Meta(max_length=255)] = ""
    path: Annotated[str, Meta(max_length=4096)] = ""
    protocol: int = CONTROL_PROTOCOL
