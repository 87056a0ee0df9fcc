"""Small jobs, versions and messages for the tests of the protocol cores."""

from dataclasses import replace as replace_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenroute.dist.protocol.agreement import Version, read_reduced
from evenroute.dist.protocol.job_start import StartedJob
from evenroute.dist.protocol.rank import RankConfig, RankCore
from evenroute.dist.wire.messages import NO_KEY, JobShape, PlacementMessage, RankStatus, RankWindow
from evenroute.dist.wire.placement import pack_placement
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology

JOB = JobShape(num_layers=3, num_logical_experts=4, num_slots=6, ep_size=2, top_k=2)
RUN = 77


def placement_of(job: JobShape = JOB, *, seed: int = 0, layers: set[int] | None = None) -> Placement:
    """Random placement; seed 0 is the initial one. ``layers``: only these differ from the initial one."""
    topology = Topology(job.ep_size, job.num_nodes)
    base = Placement.initial(job.num_layers, job.num_logical_experts, job.num_slots, topology)
    if seed == 0:
        return base
    rng = np.random.default_rng(seed)
    slots = base.physical_to_logical.copy()
    for layer in range(job.num_layers):
        if layers is None or layer in layers:
            relabel = rng.permutation(job.num_logical_experts)
            while (relabel == np.arange(job.num_logical_experts)).all():
                relabel = rng.permutation(job.num_logical_experts)
            slots[layer] = relabel[slots[layer]]
    return Placement(slots, job.num_logical_experts, topology)


def with_shares(placement: Placement, layer: int) -> Placement:
    """The same slots, uneven shares in one layer."""
    row = placement.row(layer)
    slots = row.slots
    shares = np.zeros(len(slots), np.uint16)
    for expert in range(placement.num_logical_experts):
        holders = np.flatnonzero(slots == expert)
        shares[holders] = 0
        shares[holders[0]] = 65535 - 100 * (len(holders) - 1)
        shares[holders[1:]] = 100
    return placement.with_row(layer, replace_row(row, shares))


def replace_row(row: Any, shares: NDArray[np.uint16]) -> Any:
    """The row with other shares."""
    return row._replace(shares=shares)


def version_of(key: tuple[int, int], *, seed: int = 0, job: JobShape = JOB) -> Version:
    """A version with a random placement."""
    return Version.of(key, placement_of(job, seed=seed))


def started(
    job: JobShape = JOB, *, run: int = RUN, epoch: int = 0, key: tuple[int, int] = NO_KEY
) -> StartedJob:
    """A job that starts with the initial placement."""
    return StartedJob(run=run, epoch=epoch, key=key, job=job, placement=pack_placement(placement_of(job)))


def rank_core(rank: int = 0, job: JobShape = JOB, *, epoch: int = 0, **config: Any) -> RankCore:
    """A rank core of a started job; the first status is taken out of the way."""
    core = RankCore(started(job, epoch=epoch), rank=rank, config=RankConfig(**config))
    core.tick(0.0)
    return core


def placement_message(
    version: Version, *, run: int = RUN, epoch: int | None = None, **fields: Any
) -> PlacementMessage:
    """The message that carries ``version``."""
    message = PlacementMessage(
        run=run,
        epoch=version.key[0] if epoch is None else epoch,
        key=version.key,
        digest=version.digest,
        placement=pack_placement(version.placement),
    )
    return replace(message, **fields)


def replace(message: Any, **fields: Any) -> Any:
    """A struct or dataclass with other fields."""
    if hasattr(message, "__struct_fields__"):
        values = {name: getattr(message, name) for name in message.__struct_fields__}
        return type(message)(**{**values, **fields})
    return replace_dataclass(message, **fields)


def status_of(core: RankCore, **fields: Any) -> RankStatus:
    """The core's status with other fields."""
    return replace(core.status(), **fields)


def window_of(
    seq: int,
    *,
    rank: int = 0,
    run: int = RUN,
    first: int = 0,
    last: int = 0,
    tokens: int = 8,
    job: JobShape = JOB,
) -> RankWindow:
    """A window whose counts are ``tokens * top_k`` a layer."""
    counts = np.zeros((job.num_layers, job.num_logical_experts), "<i8")
    counts[:, 0] = tokens * job.top_k
    last = max(last, seq - 1)  # each window has a step of its own
    return RankWindow(run, rank, seq, first, last, tokens, counts.tobytes())


def minimum(*vectors: NDArray[np.int64]) -> NDArray[np.int64]:
    """What the all-reduce does; checked to be readable."""
    reduced = np.minimum.reduce(vectors)
    read_reduced(reduced)
    return reduced
