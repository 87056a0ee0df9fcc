"""What goes wrong on purpose in `bench_migration.py`: a killed rank, a rank that stands still, damaged weights."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

from evenroute.dist.weights.transfer import plan_transfer
from evenroute.eplb.placement.placement import Placement
from evenroute.tools.run.bench_model import BenchModel, GraphStep
from evenroute.tools.run.model_bench import ModelBench

MOST_STEPS = 10_000


def _some_placement(bench: ModelBench, seed: int = 5) -> Placement:
    sizes = bench.model.sizes
    loads = np.random.default_rng(seed).lognormal(0.0, 1.5, (sizes.num_layers, sizes.num_experts))
    return bench.plan(loads)


def kill_part(bench: ModelBench) -> dict[str, Any]:
    """The last rank is killed in the middle of a migration; the others must end and name the operation under way."""
    model = bench.model
    step = GraphStep(model, bench.args.tokens)
    model.driver.propose(_some_placement(bench))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's: the message is to be seen
    for number in range(MOST_STEPS):
        model.driver.step()
        in_flight = model.mover.in_flight()
        if in_flight and number > 5 and model.rank == model.ep_size - 1:
            print(f"killed at step {number}: {in_flight}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if model.device.type == "cuda":  # gloo's own collectives would fail first, without naming a layer
            step.run(number)
    return {"ended": False}


def stall_part(bench: ModelBench) -> dict[str, Any]:
    """The last rank lives, but never enqueues its part of a transfer: on CUDA nothing on the host notices, and the
    watchdog has to end the others, `--transfer-limit-s` and its grace later, with operation and layer."""
    model = bench.model
    model.driver.propose(_some_placement(bench))
    last = model.rank == model.ep_size - 1
    if not last:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    began = time.monotonic()
    for number in range(MOST_STEPS):
        if last and model.mover.in_flight():
            print(f"stands still at step {number}", file=sys.stderr, flush=True)
            time.sleep(bench.args.limit_s)
            return {"ended": False}
        if not last and not model.mover.in_flight():
            began = time.monotonic()
        if last:
            _step_without_transfer(model)
        else:
            model.driver.step()
        if time.monotonic() - began > bench.args.limit_s:
            break
    return {"ended": False}


def _step_without_transfer(model: BenchModel) -> None:
    """The driver's step, but for the chunk that it would enqueue."""
    advance, model.mover.advance = model.mover.advance, lambda: None  # type: ignore[method-assign]
    try:
        model.driver.step()
    finally:
        model.mover.advance = advance  # type: ignore[method-assign]


def damage_part(bench: ModelBench) -> dict[str, Any]:
    """With `--verify`: an expert that is to move is damaged where it lies. The switch must stop at its layer on all
    ranks, live weights and tables must stay, and the same placement must go through once it is repaired."""
    model = bench.model
    step = GraphStep(model, bench.args.tokens)
    number = 0
    while not model.driver.idle:  # what another part left under way
        model.driver.step()
        step.run(number)
        number += 1
    start, target = model.driver.live_placement(), _some_placement(bench)
    layer = model.sizes.num_layers - 1
    transfer = plan_transfer(
        start.physical_to_logical[layer], target.physical_to_logical[layer], start.topology
    )
    expert = transfer.rounds[0][0].expert
    _turn(model, layer, expert)
    key = model.driver.propose(target)
    errors: set[str] = set()
    while model.driver.state.failed != key and number < MOST_STEPS:
        model.driver.step()
        errors |= {model.mover.error() or ""}
        step.run(number)
        number += 1
    model.synchronize()
    stayed = np.array_equal(model.driver.live_rows[layer].slots, start.physical_to_logical[layer])
    _turn(model, layer, expert)
    bench.check(step, layer)
    model.driver.propose(target)
    while not model.driver.idle and number < MOST_STEPS:
        model.driver.step()
        step.run(number)
        number += 1
    bench.check(step, layer)
    found = max(errors)
    if found:
        print(f"rank {model.rank}: {found}", file=sys.stderr, flush=True)
    return {
        "refused": model.driver.state.failed == key,
        "noticed": bench.worst_of(float(bool(found))) == 1.0,
        "layer_stayed": bool(stayed),
        "taken_up_after": model.driver.live_placement().digest() == target.digest(),
        "steps": number,
    }


def _turn(model: BenchModel, layer: int, expert: int) -> None:
    """Change the sign of an expert's first weights wherever this rank holds it; twice is as before."""
    for slot in np.flatnonzero(model.mover.slot_experts(layer) == expert).tolist():
        model.tensors[layer]["down"][slot, :1].neg_()
