# mypy: ignore-errors
"""The second launch of deal="batch": every program solves the batch, then deals its own 32 rows. See `solve`.

The solver works on slots as they lie on ranks, [ranks, slots of a rank] padded to powers of two and flattened: a rank's
load is a sum over one axis, and the next replica's word comes through shared memory.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from evenroute.routing.kernels.bound import count_bits
from evenroute.routing.kernels.deal import hash_row
from evenroute.routing.kernels.outputs import publish_histogram
from evenroute.routing.kernels.types import Columns, TableColumns


class DealConstants(NamedTuple):
    """What the launch is compiled for.

    experts, experts_pad, top_k, top_k_pad    pads are powers of two
    ranks, ranks_pad, local_pad   ranks; padded numbers of them and of a rank's slots
    choice     the output in which the routing launch left the logical ids: "physical_ids", "local_ids", "packed_ids" or
               "logical_ids"
    rounds, units   of the solver
    node, place     ranks whose counts are added up, and this one's place among them; 0: its own counts alone
    overlap    programmatic dependent launch behind the routing launch
    """

    experts: int
    experts_pad: int
    top_k: int
    top_k_pad: int
    ranks: int
    ranks_pad: int
    local_pad: int
    columns: Columns
    table: TableColumns
    choice: str
    rounds: int
    units: int
    node: int
    place: int
    overlap: bool


@triton.jit
def table_word(tables_ptr, column, index, mask, other: tl.constexpr):
    return tl.load(tables_ptr + column + index, mask=mask, other=other)


@triton.jit
def batch_counts(counts_ptr, bits_ptr, node_ptr, rows, expert, CONSTANTS: tl.constexpr):
    """(tokens of each expert in the batch, those before this program's rows): [experts_pad] int32."""
    E: tl.constexpr = CONSTANTS.experts
    pid = tl.program_id(0)
    known = (expert < E)[None, :]
    # Every load on its way before the first is needed; one sum over the lines at the end.
    chunk = pid // 8 * 8 + tl.arange(0, 8)[:, None]
    marks = tl.load(bits_ptr + chunk * E + expert[None, :], mask=known & (chunk < pid), other=0)
    line = tl.arange(0, 16)[:, None]
    PAD: tl.constexpr = CONSTANTS.experts_pad
    totals = tl.zeros([16, PAD], tl.int32)
    befores = tl.zeros([16, PAD], tl.int32)
    for first in range(0, tl.cdiv(rows, 256), 16):
        block = first + line
        found = tl.load(counts_ptr + block * E + expert[None, :], mask=known & (block * 256 < rows), other=0)
        totals += found
        befores += tl.where(block < pid // 8, found, 0)
    total = tl.sum(totals, axis=0)
    before = tl.sum(befores, axis=0) + tl.sum(count_bits(marks), axis=0)
    if CONSTANTS.node > 0:
        total = tl.zeros(expert.shape, tl.int32)
        for rank in range(CONSTANTS.node):
            found = tl.load(node_ptr + rank * E + expert, mask=expert < E, other=0)
            total += found
            before += tl.where(rank < CONSTANTS.place, found, 0)
    return total, before


@triton.jit
def wide_sum(values, CONSTANTS: tl.constexpr):
    """Each rank's sum, at every one of its slots."""
    R: tl.constexpr = CONSTANTS.ranks_pad
    S: tl.constexpr = CONSTANTS.local_pad
    by_rank = tl.sum(tl.reshape(values, [R, S]), axis=1)
    return tl.reshape(tl.broadcast_to(by_rank[:, None], [R, S]), [R * S])


@triton.jit
def lay_out(tables_ptr, CONSTANTS: tl.constexpr):
    """The layer's replicas as the solver sees them, by place [ranks_pad * local_pad]; see the names at the end."""
    TABLE: tl.constexpr = CONSTANTS.table
    COLUMNS: tl.constexpr = CONSTANTS.columns
    S: tl.constexpr = CONSTANTS.local_pad
    LOCAL: tl.constexpr = COLUMNS.local_slots
    place = tl.arange(0, CONSTANTS.ranks_pad * S)
    inside = (place // S < CONSTANTS.ranks) & (place % S < LOCAL)
    slot = place // S * LOCAL + place % S
    expert = table_word(tables_ptr, TABLE.physical_to_logical, slot, inside, 0)
    entry = table_word(tables_ptr, TABLE.slot_entry, slot, inside, 0)
    span = table_word(tables_ptr, TABLE.replica_span, expert, inside, 2)
    offset = span >> 11
    number = (span >> 1) & 0x3FF
    index = entry - offset
    following = tl.where(index + 1 < number, entry + 1, offset)
    previous = tl.where(index > 0, entry - 1, offset + number - 1)
    many = inside & (number > 1) & (index < number)
    upper = table_word(tables_ptr, TABLE.replica_threshold, entry, inside, 0)
    lower = table_word(tables_ptr, TABLE.replica_threshold, entry - 1, inside & (index > 0), 0)
    next_upper = table_word(tables_ptr, TABLE.replica_threshold, following, many, 0)
    next_lower = table_word(
        tables_ptr, TABLE.replica_threshold, following - 1, many & (following > offset), 0
    )
    next_slot = table_word(tables_ptr, TABLE.replica_slot, following, many, 0)
    last_slot = table_word(tables_ptr, TABLE.replica_slot, previous, many, 0)
    used = many & (upper > lower)
    pair = used & (next_upper > next_lower) & ((number > 2) | (index == 0))
    after = tl.where(many, next_slot // LOCAL * S + next_slot % LOCAL, place)
    ahead = tl.where(many, last_slot // LOCAL * S + last_slot % LOCAL, place)
    weight = tl.where(number > 2, 3, 2)
    return expert, upper, lower, used, pair, after, ahead, weight


@triton.jit
def correct(layout, total, CONSTANTS: tl.constexpr):
    """Units of every place after the rounds of flows."""
    expert, upper, lower, used, pair, after, ahead, weight = layout
    tokens = tl.gather(total, expert, axis=0)
    scaled = tokens.to(tl.int64) * CONSTANTS.units
    units = ((scaled * upper) // 65535 - (scaled * lower) // 65535).to(tl.int32)
    sharers = tl.maximum(wide_sum((used & (tokens > 0)).to(tl.int32), CONSTANTS), 1)
    divisor = tl.maximum(sharers, tl.gather(sharers, after, axis=0)) * weight
    for _ in range(CONSTANTS.rounds):
        load = wide_sum(units, CONSTANTS)
        half = units >> 1
        # One trip through shared memory for both words.
        other = tl.gather((load.to(tl.int64) << 32) | half.to(tl.int64), after, axis=0)
        gap = load - (other >> 32).to(tl.int32)
        other_half = (other & 0xFFFFFFFF).to(tl.int32)
        size = tl.minimum(tl.abs(gap) // divisor, tl.where(gap > 0, half, other_half))
        flow = tl.where(pair, tl.where(gap > 0, size, -size), 0)
        units = units - flow + tl.gather(flow, ahead, axis=0)
    return units


@triton.jit
def replica_ends(tables_ptr, units, total, entries, salt, CONSTANTS: tl.constexpr):
    """Where each replica's tokens end, in the order of `replica_slot`."""
    expert, offset, place = entries
    mine = tl.gather(units, place, axis=0)
    upto = tl.cumsum(mine, axis=0)
    before = tl.gather(upto - mine, offset, axis=0)
    tokens = tl.gather(total, expert, axis=0)
    shift = (hash_row(tokens, expert, salt) % CONSTANTS.units).to(tl.int32)
    return (upto - before + shift) // CONSTANTS.units


@triton.jit
def in_entry_order(tables_ptr, CONSTANTS: tl.constexpr):
    """(expert, first entry of it, place in the solver's order) of every entry of `replica_slot`."""
    TABLE: tl.constexpr = CONSTANTS.table
    LOCAL: tl.constexpr = CONSTANTS.columns.local_slots
    entry = tl.arange(0, CONSTANTS.ranks_pad * CONSTANTS.local_pad)
    inside = entry < CONSTANTS.columns.num_slots
    slot = table_word(tables_ptr, TABLE.replica_slot, entry, inside, 0)
    expert = table_word(tables_ptr, TABLE.physical_to_logical, slot, inside, 0)
    offset = table_word(tables_ptr, TABLE.replica_span, expert, inside, 2) >> 11
    return expert, offset, slot // LOCAL * CONSTANTS.local_pad + slot % LOCAL


@triton.jit
def store_dealt(pointers, index, word, mask, chosen, slot, ep_rank, CONSTANTS: tl.constexpr):
    """Write the routed columns that wait for their slots."""
    COLUMNS: tl.constexpr = CONSTANTS.columns
    EMIT: tl.constexpr = COLUMNS.emit
    physical_ptr, local_ptr, packed_ptr, scratch_ptr = pointers
    rank = slot // COLUMNS.local_slots
    physical = slot
    if COLUMNS.shared_per_rank:
        physical = slot + rank * COLUMNS.shared
    if EMIT.physical_ids:
        tl.store(physical_ptr + index, tl.where(chosen, physical, -1), mask=mask)
    if EMIT.local_ids:
        here = chosen & (rank == ep_rank)
        tl.store(local_ptr + index, tl.where(here, slot - rank * COLUMNS.local_slots, -1), mask=mask)
    if EMIT.packed_ids:
        if CONSTANTS.choice != "packed_ids":
            word = tl.load(packed_ptr + index, mask=mask & chosen, other=0)
        tl.store(packed_ptr + index, (physical << 16) | (word & 0xFFFF), mask=mask & chosen)
    if EMIT.slot_histogram:
        tl.atomic_add(scratch_ptr + 1 + physical, 1, mask=mask & chosen, sem="relaxed")


@triton.jit
def clear_other(state_ptr, counts_ptr, bits_ptr, used, expert, E: tl.constexpr):
    """Clear the other buffer as far as its last batch reached."""
    pid = tl.program_id(0)
    nothing = tl.zeros(expert.shape, tl.int32)
    for chunk in range(pid, tl.cdiv(used, 32), tl.num_programs(0)):
        tl.store(bits_ptr + chunk * E + expert, nothing, mask=expert < E)
    for block in range(pid, tl.cdiv(used, 256), tl.num_programs(0)):
        tl.store(counts_ptr + block * E + expert, nothing, mask=expert < E)


@triton.jit(do_not_specialize=["num_tokens", "chunks", "rank_salt", "ep_rank"])
def deal_batch(
    physical_ptr,
    logical_ptr,
    local_ptr,
    packed_ptr,
    histogram_ptr,
    scratch_ptr,
    state_ptr,
    node_ptr,
    tables_ptr,
    num_tokens,
    chunks,
    rank_salt,
    ep_rank,
    CONSTANTS: tl.constexpr,
):
    """CONSTANTS: `DealConstants`; state_ptr, chunks: `state.BatchState`; node_ptr [node, E] int32."""
    E: tl.constexpr = CONSTANTS.experts
    K: tl.constexpr = CONSTANTS.top_k
    COLUMNS: tl.constexpr = CONSTANTS.columns
    TABLE: tl.constexpr = CONSTANTS.table
    pid = tl.program_id(0)
    # Tables do not change while a batch is routed: they come before the routing launch has ended.
    layout = lay_out(tables_ptr, CONSTANTS)
    entries = in_entry_order(tables_ptr, CONSTANTS)
    if CONSTANTS.overlap:
        tl.extra.cuda.gdc_wait()
    buffer = tl.load(state_ptr + 1)
    used = tl.load(state_ptr + 2 + (1 - buffer))
    blocks = chunks // 8
    counts = state_ptr + 32
    bits = counts + 2 * blocks * E
    expert = tl.arange(0, CONSTANTS.experts_pad)

    index = tl.arange(0, 32 * CONSTANTS.top_k_pad)
    line = index // CONSTANTS.top_k_pad
    column = index % CONSTANTS.top_k_pad
    row = pid * 32 + line
    mask = (row < num_tokens) & (column < K)
    at = row.to(tl.int64) * (K + COLUMNS.shared) + column
    if CONSTANTS.choice == "physical_ids":
        word = tl.load(physical_ptr + at, mask=mask, other=-1)
    elif CONSTANTS.choice == "local_ids":
        word = tl.load(local_ptr + at, mask=mask, other=-1)
    elif CONSTANTS.choice == "packed_ids":
        word = tl.load(packed_ptr + at, mask=mask, other=-1)
    else:
        word = tl.load(logical_ptr + at, mask=mask, other=-1)
    choice = word
    if CONSTANTS.choice == "packed_ids":
        choice = word >> 16
    chosen = mask & (choice >= 0)
    choice = tl.where(chosen, choice, 0)
    mine = tl.load(bits + (buffer * chunks + pid) * E + choice, mask=chosen, other=0)
    span = table_word(tables_ptr, TABLE.replica_span, choice, chosen, 2)

    total, before = batch_counts(
        counts + buffer * blocks * E, bits + buffer * chunks * E, node_ptr, num_tokens, expert, CONSTANTS
    )
    units = correct(layout, total, CONSTANTS)
    ends = replica_ends(tables_ptr, units, total, entries, rank_salt, CONSTANTS)

    position = count_bits(mine & ((1 << line) - 1)) + tl.gather(before, choice, axis=0)
    offset = span >> 11
    low = tl.zeros(choice.shape, tl.int32)
    high = ((span >> 1) & 0x3FF) - 1
    while tl.max(high - low, axis=0) > 0:
        middle = (low + high) >> 1
        passed = (tl.gather(ends, offset + middle, axis=0) <= position) & (low < high)
        high = tl.where(passed, high, middle)
        low = tl.where(passed, middle + 1, low)
    slot = table_word(tables_ptr, TABLE.replica_slot, offset + low, chosen, 0)
    pointers = (physical_ptr, local_ptr, packed_ptr, scratch_ptr)
    store_dealt(pointers, at, word, mask, chosen, slot, ep_rank, CONSTANTS)
    other = 1 - buffer
    clear_other(state_ptr, counts + other * blocks * E, bits + other * chunks * E, used, expert, E)
    if pid == 0:
        tl.store(state_ptr, other)
    if COLUMNS.emit.slot_histogram:
        publish_histogram(histogram_ptr, scratch_ptr, COLUMNS.buckets, 128)
