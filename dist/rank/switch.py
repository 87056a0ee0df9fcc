"""Drives the switch protocol on the forward thread: waits for votes, carries out what they decide, posts the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.agreement import Action, Commit, Discard, Open, Switch
from evenroute.dist.protocol.rank import RankCore
from evenroute.dist.rank.notes import SwitchNotes
from evenroute.dist.rank.thread import Lock
from evenroute.dist.rank.votes import VoteThread
from evenroute.dist.weights.mover import LayerMover
from evenroute.dist.wire.messages import Key
from evenroute.eplb.placement.placement import Placement, PlacementRow

OnCommit = Callable[[int, PlacementRow], None]

logger = logging.getLogger("evenroute.dist.agent")


class MembershipSwitchedError(RuntimeError):
    """All ranks go on in another membership from this step on: nothing of it was begun in this one."""


class VoteGate(Protocol):
    """What an elastic job's votes pass through."""

    def decided(self, vote: int, vector: Sequence[int] | NDArray[np.int64]) -> None:
        """Under the lock, before a vote is decided. Raises RuntimeError where this rank has halted."""

    def go(self) -> int:
        """Under the lock: the highest membership that this rank may go on in."""

    def switch(self, number: int) -> bool:
        """All may go on in membership ``number``; False: it would leave an expert without a slot, the same on all."""


class SwitchDriver:
    """One rank's side of every agreement; the rank core is shared with the agent's thread under `lock`.

    on_switch    called after actions were carried out
    on_commit    called with (layer, row) behind each commit, on the forward thread
    key          (epoch, version) that all layers have; None while layers differ
    layer_keys   int64 [L, 2], read-only: (epoch, version) of each layer
    """

    def __init__(
        self,
        core: RankCore,
        lock: Lock,
        mover: LayerMover,
        votes: VoteThread,
        *,
        rank: int,
        on_switch: Callable[[], None],
        on_commit: OnCommit | None = None,
        gate: VoteGate | None = None,
    ) -> None:
        self._core = core
        self._gate = gate
        self._lock = lock
        self._mover = mover
        self._votes = votes
        self._rank = rank
        self._on_switch = on_switch
        self._on_commit = on_commit
        self.notes = SwitchNotes(rank)
        self._step = 0
        self._error_told = False
        self._placement: Placement | None = None
        self._layers_changed()

    def agree(self, vote: int, step: int) -> tuple[int, ...]:
        """At `step`: carry out what vote number `vote` - 1 decided and post `vote`; the layers that switched.

        Raises VoteError when the ranks cannot agree any more, RuntimeError when a transfer failed.
        """
        self._step = step
        switched: tuple[int, ...] = ()
        core = self._core
        if vote:
            began, before = time.time(), core.state.target
            reduced = self._votes.wait(vote - 1, self._describe)
            with self._lock:
                if self._gate is not None:
                    self._gate.decided(vote - 1, reduced)
                actions = core.decide(vote - 1, reduced)
            target = core.state.target
            if actions or before is not None or target is not None:
                self.notes.add("vote", began, step, number=vote - 1)
            if before is None and target is not None:
                self.notes.target(target.key, step)
            if actions:
                switched = self.carry_out(actions)
            self.notes.target(None if target is None else target.key, step)
            if switched and before is None and target is None:  # tables alone: all at once
                self.notes.add("switch", began, step, number=core.state.last_target[1])
            if actions and isinstance(actions[-1], Switch):
                assert self._gate is not None
                if self._gate.switch(actions[-1].number):
                    raise MembershipSwitchedError(f"membership {actions[-1].number} begins")
        # Without a target the mover still counts the last one's layers.
        has_target = core.state.target is not None
        staged = self._mover.staged() if has_target else 0
        error = self._mover.error() if has_target else None
        if has_target:
            self.notes.staged(core.state.moved, staged, step)
        if error is not None and not self._error_told:
            logger.error("rank %d: %s is refused: %s", self._rank, self._describe(), error)
            self._error_told = True
        with self._lock:
            core.set_staged(staged)
            core.set_error(error is not None)
            if self._gate is not None:
                core.go = self._gate.go()
            vector = core.vote()
        self._votes.post(vote, vector)
        return switched

    @property
    def placement(self) -> Placement:
        """What is routed with now, rows of different versions side by side."""
        if self._placement is None:
            self._placement = self._core.live_placement()
        return self._placement

    def carry_out(self, actions: list[Action]) -> tuple[int, ...]:
        """Do what was decided, in order; the layers that switched."""
        switched = []
        for action in actions:
            match action:
                case Discard():
                    began = time.time()
                    self._mover.discard()
                    self._error_told = False
                    self.notes.add("discard", began, self._step)
                case Open(layer, live_row, target_row):
                    began = time.time()
                    self._mover.open_layer(layer, live_row, target_row)
                    self.notes.add("open", began, self._step, layer)
                case Commit(layer, row, _):
                    began = time.time()
                    self._mover.commit_layer(layer, row)
                    self.notes.add("commit", began, self._step, layer)
                    if self._on_commit is not None:
                        self._on_commit(layer, row)
                    switched.append(layer)
        if switched:
            self._layers_changed()
        self._on_switch()
        return tuple(switched)

    def _layers_changed(self) -> None:
        keys = self._core.state.live_keys
        self._placement = None
        self.key: Key | None = keys[0] if all(key == keys[0] for key in keys) else None
        self.layer_keys: NDArray[np.int64] = np.array(keys, dtype=np.int64).reshape(-1, 2)
        self.layer_keys.flags.writeable = False

    def _describe(self) -> str:
        state = self._core.state
        version = f"version {state.target.key}" if state.target is not None else "no version under way"
        transfer = self._mover.in_flight()
        return f"step {self._step}, {version}" + (f", {transfer}" if transfer else "")
