"""One layer under way: its schedule, the chunks still to enqueue, its staging buffer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from evenroute.dist.weights.exchange import Move
from evenroute.dist.weights.expert_weights import ALIGN, LayerWeights
from evenroute.dist.weights.transfer import Chunk, LayerTransfer, plan_transfer, split_chunks
from evenroute.dist.weights.verify import ChecksumTest, runs
from evenroute.eplb.placement.placement import PlacementRow
from evenroute.eplb.placement.topology import Topology


@dataclass
class OpenLayer:
    """A layer that is opened and not committed.

    Attributes:
        layer, live, target: what `open_layer` was given.
        buffer, staged_rows: its staging buffer, and that buffer's rows like `LayerWeights.rows`.
        weights: the live tensors of the layer.
        transfer: None until its turn comes (planning takes about a millisecond of the host).
        test, done: set once its last chunk is enqueued: the checksums (verifying mode) and the event behind them.
        staged: all of it has been seen complete.
    """

    layer: int
    live: PlacementRow
    target: PlacementRow
    buffer: int
    staged_rows: tuple[Tensor, ...]
    weights: LayerWeights
    transfer: LayerTransfer | None = None
    chunks: deque[Chunk] = field(default_factory=deque)
    num_chunks: int = 0
    test: ChecksumTest | None = None
    done: torch.cuda.Event | None = None
    staged: bool = False

    @property
    def enqueued(self) -> bool:
        """Nothing left to enqueue."""
        return self.transfer is not None and not self.chunks

    def plan(self, topology: Topology, chunk_bytes: int, max_peers: int) -> None:
        """Derive the schedule from the two rows."""
        self.transfer = plan_transfer(self.live.slots, self.target.slots, topology)
        self.chunks.extend(
            split_chunks(
                self.transfer,
                expert_bytes=self.weights.expert_bytes,
                chunk_bytes=chunk_bytes,
                max_peers=max_peers,
                align=ALIGN,
            )
        )
        self.num_chunks = len(self.chunks)

    def restart(self) -> None:
        """Forget what is staged: all of it is to be enqueued again."""
        self.transfer, self.test, self.done, self.staged = None, None, None, False
        self.chunks.clear()

    def moved_on(self, rank: int) -> list[int]:
        """Local slots of ``rank`` that change; the layer must be planned."""
        assert self.transfer is not None, f"layer {self.layer} is not planned"
        return self.transfer.moved_on(rank)

    def describe(self) -> str:
        """Operation and layer, for messages."""
        number = self.num_chunks - len(self.chunks)
        total = str(self.num_chunks) if self.transfer is not None else "?"
        return f"migration: transfer of layer {self.layer} (chunk {number} of {total})"

    def moves(self, chunk: Chunk, rank: int) -> list[Move]:
        """What ``rank`` sends (from live slots) and receives (into the buffer) in this chunk."""
        moves: list[Move] = []
        num_local = int(self.weights.rows[0].shape[0])
        for piece in chunk.pieces:
            receive = piece.receive
            if rank not in (receive.source_rank, receive.dest_rank):
                continue
            send = receive.source_rank == rank
            rows = self.weights.rows if send else self.staged_rows
            slot = (receive.source if send else receive.dest) - rank * num_local
            peer = receive.dest_rank if send else receive.source_rank
            moves += [
                Move(send, rows[part.tensor][slot, part.start : part.stop], peer)
                for part in self.weights.ranges(piece.start, piece.stop)
            ]
        return moves

    def copy_locally(self, chunk: Chunk, rank: int) -> None:
        """The chunk's copies inside ``rank``, into the buffer, on the current stream."""
        num_local = int(self.weights.rows[0].shape[0])
        first = rank * num_local
        for copy in chunk.copies:
            if copy.dest // num_local != rank:
                continue
            source = self.staged_rows if copy.received else self.weights.rows
            for new, rows in zip(self.staged_rows, source, strict=True):
                new[copy.dest - first].copy_(rows[copy.source - first])

    def commit(self, rank: int) -> list[int]:
        """Buffer -> live slots on the current stream; the local slots that changed."""
        moved = self.moved_on(rank)
        for start, stop in runs(moved):
            for live, new in zip(self.weights.rows, self.staged_rows, strict=True):
                live[start:stop].copy_(new[start:stop])
        return moved
