"""The switch protocol without a rebalancer: all ranks propose the same placements to the same agreement that the rank
agent drives. For the migration's tests and bench, and for trying placements by hand."""

from __future__ import annotations

from collections import deque
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as torch_dist

from evenroute.dist.protocol.agreement import AgreedState, Commit, Discard, Open, Version, vote_vector
from evenroute.dist.weights.mover import LayerMover
from evenroute.eplb.placement.placement import Placement, PlacementRow


class VoteFailedError(RuntimeError):
    """A vote was not reduced within its limit; names what was under way."""


class MoeDriver:
    """Drives a mover as `RankAgent` does: vote by all-reduce (MIN) on a CPU group, one outstanding, waited for a period
    later."""

    def __init__(
        self,
        mover: LayerMover,
        placement: Placement,
        vote_group: torch_dist.ProcessGroup,
        *,
        agree_every: int = 1,
        limit_s: float = 10.0,
    ) -> None:
        """All ranks together, with the placement that mover and tables hold."""
        self.mover = mover
        self.newest = Version.of((1, 0), placement)
        self.state = AgreedState(self.newest, num_buffers=mover.num_buffers, settings=(agree_every,))
        self.agree_every = agree_every
        self.steps = 0
        self.switched: list[int] = []
        self._group = vote_group
        self._limit_s = limit_s
        self._vote: tuple[torch.Tensor, torch_dist.Work, Version] | None = None
        self._proposed: deque[Version] = deque()

    def propose(self, placement: Placement) -> tuple[int, int]:
        """Queue a placement; it is voted for once those before it are done with. Returns its key."""
        version = Version.of((1, self.newest.key[1] + len(self._proposed) + 1), placement)
        self._proposed.append(version)
        return version.key

    @property
    def idle(self) -> bool:
        """Nothing proposed is left to do."""
        return not self._proposed and self.state.target is None and self.state.last_target >= self.newest.key

    @property
    def live_rows(self) -> list[PlacementRow]:
        """Rows in use, by layer."""
        return self.state.live_rows

    def live_placement(self) -> Placement:
        """What is routed with now."""
        start = self.newest.placement
        return Placement.from_rows(self.live_rows, start.num_logical_experts, start.topology)

    def step(self) -> list[int]:
        """Before a step's routing, on every rank equally often. Returns the layers that switched just now.

        Raises:
            VoteFailedError: a rank is gone or late.
            MigrationError: a transfer failed.
        """
        self.switched = []
        if self.steps % self.agree_every == 0:
            if self._vote is not None:
                self._decide()
            if self._proposed and self.state.target is None and self.state.last_target >= self.newest.key:
                self.newest = self._proposed.popleft()
            vector = vote_vector(
                self.newest,
                self.mover.staged(),
                self.mover.error() is not None,
                self.state.state_hash(),
            )
            tensor = torch.from_numpy(vector)
            try:
                work = torch_dist.all_reduce(
                    tensor, torch_dist.ReduceOp.MIN, group=self._group, async_op=True
                )
            except RuntimeError as bad:
                raise VoteFailedError(self._failure(bad)) from bad
            assert work is not None
            self._vote = (tensor, work, self.newest)
        self.mover.advance()
        self.steps += 1
        return self.switched

    def _decide(self) -> None:
        assert self._vote is not None
        tensor, work, voted = self._vote
        try:
            work.wait(timedelta(seconds=self._limit_s))
        except RuntimeError as bad:
            raise VoteFailedError(self._failure(bad)) from bad
        for action in self.state.decide(np.asarray(tensor.numpy()), voted):
            match action:
                case Discard():
                    self.mover.discard()
                case Open(layer, live, target):
                    self.mover.open_layer(layer, live, target)
                case Commit(layer, row, _):
                    self.mover.commit_layer(layer, row)
                    self.switched.append(layer)

    def _failure(self, bad: RuntimeError) -> str:
        under_way = self.mover.in_flight() or "no transfer under way"
        return f"vote at step {self.steps} failed or took over {self._limit_s:g} s ({under_way}): {bad}"
