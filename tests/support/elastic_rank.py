"""The process of `evenroute bench elastic`, which ends itself (SIGKILL) at a place of its code that a test names.

EVENROUTE_DIE=PLACE@MEMBER@STEP: "decided" (a vote's result is read and noted, nothing of it is carried out), "commit"
(a layer's weights are committed, the next one's not), "transfer" (a chunk of a migration is under way), "forward" (in
the middle of a step's layers); the first time that it comes there after STEP.
"""

import os
import signal
import sys
from typing import Any

from evenroute.dist.elastic.agent import ElasticAgent
from evenroute.dist.weights.weight_mover import WeightMover
from evenroute.tools.elastic import rank


def _here(place: str) -> None:
    wanted, member, step = os.environ.get("EVENROUTE_DIE", "@-1@0").split("@")
    agent = _agent[0] if _agent else None
    if agent is None or place != wanted or agent.member != int(member) or agent.next_step < int(step):
        return
    os.kill(os.getpid(), signal.SIGKILL)


_agent: list[ElasticAgent] = []


def patch() -> None:
    """Put the places in."""
    decided, commit, advance, forward = (
        ElasticAgent.decided,
        WeightMover.commit_layer,
        WeightMover.advance,
        rank.Model.forward,
    )

    def new_decided(self: ElasticAgent, vote: int, vector: Any) -> None:
        decided(self, vote, vector)
        _agent[:] = [self]
        _here("decided")

    def new_commit(self: WeightMover, layer: int, row: Any) -> None:
        moved = bool(self._open)
        commit(self, layer, row)
        if moved:
            _here("commit")

    def new_advance(self: WeightMover) -> None:
        advance(self)
        if self.in_flight():
            _here("transfer")

    def new_forward(self: rank.Model, batch: int) -> Any:
        layers = self.layers
        if len(layers) > 1:
            first = layers[1].experts

            class Dying:
                num_slots, dtype, device, hidden_size = (
                    first.num_slots,
                    first.dtype,
                    first.device,
                    first.hidden_size,
                )

                def __call__(self, rows: Any, ends: Any) -> Any:
                    _here("forward")
                    return first(rows, ends)

            if type(first).__name__ != "Dying":
                layers[1].experts = Dying()
        return forward(self, batch)

    ElasticAgent.decided = new_decided  # type: ignore[method-assign]
    WeightMover.commit_layer = new_commit  # type: ignore[method-assign]
    WeightMover.advance = new_advance  # type: ignore[method-assign]
    rank.Model.forward = new_forward  # type: ignore[method-assign]


if __name__ == "__main__":
    patch()
    sys.exit(rank.main())
