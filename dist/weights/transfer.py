"""The transfer schedule of one layer: who sends which expert to whom, in which order, in chunks of bounded size.

Everything here is a pure function of the live row, the target row and the topology, so that all ranks derive the same
schedule without a message. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.eplb.placement.topology import Topology


@dataclass(frozen=True)
class LocalCopy:
    """Slot ``dest`` takes its expert from slot ``source`` of the same rank (slots over all ranks).

    ``received``: the source is not the live slot but the expert that another slot of this rank is receiving.
    """

    expert: int
    source: int
    dest: int
    received: bool = False


@dataclass(frozen=True)
class Receive:
    """Slot ``dest`` receives its expert from live slot ``source`` of another rank (slots over all ranks)."""

    expert: int
    source: int
    dest: int
    source_rank: int
    dest_rank: int


@dataclass(frozen=True)
class LayerTransfer:
    """Schedule of a layer.

    Attributes:
        num_local_slots: slots of a rank.
        copies: slots filled from their own rank; those with ``received`` come after their receive.
        rounds: receives in order; in one round a rank sends at most one expert and receives at most one. The number
            of rounds is the largest number of experts that one rank sends or receives: no order is shorter.
    """

    num_local_slots: int
    copies: tuple[LocalCopy, ...]
    rounds: tuple[tuple[Receive, ...], ...]

    @property
    def num_receives(self) -> int:
        return sum(len(one) for one in self.rounds)

    @property
    def moved(self) -> tuple[int, ...]:
        """Slots whose content changes, ascending."""
        dests = [copy.dest for copy in self.copies]
        dests += [receive.dest for one in self.rounds for receive in one]
        return tuple(sorted(dests))

    def moved_on(self, rank: int) -> list[int]:
        """Local slots of ``rank`` whose content changes, ascending."""
        return [
            slot - rank * self.num_local_slots for slot in self.moved if slot // self.num_local_slots == rank
        ]


@dataclass(frozen=True)
class Piece:
    """Bytes ``[start, stop)`` of the expert that ``receive`` moves; an expert's bytes are those of its tensors' rows,
    in the order of registration."""

    receive: Receive
    start: int
    stop: int


@dataclass(frozen=True)
class Chunk:
    """What is enqueued together: ``pieces`` between ranks, ``copies`` inside ranks.

    ``cost``: its part of a step's byte budget: the most bytes that any rank sends or receives in it (for copies: an
    eighth of the bytes copied, about the ratio of NVLink to device memory), more where the experts are small.
    """

    pieces: tuple[Piece, ...]
    copies: tuple[LocalCopy, ...]
    cost: int


COPY_COST_DIVISOR = 8
MOST_ROUNDS = 8
"""Of one chunk: each costs the host a few calls per tensor (about 0.1 ms on NCCL), however small the experts are."""


def most_peers(chunks: Iterable[Chunk]) -> int:
    """The most ranks that any rank exchanges with in these chunks together."""
    return _most(piece.receive for chunk in chunks for piece in chunk.pieces)


def _most(receives: Iterable[Receive]) -> int:
    peers: dict[int, set[int]] = {}
    for receive in receives:
        peers.setdefault(receive.source_rank, set()).add(receive.dest_rank)
        peers.setdefault(receive.dest_rank, set()).add(receive.source_rank)
    return max((len(known) for known in peers.values()), default=0)


def plan_transfer(live: NDArray[Any], target: NDArray[Any], topology: Topology) -> LayerTransfer:
    """Schedule that turns ``live [P]`` into ``target [P]`` (logical expert of every slot).

    A slot whose expert is on the rank already is a local copy; every other (rank, expert) is received once, and a
    second slot of that rank copies it. Sources: replicas on the receiver's node if there are any, else all; among
    them such that the busiest sender sends as few as the choices allow.
    """
    num_local = len(live) // topology.ep_size
    slots_of: dict[int, list[int]] = {}
    for slot, expert in enumerate(live.tolist()):
        slots_of.setdefault(expert, []).append(slot)
    target_row = target.tolist()
    copies: list[LocalCopy] = []
    later_copies: list[LocalCopy] = []
    wanted: list[tuple[int, int]] = []  # (dest slot, expert)
    first_dest: dict[tuple[int, int], int] = {}
    for dest in np.flatnonzero(live != target).tolist():
        expert, rank = target_row[dest], dest // num_local
        here = [slot for slot in slots_of[expert] if slot // num_local == rank]
        if here:
            copies.append(LocalCopy(expert, here[0], dest))
        elif (rank, expert) in first_dest:
            later_copies.append(LocalCopy(expert, first_dest[rank, expert], dest, received=True))
        else:
            first_dest[rank, expert] = dest
            wanted.append((dest, expert))
    candidates = [
        _candidates(slots_of[expert], dest // num_local, num_local, topology) for dest, expert in wanted
    ]
    sources = _balance_sources([dest // num_local for dest, _ in wanted], candidates, topology.ep_size)
    receives = [
        Receive(expert, by_rank[rank], dest, rank, dest // num_local)
        for (dest, expert), by_rank, rank in zip(wanted, candidates, sources, strict=True)
    ]
    return LayerTransfer(num_local, (*copies, *later_copies), _rounds(receives, topology.ep_size))


def _candidates(slots: list[int], dest_rank: int, num_local: int, topology: Topology) -> dict[int, int]:
    """{rank: its first slot with the expert}, only the receiver's node if it has one."""
    by_rank: dict[int, int] = {}
    for slot in slots:
        by_rank.setdefault(slot // num_local, slot)
    node = topology.node_of_rank(dest_rank)
    near = {rank: slot for rank, slot in by_rank.items() if topology.node_of_rank(rank) == node}
    return near or by_rank


def _balance_sources(dest_ranks: list[int], candidates: list[dict[int, int]], ep_size: int) -> list[int]:
    """A source rank for each receive that keeps the busiest sender as idle as possible.

    Greedy (fewest choices first, then the sender with the least to send, then the next rank round the ring), made
    optimal by augmenting paths: shift one receive along a chain from a busiest rank to one with two fewer.
    """
    sends = [0] * ep_size
    source = [-1] * len(candidates)
    for i in sorted(range(len(candidates)), key=lambda i: len(candidates[i])):
        dest = dest_ranks[i]
        source[i] = min(candidates[i], key=lambda rank: (sends[rank], (rank - dest) % ep_size))
        sends[source[i]] += 1
    assigned: list[list[int]] = [[] for _ in range(ep_size)]
    for i, rank in enumerate(source):
        assigned[rank].append(i)
    while True:
        top = max(sends)
        if not any(
            _shift(rank, top, sends, assigned, source, candidates)
            for rank in range(ep_size)
            if sends[rank] == top
        ):
            return source


def _shift(
    start: int,
    top: int,
    sends: list[int],
    assigned: list[list[int]],
    source: list[int],
    candidates: list[dict[int, int]],
) -> bool:
    """Relieve rank ``start`` (which sends ``top``) by one, if a chain of other choices ends at a rank below top - 1."""
    came_by: dict[int, int] = {start: -1}  # rank -> receive that would move there
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        for i in assigned[rank]:
            for other in candidates[i]:
                if other in came_by:
                    continue
                came_by[other] = i
                if sends[other] > top - 2:
                    queue.append(other)
                    continue
                sends[start] -= 1
                sends[other] += 1
                while other != start:
                    moved = came_by[other]
                    before = source[moved]
                    assigned[before].remove(moved)
                    assigned[other].append(moved)
                    source[moved] = other
                    other = before
                return True
    return False


def _rounds(receives: list[Receive], ep_size: int) -> tuple[tuple[Receive, ...], ...]:
    """Edge colouring of the bipartite multigraph senders x receivers with as many colours as its largest degree
    (König 1916), by flipping alternating paths."""
    degree = [0] * (2 * ep_size)
    for receive in receives:
        degree[receive.source_rank] += 1
        degree[ep_size + receive.dest_rank] += 1
    num_rounds = max(degree)
    # at[v][c]: the receive with colour c at vertex v (senders, then receivers), or -1
    at = [[-1] * num_rounds for _ in range(2 * ep_size)]
    ends = [(receive.source_rank, ep_size + receive.dest_rank) for receive in receives]
    for i, (u, v) in enumerate(ends):
        free_u, free_v = at[u].index(-1), at[v].index(-1)
        # Where free_u is taken at v, swap free_u and free_v along the path that begins there.
        path, vertex, colour = [], v, free_u
        while (edge := at[vertex][colour]) != -1:
            path.append((edge, colour))
            a, b = ends[edge]
            vertex = b if vertex == a else a
            colour = free_v if colour == free_u else free_u
        for edge, colour in path:
            for end in ends[edge]:
                at[end][colour] = -1
        for edge, colour in path:
            swapped = free_v if colour == free_u else free_u
            for end in ends[edge]:
                at[end][swapped] = edge
        at[u][free_u] = at[v][free_u] = i
    rounds: list[list[Receive]] = [[] for _ in range(num_rounds)]
    for vertex in range(ep_size):
        for colour, edge in enumerate(at[vertex]):
            if edge != -1:
                rounds[colour].append(receives[edge])
    return tuple(tuple(one) for one in rounds)


def split_chunks(
    transfer: LayerTransfer, *, expert_bytes: int, chunk_bytes: int, max_peers: int, align: int = 512
) -> tuple[Chunk, ...]:
    """Cut a schedule into chunks of at most ``chunk_bytes`` sent or received by any rank.

    Whole rounds (at most `MOST_ROUNDS`) are put together while they fit and while no rank has more than ``max_peers``
    peers in the chunk (one round alone can mean two: one to send to, one to receive from); an expert larger than the
    bound is cut at multiples of ``align`` bytes. Copies of live slots come first, copies of received experts last.
    """
    weight = max(expert_bytes, -(-chunk_bytes // MOST_ROUNDS))  # what a round counts against the bound
    chunks = _copy_chunks(
        [c for c in transfer.copies if not c.received], transfer.num_local_slots, expert_bytes, chunk_bytes
    )
    pieces: list[Piece] = []
    num_rounds = 0

    def close() -> None:
        nonlocal num_rounds
        if pieces:
            chunks.append(Chunk(tuple(pieces), (), min(num_rounds * weight, chunk_bytes)))
        pieces.clear()
        num_rounds = 0

    for one in transfer.rounds:
        if expert_bytes > chunk_bytes:
            chunks += _split_round(one, expert_bytes, chunk_bytes // align * align)
            continue
        too_many = _most((*(piece.receive for piece in pieces), *one)) > max_peers
        if num_rounds == MOST_ROUNDS or (num_rounds + 1) * expert_bytes > chunk_bytes or too_many:
            close()
        pieces += [Piece(receive, 0, expert_bytes) for receive in one]
        num_rounds += 1
    close()
    chunks += _copy_chunks(
        [c for c in transfer.copies if c.received], transfer.num_local_slots, expert_bytes, chunk_bytes
    )
    return tuple(chunks)


def _split_round(one: tuple[Receive, ...], expert_bytes: int, step: int) -> list[Chunk]:
    cuts = range(0, expert_bytes, step)
    return [
        Chunk(
            tuple(Piece(receive, start, min(start + step, expert_bytes)) for receive in one),
            (),
            min(step, expert_bytes - start),
        )
        for start in cuts
    ]


def _copy_chunks(copies: list[LocalCopy], num_local: int, expert_bytes: int, chunk_bytes: int) -> list[Chunk]:
    cost = max(1, expert_bytes // COPY_COST_DIVISOR, chunk_bytes // (8 * MOST_ROUNDS))
    size = max(1, chunk_bytes // cost)
    by_rank: dict[int, list[LocalCopy]] = {}
    for copy in copies:
        by_rank.setdefault(copy.dest // num_local, []).append(copy)
    most = max((len(own) for own in by_rank.values()), default=0)
    chunks = []
    for start in range(0, most, size):
        part = [copy for own in by_rank.values() for copy in own[start : start + size]]
        chunks.append(Chunk((), tuple(part), cost * min(size, most - start)))
    return chunks
