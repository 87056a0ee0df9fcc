"""The schedule does what it says: right contents, few sends from any rank, fewest rounds, bounded chunks."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from evenroute.dist.weights.transfer import (
    MOST_ROUNDS,
    Chunk,
    LayerTransfer,
    LocalCopy,
    Piece,
    Receive,
    most_peers,
    plan_transfer,
    split_chunks,
)
from evenroute.eplb.placement.topology import Topology
from support.placements import random_row

SIZES = [
    (8, 8, 4, 1),
    (8, 12, 4, 2),
    (16, 16, 1, 1),
    (16, 24, 8, 4),
    (6, 12, 2, 1),
    (12, 24, 4, 1),
    (24, 32, 8, 2),
]


def _replay(transfer: LayerTransfer, live: NDArray[np.int32]) -> NDArray[np.int32]:
    """What the slots hold after staging everything and committing it."""
    staged: dict[int, int] = {}
    for one in transfer.rounds:
        for receive in one:
            staged[receive.dest] = int(live[receive.source])
    for copy in transfer.copies:
        staged[copy.dest] = staged[copy.source] if copy.received else int(live[copy.source])
    out = live.copy()
    for dest, expert in staged.items():
        out[dest] = expert
    return out


def _fewest_sends(receives: list[Receive], live: NDArray[np.int32], topology: Topology) -> int:
    """Smallest possible load of the busiest sender (same node first), by Hall's condition over sets of ranks."""
    num_local = len(live) // topology.ep_size
    choices = []
    for receive in receives:
        ranks = {int(s) // num_local for s in np.flatnonzero(live == receive.expert)}
        node = topology.node_of_rank(receive.dest_rank)
        near = {r for r in ranks if topology.node_of_rank(r) == node}
        choices.append(near or ranks)
    best = 0
    for size in range(1, topology.ep_size + 1):
        for group in itertools.combinations(range(topology.ep_size), size):
            inside = sum(choice <= set(group) for choice in choices)
            best = max(best, -(-inside // size))
    return best


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from(SIZES))
def test_schedule_of_random_rows(seed: int, size: tuple[int, int, int, int]) -> None:
    num_experts, num_slots, ep_size, num_nodes = size
    rng = np.random.default_rng(seed)
    topology = Topology(ep_size, num_nodes)
    num_local = num_slots // ep_size
    live = random_row(rng, num_experts, num_slots, ep_size)
    target = random_row(rng, num_experts, num_slots, ep_size)
    transfer = plan_transfer(live, target, topology)
    assert np.array_equal(_replay(transfer, live), target)
    assert transfer.moved == tuple(np.flatnonzero(live != target).tolist())
    on_ranks = ((rank, slot) for rank in range(ep_size) for slot in transfer.moved_on(rank))
    assert tuple(rank * num_local + slot for rank, slot in on_ranks) == transfer.moved
    receives = [receive for one in transfer.rounds for receive in one]
    assert transfer.num_receives == len(receives)
    held = [set(live[r * num_local : (r + 1) * num_local].tolist()) for r in range(ep_size)]
    for receive in receives:
        assert receive.expert not in held[receive.dest_rank], "what is on the rank is not fetched"
        assert live[receive.source] == receive.expert == target[receive.dest]
        assert receive.source // num_local == receive.source_rank
        assert receive.dest // num_local == receive.dest_rank
    assert len({(r.dest_rank, r.expert) for r in receives}) == len(receives)
    sends = Counter(r.source_rank for r in receives)
    gets = Counter(r.dest_rank for r in receives)
    assert max(sends.values(), default=0) == _fewest_sends(receives, live, topology)
    assert len(transfer.rounds) == max([*sends.values(), *gets.values()], default=0)
    for one in transfer.rounds:
        assert max(Counter(r.source_rank for r in one).values()) == 1
        assert max(Counter(r.dest_rank for r in one).values()) == 1
    assert transfer == plan_transfer(live, target, topology)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from(SIZES),
    expert_bytes=st.sampled_from([512, 1000, 4096, 70_000]),
    chunk_bytes=st.sampled_from([512, 5000, 1 << 20]),
    max_peers=st.integers(1, 4),
)
def test_chunks_cover_every_byte_once_within_their_bounds(
    seed: int, size: tuple[int, int, int, int], expert_bytes: int, chunk_bytes: int, max_peers: int
) -> None:
    num_experts, num_slots, ep_size, num_nodes = size
    rng = np.random.default_rng(seed)
    live = random_row(rng, num_experts, num_slots, ep_size)
    target = random_row(rng, num_experts, num_slots, ep_size)
    transfer = plan_transfer(live, target, Topology(ep_size, num_nodes))
    chunks = split_chunks(transfer, expert_bytes=expert_bytes, chunk_bytes=chunk_bytes, max_peers=max_peers)
    got: dict[Receive, list[tuple[int, int]]] = {}
    for chunk in chunks:
        sent, received = Counter[int](), Counter[int]()
        for piece in chunk.pieces:
            got.setdefault(piece.receive, []).append((piece.start, piece.stop))
            sent[piece.receive.source_rank] += piece.stop - piece.start
            received[piece.receive.dest_rank] += piece.stop - piece.start
        busiest = max([*sent.values(), *received.values()], default=0)
        assert busiest <= chunk.cost
        # One round alone has up to two peers a rank (one it sends to, one it receives from).
        assert most_peers([chunk]) <= max(max_peers, 2)
        if chunk.pieces:
            assert chunk.cost <= chunk_bytes
            sends = Counter(piece.receive.source_rank for piece in chunk.pieces)
            assert max(sends.values()) <= MOST_ROUNDS
    for receive, ranges in got.items():
        assert [a for a, _ in ranges] == [0] + [b for _, b in ranges[:-1]], receive
        assert ranges[-1][1] == expert_bytes
    assert set(got) == {receive for one in transfer.rounds for receive in one}
    assert [copy for chunk in chunks for copy in chunk.copies if copy.received] == [
        copy for copy in transfer.copies if copy.received
    ]
    assert Counter(c for chunk in chunks for c in chunk.copies) == Counter(transfer.copies)


def test_rounds_that_together_exceed_the_bound_are_chunks_of_their_own() -> None:
    """One sender of six experts: each round moves one of them."""
    rounds = tuple((Receive(expert, expert, 6 + expert, 0, 1),) for expert in range(6))
    transfer = LayerTransfer(num_local_slots=6, copies=(), rounds=rounds)
    chunks = split_chunks(transfer, expert_bytes=4000, chunk_bytes=10_000, max_peers=4)
    sizes = [sum(piece.stop - piece.start for piece in chunk.pieces) for chunk in chunks]
    assert sizes == [8000, 8000, 8000]


def test_many_small_experts_are_spread_over_steps() -> None:
    """The host's work in a step is bounded as well as the bytes."""
    rng = np.random.default_rng(2)
    live, target = (random_row(rng, 64, 80, 2) for _ in range(2))
    transfer = plan_transfer(live, target, Topology(2))
    assert len(transfer.rounds) > MOST_ROUNDS
    chunks = [
        chunk
        for chunk in split_chunks(transfer, expert_bytes=512, chunk_bytes=1 << 30, max_peers=4)
        if chunk.pieces
    ]
    assert len(chunks) == -(-len(transfer.rounds) // MOST_ROUNDS)
    full = [chunk for chunk in chunks if len(chunk.pieces) >= MOST_ROUNDS]
    assert all(chunk.cost > (1 << 30) // 2 for chunk in full), "no two of them in one step"


def test_same_node_first_and_spread_over_replicas() -> None:
    # 2 nodes of 2 ranks. Expert 0 on ranks 0 and 2; rank 1 takes it from rank 0, rank 3 from rank 2.
    live = np.array([0, 1, 2, 3, 0, 4, 5, 6], dtype=np.int32)
    target = np.array([1, 2, 0, 3, 4, 5, 0, 6], dtype=np.int32)
    transfer = plan_transfer(live, target, Topology(4, 2))
    source = {r.dest_rank: r.source_rank for one in transfer.rounds for r in one if r.expert == 0}
    assert source == {1: 0, 3: 2}


def test_no_hot_sender_where_replicas_leave_a_choice() -> None:
    # Ranks 0 and 1 both hold 0 and 1; ranks 2 and 3 want both: two sends each, not four from rank 0.
    live = np.array([0, 1, 1, 0, 2, 3, 3, 2], dtype=np.int32)
    target = np.array([2, 3, 3, 2, 0, 1, 1, 0], dtype=np.int32)
    transfer = plan_transfer(live, target, Topology(4))
    sends = Counter(r.source_rank for one in transfer.rounds for r in one)
    assert max(sends.values()) == 2
    assert len(transfer.rounds) == 2


def test_a_second_slot_copies_what_the_first_receives() -> None:
    live = np.array([0, 1, 2, 3], dtype=np.int32)
    target = np.array([2, 2, 0, 1], dtype=np.int32)
    transfer = plan_transfer(live, target, Topology(2))
    assert [r.dest for one in transfer.rounds for r in one if r.dest_rank == 0] == [0]
    assert [(c.source, c.dest, c.received) for c in transfer.copies] == [(0, 1, True)]
    chunks = split_chunks(transfer, expert_bytes=1 << 20, chunk_bytes=1 << 30, max_peers=1)
    assert chunks[-1].copies == transfer.copies, "copied after it is received"


def test_peers_of_chunks_together() -> None:
    live = np.array([0, 1, 2, 3], dtype=np.int32)
    transfers = [
        plan_transfer(live, np.array(target, dtype=np.int32), Topology(4))
        for target in ([1, 0, 2, 3], [2, 1, 0, 3])
    ]
    one, other = (split_chunks(t, expert_bytes=512, chunk_bytes=512, max_peers=4)[0] for t in transfers)
    assert most_peers([one]) == most_peers([other]) == 1
    assert most_peers([one, other]) == 2
    assert most_peers([]) == 0


def test_peers_are_counted_at_senders_and_receivers() -> None:
    def chunk(*receives: Receive) -> Chunk:
        return Chunk(tuple(Piece(receive, 0, 1) for receive in receives), (), 1)

    to_one, to_other = Receive(0, 0, 2, 0, 1), Receive(0, 0, 4, 0, 2)
    assert most_peers([chunk(to_one, to_other)]) == 2, "a sender of two"
    from_other = Receive(1, 5, 3, 2, 1)
    assert most_peers([chunk(to_one, from_other)]) == 2, "a receiver from two"
    assert most_peers([chunk(to_one), chunk(to_one)]) == 1
    assert most_peers([chunk(to_one, Receive(1, 2, 1, 1, 0))]) == 1, "each other's peer"


def test_of_equal_sources_the_next_rank_round_the_ring_sends() -> None:
    # Expert 0 lies on three of the four ranks; the fourth takes it from the one after it.
    for dest, source in ((0, 1), (1, 2), (2, 3), (3, 0)):
        live = np.array([0, 1, 0, 2, 0, 3, 0, 4], dtype=np.int32)
        live[2 * dest] = 5
        target = live.copy()
        target[2 * dest + 1] = 0
        ((receive,),) = plan_transfer(live, target, Topology(4)).rounds
        assert (receive.source_rank, receive.dest_rank) == (source, dest)


def test_many_replicas_leave_no_sender_busier_than_needed() -> None:
    """Choices that the greedy order gets wrong are shifted along chains."""
    topology = Topology(6)
    for seed in range(150):
        rng = np.random.default_rng(seed)
        live, target = (random_row(rng, 30, 48, 6) for _ in range(2))
        receives = [receive for one in plan_transfer(live, target, topology).rounds for receive in one]
        sends = Counter(receive.source_rank for receive in receives)
        assert max(sends.values()) == _fewest_sends(receives, live, topology), seed


def test_a_receiver_takes_from_the_first_of_a_ranks_slots() -> None:
    live = np.array([1, 0, 0, 2, 3, 4], dtype=np.int32)
    target = np.array([1, 0, 0, 0, 3, 4], dtype=np.int32)
    ((receive,),) = plan_transfer(live, target, Topology(2)).rounds
    assert (receive.source, receive.dest) == (1, 3)


def test_local_copies_cost_an_eighth_and_share_chunks() -> None:
    copies = tuple(LocalCopy(expert, expert, (expert + 1) % 16) for expert in range(16))
    transfer = LayerTransfer(16, copies, ())

    def sizes(
        expert_bytes: int, chunk_bytes: int, transfer: LayerTransfer = transfer
    ) -> list[tuple[int, int]]:
        chunks = split_chunks(transfer, expert_bytes=expert_bytes, chunk_bytes=chunk_bytes, max_peers=1)
        assert Counter(copy for chunk in chunks for copy in chunk.copies) == Counter(copies)
        return [(len(chunk.copies), chunk.cost) for chunk in chunks]

    assert sizes(8000, 8000) == [(8, 8000), (8, 8000)]
    assert sizes(8000, 12_000) == [(12, 12_000), (4, 4000)]
    assert sizes(80_000, 8000) == [(1, 10_000)] * 16, "larger than the bound: one at a time"
    assert sizes(64, 8000) == [(16, 16 * 125)], "small ones cost the host's calls: a 64th of the bound"
    assert sizes(1, 1) == [(1, 1)] * 16
    # The ranks copy side by side.
    assert sizes(8000, 8000, LayerTransfer(8, copies, ())) == [(16, 8000)]


def test_rounds_share_a_chunk_while_their_bytes_fit() -> None:
    def receive(slot: int, source: int = 0) -> Receive:
        return Receive(slot, slot, 40 + slot, source, 2)

    transfer = LayerTransfer(20, (), tuple((receive(slot),) for slot in range(10)))

    def costs(expert_bytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
        chunks = split_chunks(transfer, expert_bytes=expert_bytes, chunk_bytes=chunk_bytes, max_peers=1)
        return [(len(chunk.pieces), chunk.cost) for chunk in chunks]

    assert costs(100, 400) == [(4, 400), (4, 400), (2, 200)]
    assert costs(100, 399) == [(3, 300), (3, 300), (3, 300), (1, 100)]
    assert costs(10, 1600) == [(8, 1600), (2, 400)], "eight rounds fill a step, however small"
    assert costs(100, 100) == [(1, 100)] * 10
    two = LayerTransfer(20, (), ((receive(0),), (receive(21, 1),)))
    assert len(split_chunks(two, expert_bytes=1, chunk_bytes=100, max_peers=2)) == 1
    assert len(split_chunks(two, expert_bytes=1, chunk_bytes=100, max_peers=1)) == 2


def test_an_expert_above_the_bound_is_cut_at_aligned_bytes() -> None:
    transfer = LayerTransfer(2, (), ((Receive(0, 0, 2, 0, 1),),))
    chunks = split_chunks(transfer, expert_bytes=5000, chunk_bytes=2100, max_peers=1)
    assert [(p.start, p.stop, c.cost) for c in chunks for p in c.pieces] == [
        (0, 2048, 2048),
        (2048, 4096, 2048),
        (4096, 5000, 904),
    ]


def test_permuting_on_the_rank_sends_nothing() -> None:
    live = np.array([0, 1, 2, 3], dtype=np.int32)
    transfer = plan_transfer(live, np.array([1, 0, 3, 2], dtype=np.int32), Topology(2))
    assert transfer.num_receives == 0
    assert transfer.moved == (0, 1, 2, 3)


def test_no_rank_sends_or_receives_more_than_a_chunk_may_hold() -> None:
    """Three experts of 4,000 bytes are one too many for 10,000, whichever round comes last."""
    live = np.arange(12, dtype=np.int32)
    target = np.concatenate((live[6:], live[:6])).astype(np.int32)  # six rounds between two ranks
    transfer = plan_transfer(live, target, Topology(2))
    for chunk_bytes in (4000, 8000, 10_000, 11_999, 12_000):
        chunks = split_chunks(transfer, expert_bytes=4000, chunk_bytes=chunk_bytes, max_peers=4)
        for chunk in chunks:
            sent: dict[int, int] = {}
            for piece in chunk.pieces:
                size = piece.stop - piece.start
                for side in (piece.receive.source_rank, -1 - piece.receive.dest_rank):
                    sent[side] = sent.get(side, 0) + size
            assert max(sent.values(), default=0) <= chunk_bytes
            assert chunk.cost <= chunk_bytes
        assert sum(len(chunk.pieces) for chunk in chunks) == 12
        assert len(chunks) == -(-6 // (chunk_bytes // 4000))
