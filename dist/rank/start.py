"""The start of a job on its ranks: check the arguments, then rank 0 asks the rebalancer, decides and broadcasts."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from evenroute.dist.config import AgentConfig
from evenroute.dist.groups import compare_ranks, new_cpu_group, require_group
from evenroute.dist.protocol.job_start import (
    JobStartConfig,
    JobStartCore,
    StartedJob,
    decode_started,
    encode_started,
)
from evenroute.dist.record.files import check_folder
from evenroute.dist.weights.mover import TableUpdater
from evenroute.dist.wire.address import parse_address
from evenroute.dist.wire.keys import load_client_keys
from evenroute.dist.wire.link import DealerLink
from evenroute.dist.wire.messages import (
    DEFAULT_FRAME_LIMIT,
    PROTOCOL_VERSION,
    JobShape,
    MessageError,
    Up,
    decode_down,
    encode,
)
from evenroute.eplb._checks import (
    MAX_INTEGER,
    describe,
    require_callable,
    require_instance,
    require_int,
    require_parts,
)
from evenroute.eplb.placement.placement import Placement

logger = logging.getLogger("evenroute.dist.agent")

_TABLES = ("update_layer", "load", "prepare")
_COUNTED = ("num_layers", "num_logical_experts")
_EQUAL = ("agree_every", "window_steps", "mode")
_MOVER = ("load", "open_layer", "advance", "staged", "error", "commit_layer", "discard", "in_flight")


class Tables(TableUpdater, Protocol):
    """The part of `routing.tables.DispatchTables` that the agent needs."""

    def prepare(self, placement: Placement) -> None: ...


def check_start(
    config: Any,
    placement: Any,
    tables: Any,
    counters: Any,
    ep_group: Any,
    mover: Any,
    on_commit: Any,
) -> tuple[int, JobShape]:
    """This rank's number and the job's shape; ValueError for what `RankAgent.start` cannot work with."""
    require_instance("config", config, AgentConfig)
    require_instance("placement", placement, Placement)
    rank, ep_size = require_group("ep_group", ep_group)
    if ep_size != placement.topology.ep_size:
        raise ValueError(
            f"ep_group: {ep_size} ranks found, the placement is for {placement.topology.ep_size}"
        )
    require_parts("tables", tables, "DispatchTables", _TABLES)
    wanted = {
        "num_layers": placement.num_layers,
        "num_logical_experts": placement.num_logical_experts,
        "num_slots": placement.num_slots,
        "topology": placement.topology,
    }
    # Tables of an engine's own may lack these attributes.
    _fits("tables", tables, {name: value for name, value in wanted.items() if hasattr(tables, name)})
    found = getattr(tables, "ep_rank", rank)
    if found != rank:
        raise ValueError(f"tables.ep_rank: {describe(found)} found, this is rank {rank} of ep_group")
    require_parts("counters", counters, "ExpertCounters", ("take",), (*_COUNTED, "device"))
    _fits("counters", counters, {name: wanted[name] for name in _COUNTED})
    require_instance("counters.device", counters.device, torch.device)
    if mover is not None:
        require_parts("mover", mover, "LayerMover", _MOVER, ("num_buffers",))
        require_int("mover.num_buffers", mover.num_buffers, 1, MAX_INTEGER)
    if on_commit is not None:
        require_callable("on_commit", on_commit, "on_commit(layer, row)")
    if config.record_dir:
        check_folder(config.record_dir)
    return rank, job_shape(config, placement, _top_k(config, counters))


def _top_k(config: AgentConfig, counters: Any) -> int:
    """Routed experts a token, as the router's counters know them; ValueError where `config` says another number."""
    known = getattr(counters, "top_k", 0)
    if known and config.top_k and known != config.top_k:
        raise ValueError(
            f"agent.top_k: {config.top_k} found, the router chooses {known} experts a token; leave it out"
        )
    if not known and not config.top_k:
        raise ValueError(
            "agent.top_k: 0 found and no Router counts into these counters yet, expected the experts a token (or make "
            "the Router first)"
        )
    return known or config.top_k


def _fits(name: str, value: Any, wanted: dict[str, Any]) -> None:
    for field, expected in wanted.items():
        found = getattr(value, field)
        if found != expected:
            shown = found if isinstance(found, type(expected)) else describe(found)
            raise ValueError(f"{name}.{field}: {shown} found, the placement has {expected}")


def job_shape(config: AgentConfig, placement: Placement, top_k: int) -> JobShape:
    """What has to be equal on all ranks."""
    return JobShape(
        num_layers=placement.num_layers,
        num_logical_experts=placement.num_logical_experts,
        num_slots=placement.num_slots,
        ep_size=placement.topology.ep_size,
        num_nodes=placement.topology.num_nodes,
        top_k=top_k,
        shared_counts=config.shared_counts,
        model=config.model,
    )


def connect(config: AgentConfig) -> DealerLink | None:
    """The rank's socket, None without a rebalancer. ValueError or OSError for a bad address or key file."""
    if not config.rebalancer:
        return None
    keys = load_client_keys(Path(config.keys)) if config.keys else None
    address = parse_address(config.rebalancer, field="agent.rebalancer")
    return DealerLink(address, keys=keys, max_message_bytes=DEFAULT_FRAME_LIMIT)


def agree_on_start(
    config: AgentConfig,
    job: JobShape,
    placement: Placement,
    rank: int,
    ep_group: ProcessGroup,
    link: DealerLink | None,
) -> tuple[StartedJob, ProcessGroup]:
    """The start that rank 0 decided and broadcast, and the group of votes. Compares first what has to be equal."""
    equal = {
        "protocol": PROTOCOL_VERSION,
        **{name: getattr(job, name) for name in job.__struct_fields__},
        **{f"agent.{name}": getattr(config, name) for name in _EQUAL},
        "digest of the start placement": f"{placement.digest():#x}",
    }
    compare_ranks(ep_group, "job start", equal, limit_s=config.vote_limit_s)
    group = new_cpu_group(ep_group, limit_s=config.vote_limit_s)
    data: bytes | None = None
    failure: Exception | None = None
    if rank == 0:
        try:
            # In shadow the job starts with its own placement, and nothing replaces it.
            asked = None if config.mode == "shadow" else link
            data = encode_started(ask_snapshot(config, job, placement, asked))
        except (TimeoutError, OSError) as error:
            failure = error
    with _naming("job start: broadcast of the start placement"):
        data = _broadcast(data, group)
    if failure is not None:
        raise failure
    if not data:
        raise TimeoutError("job start: rank 0 got no placement (see its message)")
    return decode_started(data), group


@contextmanager
def _naming(operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(f"{operation}: {' '.join(str(error).split())[:300]}") from error


def _broadcast(data: bytes | None, group: ProcessGroup) -> bytes:
    """Rank 0's bytes on all ranks; empty when rank 0 has none."""
    size = torch.tensor([len(data or b"")], dtype=torch.int64)
    torch_dist.broadcast(size, group=group, group_src=0)
    body = torch.zeros(int(size), dtype=torch.uint8)
    if data:
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(body):
        torch_dist.broadcast(body, group=group, group_src=0)
    return body.numpy().tobytes()


def ask_snapshot(
    config: AgentConfig, job: JobShape, placement: Placement, link: DealerLink | None
) -> StartedJob:
    limit_s = config.start_limit_s if link is not None else 0.001
    settings = JobStartConfig(
        time_limit_s=limit_s,
        resend_s=min(0.25, limit_s),
        required=config.require_rebalancer and config.mode != "shadow",
    )
    core = JobStartCore(job, placement, settings, secrets.randbits)
    out: list[Up] = core.begin(time.monotonic())
    while True:
        if link is not None:
            sent = [link.send(encode(message)) for message in out]
            link.socket.poll(20 if not all(sent) else 50)
            for frames in link.receive(16):
                _take_answer(core, frames)
        result = core.result(time.monotonic())
        if result is not None:
            if core.refused:
                logger.warning("job start: %s", core.refused)
            return result
        out = core.tick(time.monotonic())


def _take_answer(core: JobStartCore, frames: list[bytes]) -> None:
    try:
        core.receive(decode_down(frames[0]))
    except MessageError as error:
        logger.warning("job start: frame of the rebalancer refused: %s", error)
