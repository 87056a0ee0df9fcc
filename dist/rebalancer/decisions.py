"""The policy in the daemon: its settings, its questions to the planner's process, and its state in the store.

`RebalancePolicy` decides here as in `replay`. What it remembers is kept in the store, a ring of settings of one window
each, and shown to a new policy at the next start.
"""

from __future__ import annotations

import base64
import itertools
import logging
import zlib
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from evenroute.dist.config import PlannerSettings
from evenroute.dist.protocol.publication import fits
from evenroute.dist.wire.messages import JobShape, WirePlacement
from evenroute.dist.wire.placement import pack_placement, unpack_placement
from evenroute.eplb.loads.balance import placement_balancedness
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.full import check_hierarchical
from evenroute.eplb.planner.plan import Plan
from evenroute.eplb.planner.policy import Decision, PolicySettings, Question, RebalancePolicy
from evenroute.eplb.store.writer import HistoryStore, StaleEpochError, StoreError

logger = logging.getLogger("evenroute.dist.rebalancer")

REMEMBERED = 32  # windows; what came before them weighs less than 4 % (`memory.FADING` ** 32)
_START = "start-placement"
_SETTING = "policy-window-{}"
_LOOK_BACK = 16  # placements: each life takes one up
_NOT_PLANNED = ("taken-up", "rollback")


def policy_settings(settings: PlannerSettings, job: JobShape) -> PolicySettings:
    """The policy that the planner settings describe, for this job; ValueError naming what does not fit it.

    ``auto``: shares and few moves, a full plan at the start. ``weighted``: the same without the full plan.
    ``incremental``: few moves, even shares. ``global`` and ``hierarchical``: a full plan at every interval, even
    shares. `num_groups` above 1 keeps groups on their node where there are several nodes.
    """
    kept = settings.policy == "hierarchical" or (settings.num_groups > 1 and job.num_nodes > 1)
    if job.num_logical_experts % settings.num_groups:
        raise ValueError(
            f"planner.num_groups {settings.num_groups} does not divide its {job.num_logical_experts} experts"
        )
    if kept:
        topology = Topology(job.ep_size, job.num_nodes)
        check_hierarchical(job.num_logical_experts, job.num_slots, settings.num_groups, topology)
    given: dict[str, float | int] = {}
    if settings.target is not None:
        given["target"] = settings.target
    if (
        settings.max_moves is not None
    ):  # of one plan: no burst, and the half makes int() give the number itself
        slots = job.num_layers * job.num_slots
        given["max_move_fraction"] = (
            min(1.0, (settings.max_moves + 0.5) / slots) if settings.max_moves else 0.0
        )
        given["move_burst"] = 1
    if settings.min_gain:
        given["share_mean_gain"] = max(settings.min_gain, PolicySettings.share_mean_gain)
    return PolicySettings(
        uneven_shares=settings.policy in ("auto", "weighted"),
        hierarchical=kept,
        num_groups=settings.num_groups,
        **given,  # type: ignore[arg-type]
    )


class _Window(Struct, frozen=True, forbid_unknown_fields=True):
    """A remembered window: counts int64 [L, E] (raw little-endian, zlib, base 85) and what was decided after it."""

    number: int
    shape: tuple[int, int]
    counts: str
    action: str
    moves: int


class LivePolicy:
    """The policy of one job shape. `ask` and `settle` come in pairs; a question that is never answered is forgotten."""

    def __init__(self, store: HistoryStore, settings: PlannerSettings, job: JobShape) -> None:
        self.settings = policy_settings(settings, job)
        self.policy = RebalancePolicy(Topology(job.ep_size, job.num_nodes), job.num_slots, self.settings)
        self._store = store
        self._always_full = settings.policy in ("global", "hierarchical")
        self._min_gain = settings.min_gain
        self._number = 0
        self._counts: NDArray[np.int64] | None = None
        few = settings.policy in ("weighted", "incremental") or settings.max_moves is not None
        if few or self._was_planned(job):
            self.policy.skip_start()

    def _was_planned(self, job: JobShape) -> bool:
        """Whether a plan for this job is among the store's newest placements."""
        rows = itertools.islice(self._store.placements(newest_first=True), _LOOK_BACK)
        return any(fits(row.placement, job) and row.policy not in _NOT_PLANNED for row in rows)

    def restore(self, live: Placement) -> int:
        """Show the policy what an earlier life remembered; returns the number of windows."""
        shape = (live.num_layers, live.num_logical_experts)
        found = []
        for place in range(REMEMBERED):
            with suppress(StoreError, msgspec.DecodeError):
                text = self._store.setting(_SETTING.format(place))
                if text is not None:
                    found.append(msgspec.json.decode(text, type=_Window))
        found = sorted((w for w in found if w.shape == shape), key=lambda window: window.number)
        for window in found:
            raw = zlib.decompress(base64.b85decode(window.counts))
            counts = np.frombuffer(raw, "<i8").reshape(shape)
            self.policy.remember([counts])
            self._settle(window.action, window.moves, live)
            self._number = window.number + 1
        if found:
            self.policy.skip_start()
        return len(found)

    def _settle(self, action: str, moves: int, live: Placement) -> None:
        """Take a decision's moves off the budget."""
        as_it_was = placement_balancedness(np.zeros((live.num_layers, live.num_logical_experts)), live)
        plan = Plan(live, action, "", as_it_was, as_it_was, np.array([moves]))
        self.policy.settle(Decision(action, "", plan))

    def ask(self, counts: NDArray[np.int64], live: Placement) -> Question | None:
        """What the planner's process is to answer after this window; None if it holds no load."""
        if self._always_full:
            self.policy.request_full_plan()
        self._counts = counts
        return self.policy.observe(counts, live)

    def settle(
        self, action: str, reason: str, *, moves: int, gain: float, live: Placement, epoch: int
    ) -> tuple[str, str]:
        """The action that is carried out and why, kept in the store; a gain below `planner.min_gain` stays."""
        if action != "stay" and gain < self._min_gain:
            reason = f"stay: gain {gain:.4f} is below planner.min_gain {self._min_gain:g} ({reason})"
            action, moves = "stay", 0
        self._settle(action, moves, live)
        self._keep(action, moves, epoch)
        return action, reason

    def _keep(self, action: str, moves: int, epoch: int) -> None:
        counts, self._counts = self._counts, None
        assert counts is not None
        packed = base64.b85encode(zlib.compress(counts.astype("<i8").tobytes(), 1)).decode()
        window = _Window(self._number, (len(counts), counts.shape[1]), packed, action, moves)
        try:
            name = _SETTING.format(self._number % REMEMBERED)
            self._store.set_setting(name, msgspec.json.encode(window).decode(), epoch=epoch)
            self._number += 1
        except StaleEpochError:
            raise
        except StoreError as error:
            logger.warning("what the policy remembers is not kept: %s", error)


def keep_start(store: HistoryStore, live: Placement, epoch: int) -> None:
    """Keep what a job routes with before its first version, to roll back to."""
    with suppress(StoreError):
        store.set_setting(_START, msgspec.json.encode(pack_placement(live)).decode(), epoch=epoch)


def earlier_placements(store: HistoryStore, job: JobShape) -> Iterator[tuple[str, Placement]]:
    """(name, placement) of what a job of this shape was given, the newest first; last what it started with."""
    for row in store.placements(newest_first=True):
        if fits(row.placement, job):
            yield f"version {row.epoch:x}/{row.version} ({row.policy})", row.placement
    start = store.setting(_START)
    if start is not None:
        with suppress(ValueError, msgspec.DecodeError):  # of a job of another shape
            wire = msgspec.json.decode(start, type=WirePlacement)
            yield "the placement that the job started with", unpack_placement(wire, job)
