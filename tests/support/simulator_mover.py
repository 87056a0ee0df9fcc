"""Weights and transfers of a simulated rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evenroute.dist.protocol.agreement import Commit, Open
from support.simulator_cache import digest_of, slots_of
from support.simulator_history import (
    CommitRecord,
    TransferRecord,
)

if TYPE_CHECKING:
    from support.simulator_rank import SimRank


@dataclass(eq=False)
class Transfer:
    """A layer that is opened on a rank; ``content`` once its weights are here."""

    action: Open
    content: tuple[int, ...] | None = None


@dataclass(eq=False)
class SimMover:
    """Weights of one rank (the expert in each local slot, per layer) and its transfers."""

    node: SimRank
    weights: list[tuple[int, ...]] = field(default_factory=list)
    opened: list[Transfer] = field(default_factory=list)
    staged: int = 0
    error: bool = False
    num_transfers: int = 0

    def open(self, action: Open) -> None:
        """Enqueue the transfer of a layer."""
        node = self.node
        what = (action.layer, digest_of(action.live_row), digest_of(action.target_row))
        node.world.history.transfers.append(TransferRecord(node.job.run, node.rank, self.num_transfers, what))
        transfer = Transfer(action)
        self.opened.append(transfer)
        if len(self.opened) > node.world.knobs.num_buffers:
            node.world.fault(f"rank {node.rank}: {len(self.opened)} layers open")
        node.job.enqueue(self.num_transfers, node, transfer)
        self.num_transfers += 1

    def complete(self, transfer: Transfer, bad: bool) -> None:
        """The weights of a layer are here: read from the sources that follow from the live row."""
        node, n = self.node, len(self.weights[0])
        live, target = slots_of(transfer.action.live_row), slots_of(transfer.action.target_row)
        layer, first = transfer.action.layer, node.rank * n
        local = live[first : first + n]
        content = []
        for expert in target[first : first + n]:
            slot = first + local.index(expert) if expert in local else live.index(expert)
            content.append(node.job.ranks[slot // n].mover.weights[layer][slot % n])
        transfer.content = (-1,) * n if bad else tuple(content)
        self.error = self.error or bad
        if transfer in self.opened:
            self.staged += 1

    def commit(self, action: Commit) -> None:
        """Weights of an opened layer, then the table."""
        node, n = self.node, len(self.weights[0])
        if self.opened and self.opened[0].action.layer == action.layer:
            content = self.opened.pop(0).content
            self.weights[action.layer] = (-2,) * n if content is None else content
        table = slots_of(action.row)[node.rank * n : node.rank * n + n]
        record = CommitRecord(
            node.job.run, node.rank, action.layer, action.key, self.weights[action.layer], table
        )
        node.world.history.commits.append(record)

    def discard(self) -> None:
        """Forget what is opened; nothing may be under way."""
        if any(transfer.content is None for transfer in self.opened):
            self.node.world.fault(f"rank {self.node.rank}: discards a transfer under way")
        self.opened, self.staged, self.error = [], 0, False
