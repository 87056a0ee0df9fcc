"""What the kernels are compiled for, and what a program knows of its rows: tuples with names.

Fields alone: from Triton 3.8 on a constant that is handed to a step keeps its fields and loses its properties.
`RouteConstants` is the one constant of `route`; its parts are handed on to the steps that need them. `RowTile` is made
inside the kernel and holds tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from evenroute.routing.settings.modes import Mode


class Layout(NamedTuple):
    """How a row lies in the 32 lanes of a warp, in chunks of four experts a lane.

    experts             E
    groups, kept, top2  G groups (1 without) of which TG are kept (0 without); the score of a group is the sum of its
                        two largest keys, else the largest
    chunks              of a row
    group_pad, group_lanes  padded size of a group and the lanes that hold it; 0 and 1 without groups
    rows                of a program
    per_lane            places of a lane: 4 * chunks
    ragged              whether some places hold no expert
    """

    experts: int
    groups: int
    kept: int
    top2: bool
    chunks: int
    group_pad: int
    group_lanes: int
    rows: int
    per_lane: int
    ragged: bool


class LaunchPlan(NamedTuple):
    """How a launch chooses the best `top_k` of each row.

    depth        entries a lane list keeps; 0: choice by bound, with `segments` maxima and `slots` candidates a lane
    early        all loads before any arithmetic: a batch of one wave is latency
    coded        short rows: ids in a byte each, groups dealt out anew (`_codes.py`); depth does not matter then
    sort_bound, sort_best   by bound: the maxima, and what reaches the bound, are sorted over the lanes. More work, but
                 fewer steps that wait for each other than a reduction a column: for many columns
    warps        of a program
    registers    a thread; else the compiler stops at what lets a multiprocessor fill up, and serialises
    """

    layout: Layout
    top_k: int
    depth: int
    segments: int
    slots: int
    early: bool
    coded: bool
    sort_bound: bool
    sort_best: bool
    warps: int
    registers: int | None


class Score(NamedTuple):
    """From logits to keys and scores.

    plain_bias, marked_bias   which biases there are
    bias_on_score             they are added to softmax's probabilities
    payload                   what the tables say of an expert fits beside its inverted id
    any_bias                  one of the two
    """

    scoring: str
    softcap: float
    plain_bias: bool
    marked_bias: bool
    bias_on_score: bool
    payload: bool
    any_bias: bool


class Weighing(NamedTuple):
    """From the scores of the chosen experts to weights, and the order of columns."""

    by_id: bool
    renormalize: bool
    epsilon: float
    scale: float


class TableColumns(NamedTuple):
    """Where the columns of `DispatchTables` start in a layer's row."""

    replica_span: int
    replica_slot: int
    replica_threshold: int
    static_slot: int
    replica_payload: int
    static_payload: int
    replica_sequence: int
    replica_depth: int
    physical_to_logical: int
    slot_entry: int


class Counting(NamedTuple):
    """Counters and tickets: whether this launch counts, the copies of both and the words between two tickets.

    by_flag   a word on the device says whether it counts
    by_row    rows of padding are routed, and not counted
    """

    counts: bool
    by_flag: bool
    by_row: bool
    copies: int
    ticket_copies: int
    ticket_stride: int


class Emit(NamedTuple):
    """Which of `OUTPUT_NAMES` are written."""

    weights: bool
    physical_ids: bool
    logical_ids: bool
    local_ids: bool
    packed_ids: bool
    slot_histogram: bool


class Columns(NamedTuple):
    """The output's columns: S shared ones behind the routed, numbers of slots, and what is emitted.

    emit, routed   of the shared columns, and of the routed ones: a second launch may still have to deal these
    shared_pad     S rounded up to a power of two
    """

    shared: int
    shared_weight: float
    shared_per_rank: bool
    local_slots: int
    num_slots: int
    buckets: int
    emit: Emit
    routed: Emit
    shared_pad: int


class RouteConstants(NamedTuple):
    """Everything that `route` is compiled for.

    source   where experts come from: "logits", "given" or "table" (ids by token)
    mode     row of the table of dispatch modes (`settings.modes.Mode`)
    padding  there is a number of valid rows
    given_width   columns of the given ids and weights: K, or K + S with the shared ones
    pdl      programmatic dependent launch
    overlap  the launch that deals this batch may start early
    needs_sum        softmax's denominator over the whole row is needed: chosen scores alone do not give the weights
    carries_payload  the choice brings along what the tables say of each expert; payload_column: where that lies
    """

    source: str
    plan: LaunchPlan
    score: Score
    weighing: Weighing
    mode: Mode
    table: TableColumns
    counting: Counting
    columns: Columns
    padding: bool
    given_width: int
    pdl: bool
    overlap: bool
    needs_sum: bool
    carries_payload: bool
    payload_column: int


def needs_sum(source: str, layout: Layout, score: Score, weighing: Weighing) -> bool:
    """`RouteConstants.needs_sum`.

    By the sum of two a group may be dropped that holds the row's largest logit, beside which the chosen ones are 0.
    """
    if score.scoring != "softmax" or source == "given":
        return False
    plain = weighing.renormalize and weighing.epsilon == 0.0 and source == "logits"
    return score.any_bias or not plain or (layout.kept > 0 and layout.top2)


class RowTile(NamedTuple):
    """The rows of a program: tensors [1, rows], but for `lane` and `ready` [32, rows] and two pointers.

    number              place in the batch, int64
    logits, bias        pointers to the rows; `marked_bias` and `payloads` to what all share
    marked              rows that take the marked bias
    exists, live        rows of the batch; of those, the ones that are routed
    ready               live, and everything has arrived that the launch waits for first
    largest, denominator   of softmax over the whole row, where it is needed
    """

    number: Any
    logits: Any
    bias: Any
    marked_bias: Any
    payloads: Any
    marked: Any
    exists: Any
    live: Any
    ready: Any
    lane: Any
    largest: Any
    denominator: Any


class Given(NamedTuple):
    """Where experts come from instead of logits: ids and weights [T, K], or a table [vocab, K] by token id."""

    ids: Any
    weights: Any
    table: Any
    token_ids: Any
    vocab: Any


class OutputPointers(NamedTuple):
    """Where columns go, as in `Emit`; `scratch` counts the histogram."""

    weights: Any
    physical_ids: Any
    logical_ids: Any
    local_ids: Any
    packed_ids: Any
    scratch: Any
