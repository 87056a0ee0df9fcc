"""The start of an elastic job: its first ranks meet at a store, and begin as membership 1."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as torch_dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from evenroute.dist.elastic.config import ElasticConfig, ProcessPlace
from evenroute.dist.groups import MissingRanksError
from evenroute.dist.protocol.job_start import StartedJob, decode_started, encode_started
from evenroute.dist.rank.start import ask_snapshot, connect
from evenroute.dist.wire.membership import Member, MembershipRecord, nodes_of
from evenroute.dist.wire.messages import JobShape
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class Meeting:
    """What all first ranks agree on."""

    record: MembershipRecord
    placement: Placement
    epoch: int
    store: TCPStore | None  # kept by the process that hosts it


def meet(
    config: ElasticConfig,
    launched: ProcessPlace,
    me: Member,
    placement: Placement | None,
    shape: tuple[int, int, int, int],
) -> Meeting:
    """Meet the other first ranks; rank 0 asks the rebalancer. ``shape``: layers, experts, local slots, top-k.

    Raises MissingRanksError, TimeoutError without a rebalancer, ValueError where the ranks differ.
    """
    limit_s = config.agent.start_limit_s + 30.0
    try:
        store = TCPStore(
            launched.address,
            launched.port,
            None,
            launched.hosts,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
        )
        roll = PrefixStore("evenroute/meet", store)
        mine = {"me": [me.identity, me.host, me.port, me.node], "shape": list(shape)}
        roll.set(str(launched.rank), json.dumps(mine))
        names = [str(rank) for rank in range(launched.world_size)]
        roll.wait(names, timedelta(seconds=limit_s))
        found = [json.loads(roll.get(name)) for name in names]
    except (torch_dist.DistError, RuntimeError) as error:
        raise MissingRanksError(
            f"job start: not all of {launched.world_size} ranks met at {launched.address}:{launched.port} within "
            f"{limit_s:g} s"
        ) from error
    differing = [rank for rank, one in enumerate(found) if one["shape"] != found[0]["shape"]]
    if differing:
        raise ValueError(
            f"job start: (layers, experts, slots of a rank, top-k) are {found[differing[0]]['shape']} on rank "
            f"{differing[0]}, {found[0]['shape']} on rank 0"
        )
    members = tuple(Member(rank, *one["me"]) for rank, one in enumerate(found))
    layers, experts, local, top_k = shape
    slots, nodes = local * len(members), nodes_of(members)
    topology = Topology(len(members), nodes)
    if placement is None:
        placement = Placement.initial(layers, experts, slots, topology)
    job = JobShape(
        num_layers=layers,
        num_logical_experts=experts,
        num_slots=slots,
        ep_size=len(members),
        num_nodes=nodes,
        top_k=top_k,
        shared_counts=config.agent.shared_counts,
        model=config.agent.model,
    )
    started = _started(config, launched, job, placement, roll)
    record = MembershipRecord(
        started.run, 1, 0, "start", started.run, started.key, members, started.job, text="the job starts"
    )
    return Meeting(record, started.version().placement, started.epoch, store if launched.hosts else None)


def _started(
    config: ElasticConfig, launched: ProcessPlace, job: JobShape, placement: Placement, roll: PrefixStore
) -> StartedJob:
    """Rank 0 asks the rebalancer, the others hear of it."""
    if launched.rank:
        data = roll.get("started")
        if not data:
            raise TimeoutError("job start: rank 0 got no placement (see its message)")
        return decode_started(data)
    link = connect(config.agent)
    assert link is not None
    try:
        started = ask_snapshot(config.agent, job, placement, link)
    except BaseException:
        roll.set("started", "")
        raise
    finally:
        link.close(linger_ms=0)
    roll.set("started", encode_started(started))  # type: ignore[arg-type] # torch takes bytes
    return started
