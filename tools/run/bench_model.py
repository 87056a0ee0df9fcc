"""The model of the benches of migration and EP: router and EP layers over migrated weights, eager or as a graph."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from numpy.typing import NDArray
from torch import Tensor

from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.staging import layer_bytes
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.eplb.files.sglang import read_logical_count
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.output import RoutingOutput
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.simulated.source import LogitSource
from evenroute.routing.tables.tables import DispatchTables
from evenroute.tools.run.driver import MoeDriver
from evenroute.tools.run.moe_model import LogicalExperts, relative_error


@dataclass(frozen=True)
class ModelSizes:
    """A DeepSeek-like stack: sigmoid, 8 groups of which 4 are kept (none with fewer than 32 experts)."""

    num_layers: int
    num_experts: int
    num_slots: int
    top_k: int
    hidden: int
    intermediate: int
    staging_layers: int
    chunk_bytes: int
    exponent: float
    seed: int = 1
    dispatch: str = "dynamic"
    loads: Path | None = None  # the popularity follows this file instead of Zipf(exponent)
    verify: bool = False
    transfer_limit_s: float = 30.0

    @classmethod
    def of(cls, args: argparse.Namespace, num_slots: int, **more: Any) -> ModelSizes:
        """As a bench's flags say."""
        sizes = (args.layers, args.experts, num_slots, args.top_k, args.hidden, args.intermediate)
        chunk_bytes = int(args.chunk_mib * 2**20)
        return cls(*sizes, args.staging_layers, chunk_bytes, args.zipf_exponent, **more)


@dataclass(frozen=True)
class ModelGroups:
    """Process groups over all ranks: votes (CPU), the layers' collectives, the migration's transfers."""

    vote: torch_dist.ProcessGroup
    layer: torch_dist.ProcessGroup
    move: torch_dist.ProcessGroup

    @classmethod
    def make(cls, device: torch.device) -> ModelGroups:
        """Collective."""
        backend = "nccl" if device.type == "cuda" else "gloo"
        vote, layer, move = (torch_dist.new_group(backend=name) for name in ("gloo", backend, backend))
        assert vote is not None
        assert layer is not None
        assert move is not None
        return cls(vote, layer, move)


class BenchModel:
    """One rank's model: weights, tables, router, layers, mover, driver. Collective to make."""

    def __init__(
        self, sizes: ModelSizes, device: torch.device, groups: ModelGroups, *, load: bool = True
    ) -> None:
        """`load=False` leaves weights and tables to the mover's start (by the rank agent)."""
        self.sizes, self.device, self.vote_group = sizes, device, groups.vote
        self.rank, self.ep_size = torch_dist.get_rank(), torch_dist.get_world_size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.layer_group, self.move_group = groups.layer, groups.move
        self.topology = Topology(self.ep_size)
        start = Placement.initial(sizes.num_layers, sizes.num_experts, sizes.num_slots, self.topology)
        self.tables = DispatchTables(start, ep_rank=self.rank, device=device)
        self.counters = ExpertCounters(sizes.num_layers, sizes.num_experts, device=device)
        expert_groups = 8 if sizes.num_experts >= 32 else 1
        config = RouterConfig(
            sizes.num_experts,
            sizes.top_k,
            scoring="sigmoid",
            num_groups=expert_groups,
            topk_group=max(1, expert_groups // 2),
            routed_scaling_factor=2.5,
        )
        emit = ("weights", "physical_ids", "logical_ids")
        self.router = Router(config, self.tables, self.counters, dispatch=sizes.dispatch, emit=emit)
        self.source = LogitSource(
            "zipf" if sizes.loads is None else "trace",
            config,
            sizes.num_layers,
            sizes.seed,
            rank=self.rank,
            ep_size=self.ep_size,
            loads=None if sizes.loads is None else read_logical_count(sizes.loads),
            exponent=sizes.exponent,
            device=device,
        )
        local = start.num_local_slots
        self.experts = LogicalExperts(sizes.hidden, sizes.intermediate, device, self.dtype)
        self.tensors = [self.experts.empty(local) for _ in range(sizes.num_layers)]
        weights = ExpertWeights(self.tensors, local)
        self.layer_bytes = layer_bytes(weights.layers[0], local)
        self.expert_bytes = weights.layers[0].expert_bytes
        migration = MigrationConfig(
            staging_bytes=sizes.staging_layers * self.layer_bytes,
            chunk_bytes=sizes.chunk_bytes,
            transfer_limit_s=sizes.transfer_limit_s,
            verify=sizes.verify,
        )
        self.start = start
        self.mover = WeightMover(
            weights, self.tables, group=self.move_group, loader=self.experts.rows, config=migration
        )
        if load:
            self.mover.load(start)
        self.driver = MoeDriver(self.mover, start, self.vote_group, limit_s=60.0)
        self.exact = self._layers("exact")
        self.padded = self._layers("padded")

    def _layers(self, exchange: str) -> list[EpMoeLayer]:
        return [
            EpMoeLayer(SwiGluExperts(own["gate_up"], own["down"]), group=self.layer_group, exchange=exchange)
            for own in self.tensors
        ]

    def hidden(self, tokens: int, seed: int) -> Tensor:
        """`[T, H]` of this rank."""
        generator = torch.Generator(self.device).manual_seed(seed * 64 + self.rank)
        shape = (tokens, self.sizes.hidden)
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    def logits(self, tokens: int, step: int) -> Tensor:
        """`[L, T, E]` of this rank and step."""
        return torch.stack([self.source.logits(n, tokens, step) for n in range(self.sizes.num_layers)])

    def forward(
        self, layers: list[EpMoeLayer], hidden: Tensor, logits: Tensor
    ) -> tuple[Tensor, list[RoutingOutput]]:
        """All layers, each added to its input and normalised. Returns the last output and the routings."""
        routings = []
        for number, layer in enumerate(layers):
            routing = self.router(logits[number], number)
            hidden = torch.nn.functional.rms_norm(hidden + layer(hidden, routing), (hidden.shape[1],))
            routings.append(routing)
        return hidden, routings

    def check(self, layers: list[EpMoeLayer], layer: int, hidden: Tensor, logits: Tensor) -> float:
        """Relative error of one layer's output against logical experts in this process (its own tokens). Collective."""
        routing = self.router(logits[layer], layer, count=False)
        assert routing.logical_ids is not None
        wanted = self.experts.output(layer, hidden, routing.logical_ids, routing.weights)
        return float(relative_error(layers[layer](hidden, routing), wanted))

    def take_loads(self) -> NDArray[np.float64]:
        """Counts `[L, E]` of all ranks since the last take. Collective."""
        counts = self.counters.take().cpu()
        torch_dist.all_reduce(counts, group=self.vote_group)
        return counts.numpy().astype(np.float64)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class GraphStep:
    """The whole forward pass of `tokens` rows as one CUDA graph (eager on the CPU)."""

    def __init__(self, model: BenchModel, tokens: int, *, num_inputs: int = 4) -> None:
        self.model = model
        self.inputs = [model.logits(tokens, 1000 + i) for i in range(num_inputs)]
        self.hidden = model.hidden(tokens, 5)
        self.logits = self.inputs[0].clone()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output: Tensor | None = None
        if model.device.type != "cuda":
            return
        stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model.forward(model.padded, self.hidden, self.logits)
        torch.cuda.current_stream().wait_stream(stream)
        model.synchronize()
        torch_dist.barrier(group=model.vote_group)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's and the mover's watchdogs) go on querying events meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.output, _ = model.forward(model.padded, self.hidden, self.logits)

    def run(self, step: int) -> None:
        """One forward pass on this step's logits."""
        self.logits.copy_(self.inputs[step % len(self.inputs)])
        if self.graph is not None:
            self.graph.replay()
        else:
            self.output, _ = self.model.forward(self.model.padded, self.hidden, self.logits)
