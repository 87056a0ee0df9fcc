"""What goes wrong in a migration: bad content stops it; a lost rank ends the job, which says what it was at."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from evenroute.dist.protocol.agreement import Version
from evenroute.dist.weights import watchdog as watchdog_module
from evenroute.dist.weights.exchange import InFlight, MigrationError
from evenroute.dist.weights.transfer import plan_transfer
from evenroute.dist.weights.watchdog import StallWatchdog
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.tools.run.driver import VoteFailedError
from support.moe_world import (
    Case,
    World,
    build_world,
    check_weights,
    run_layer,
    run_until_idle,
)
from support.placements import random_placement
from support.rank_pool import RankPool, Ranks, rank_pool


def _next(world: World, seed: int) -> Placement:
    case = world.case
    size = (case.num_layers, case.num_experts, case.num_slots, case.topology)
    return random_placement(np.random.default_rng(seed), *size)


def _flip(world: World, layer: int, expert: int) -> None:
    """Damage an expert's scale wherever this rank holds it now; twice mends it."""
    for slot in np.flatnonzero(world.mover.slot_experts(layer) == expert).tolist():
        world.tensors[layer]["scale"][slot] *= -1


def _damaged_content(ranks: Ranks, case: Case) -> list[str]:
    world = build_world(ranks, case)
    start = world.driver.live_placement()
    target = _next(world, 31)
    transfer = plan_transfer(start.physical_to_logical[1], target.physical_to_logical[1], case.topology)
    expert = transfer.rounds[0][0].expert
    _flip(world, 1, expert)
    key = world.driver.propose(target)
    errors = []
    while not errors or not world.driver.idle:
        world.driver.step()
        errors += [world.mover.error()] if world.mover.error() else []
        assert world.driver.steps < 200
        if world.driver.state.failed == key:
            break
    # Layer 0 was committed and stays, layers 1 and 2 are untouched: a mixture, tables and weights as one.
    rows = [row.slots.tolist() for row in world.driver.live_rows]
    assert rows[0] == target.physical_to_logical[0].tolist()
    assert rows[1:] == [start.physical_to_logical[layer].tolist() for layer in (1, 2)]
    assert world.mover.error() is None, "cleared with the target"
    _flip(world, 1, expert)
    check_weights(world)
    # It goes on: the same placement under a new key.
    world.driver.propose(target)
    run_until_idle(world)
    check_weights(world)
    assert world.driver.live_placement().digest() == target.digest()
    return [str(error) for error in errors]


def test_bad_content_stops_the_switch_and_leaves_a_true_mixture() -> None:
    case = Case(ep_size=2, num_layers=3, seed=30, verify=True)
    results = rank_pool(2).run(_damaged_content, case)
    messages = [message for errors in results for message in errors]
    assert any(
        m.startswith("staging of layer 1: checksum mismatch in local slot ") and "(expert " in m
        for m in messages
    ), messages


def _commit_goes_wrong(ranks: Ranks, case: Case) -> str:
    world = build_world(ranks, case)
    world.driver.propose(_next(world, 32))
    try:
        for _ in range(100):
            for one in world.mover._open:
                if one.staged and ranks.rank == 1:
                    one.staged_rows[0].fill_(3)  # damaged after it was found good
            world.driver.step()
    except (MigrationError, VoteFailedError) as bad:
        return str(bad)
    return ""


def test_verifying_mode_checks_again_after_the_commit() -> None:
    pool = RankPool(2)
    try:
        pool.start(
            _commit_goes_wrong,
            Case(ep_size=2, verify=True),
        )
        ok, message = pool.results([1])[0]
        assert ok
        assert message.startswith("migration: commit of layer 0: checksum mismatch in local slot")
    finally:
        pool.close()


def _newer_while_moving(ranks: Ranks, case: Case, at: int) -> tuple[int, float]:
    """A newer placement comes while a target is under way; layers of three versions exist side by side."""
    world = build_world(ranks, case)
    world.driver.propose(_next(world, 33))
    last = _next(world, 34)
    keys: set[tuple[int, int]] = set()
    for step in range(200):
        if step == at:
            world.driver.newest = Version.of((1, 9), last)
        switched = world.driver.step()
        check_weights(world, switched)
        keys.update(world.driver.state.live_keys)
        for layer in range(case.num_layers):
            out, wanted, _ = run_layer(world, step, layer)
            if wanted.numel():
                world.worst = max(world.worst, float((out - wanted).abs().max()))
        if world.driver.idle and step > at:
            break
    assert world.driver.live_placement().digest() == last.digest()
    check_weights(world)
    return len(keys), world.worst


def test_a_newer_version_takes_over_once_what_is_open_is_committed() -> None:
    case = Case(ep_size=2, num_layers=6, seed=33, staging_layers=2)
    found = [rank_pool(2).run(_newer_while_moving, case, at)[0] for at in (3, 5, 8)]
    assert max(keys for keys, _ in found) == 3
    assert max(worst for _, worst in found) < 1e-5


def _refusals(ranks: Ranks, case: Case) -> list[str]:
    world = build_world(ranks, case)
    row = PlacementRow(_next(world, 35).physical_to_logical[0], None)
    found = []
    for call in (
        lambda: world.mover.commit_layer(0, row),
        lambda: world.mover.load(Placement.initial(1, 8, 12, case.topology)),
    ):
        try:
            call()
        except (MigrationError, ValueError) as bad:
            found.append(str(bad))
    check_weights(world)
    return found


def test_what_would_make_tables_and_weights_disagree_is_refused() -> None:
    commit, load = rank_pool(2).run(_refusals, Case(ep_size=2))[0]
    assert commit == "migration: commit of layer 0 needs weights that were not moved"
    assert load.startswith("placement has (layers, local slots, ep_size) = (1, 6, 2), the weights")


LIMIT_S = 8.0
LOST = Case(ep_size=4, num_layers=4, num_slots=16, seed=36, chunk_bytes=1024)


def _lose_a_rank(ranks: Ranks, case: Case, how: str) -> tuple[str, float]:
    world = build_world(ranks, case, limit_s=LIMIT_S)
    world.driver.propose(_next(world, 37))
    started = time.monotonic()
    try:
        for step in range(400):
            if step == 6 and ranks.rank == 2:
                assert world.mover.in_flight(), "in the middle of a migration"
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(300)
            started = time.monotonic()
            world.driver.step()
    except (MigrationError, VoteFailedError) as bad:
        return str(bad), time.monotonic() - started
    return "", 0.0


@pytest.mark.parametrize("how", ["killed", "asleep"])
def test_a_lost_rank_ends_the_job_by_the_limit_naming_operation_and_layer(how: str) -> None:
    pool = RankPool(4)
    try:
        pool.start(_lose_a_rank, LOST, how)
        for ok, (message, seconds) in pool.results([0, 1, 3], limit_s=150):
            assert ok, message
            assert "migration: transfer of layer 0 (chunk " in message
            assert seconds < 2 * LIMIT_S
    finally:
        pool.close()


def _transfer_without_peer(ranks: Ranks, case: Case) -> str:
    """Below the agreement: the transfer itself has the limit."""
    world = build_world(ranks, case, limit_s=3.0)
    target = _next(world, 38)
    if ranks.rank == 1:
        time.sleep(300)
        return "asleep"
    world.mover.open_layer(1, world.driver.live_rows[1], target.row(1))
    try:
        world.mover.advance()
        world.mover.advance()
    except MigrationError as bad:
        return str(bad)
    return ""


def test_a_transfer_has_its_own_limit() -> None:
    pool = RankPool(2)
    try:
        pool.start(_transfer_without_peer, Case(ep_size=2, seed=39))
        ok, message = pool.results([0], limit_s=150)[0]
        assert ok
        assert message.startswith("migration: transfer of layer 1 (chunk ")
        assert "failed or did not complete within 3 s" in message
    finally:
        pool.close()


@dataclass
class _FakeEvent:
    done: bool = False

    def query(self) -> bool:
        return self.done


@dataclass
class _Stalls:
    messages: list[str] = field(default_factory=list)
    at: float = 0.0

    def __call__(self, message: str) -> None:
        self.messages.append(message)
        self.at = time.monotonic()


def _chunk(what: str, begun: bool, done: bool, started: float | None = None) -> InFlight:
    events = _FakeEvent(begun), _FakeEvent(done)
    return InFlight(what, time.monotonic() if started is None else started, [], *events)  # type: ignore[arg-type]


def _until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_watchdog_counts_while_the_chunk_runs_and_says_which() -> None:
    stalls = _Stalls()
    watchdog = StallWatchdog(0.2, stalls, grace_s=0.2)
    try:
        waiting = _chunk("transfer of layer 2", begun=False, done=False)
        watchdog.watch(waiting)
        time.sleep(0.8)
        assert not stalls.messages, "behind earlier work of its own stream it does not count"
        begun = time.monotonic()
        waiting.begun.done = True  # type: ignore[union-attr]
        _until(lambda: stalls.messages)
        assert stalls.messages == ["transfer of layer 2 did not complete within 0.2 s"]
        assert 0.15 < stalls.at - begun < 30
    finally:
        watchdog.close()


def test_watchdog_forgives_what_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's own: a busy host must not make a chunk older than it is."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    stalls = _Stalls()
    watchdog = StallWatchdog(0.1, stalls, grace_s=0.4)
    try:
        for number in range(9):
            chunk = _chunk(f"chunk {number}", begun=True, done=False, started=clock.now)
            watchdog.watch(chunk)
            clock.now += 0.2
            assert watchdog.late() is None, "older than the limit: the grace begins"
            clock.now += 0.3
            assert watchdog.late() is None, "within the grace"
            if number == 8:
                break
            chunk.done.done = True  # type: ignore[union-attr]
            if number % 2:
                watchdog.watch(None)
            clock.now += 10.0
            assert watchdog.late() is None
        assert not stalls.messages
        clock.now += 0.2
        assert watchdog.late() == "chunk 8 did not complete within 0.1 s", "the one that did not"
    finally:
        watchdog.close()


def test_watchdog_asks_nothing_of_a_young_chunk() -> None:
    """Another thread's event query would spoil a graph capture."""
    chunk = _chunk("young", begun=True, done=False)
    asked: list[int] = []
    chunk.done.query = lambda: bool(asked.append(1))  # type: ignore[union-attr,method-assign,func-returns-value]
    watchdog = StallWatchdog(30.0, _Stalls())
    try:
        watchdog.watch(chunk)
        time.sleep(0.6)
        assert not asked
    finally:
        watchdog.close()


def _rebalance_often(ranks: Ranks, case: Case, times: int) -> tuple[list[int], int]:
    """Resident bytes after each tenth, and the most steps a rebalance took."""
    world = build_world(ranks, case)
    rng = np.random.default_rng(40)
    size = (case.num_layers, case.num_experts, case.num_slots, case.topology)
    resident, most = [], 0
    for number in range(times):
        world.driver.propose(random_placement(rng, *size))
        most = max(most, len(run_until_idle(world)))
        check_weights(world)
        run_layer(world, number, number % case.num_layers)
        if number % (times // 10) == times // 10 - 1:
            resident.append(psutil.Process().memory_info().rss)
    return resident, most


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ep_size", [2, 4])
def test_a_thousand_rebalances_in_a_row(ep_size: int) -> None:
    case = Case(ep_size=ep_size, num_slots=12, num_layers=3, seed=40, staging_layers=2, chunk_bytes=4096)
    pool = RankPool(ep_size)
    try:
        pool.start(_rebalance_often, case, 1000)
        for ok, found in pool.results(limit_s=1500):
            assert ok, found
            resident, most = found
            assert most <= 40, "no step is stuck"
            assert resident[-1] - resident[1] < 4 << 20, f"memory grows: {resident}"
            assert sum(b > a + (1 << 19) for a, b in pairwise(resident[1:])) <= 3
    finally:
        pool.close()
