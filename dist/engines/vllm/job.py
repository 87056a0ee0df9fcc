"""One model of vLLM's on one rank, run by evenroute: made once vLLM has loaded it, called around each pass."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor

from evenroute.dist.engines.plugin import PluginSettings, refuse, start_placement
from evenroute.dist.engines.vllm.choice import choose, given_choice
from evenroute.dist.engines.vllm.limits import device_problem, layer_problem
from evenroute.dist.engines.vllm.routes import EngineRoute, LayerRoute, ModelRoutes
from evenroute.dist.engines.vllm.seams import ENGINE
from evenroute.dist.engines.vllm.weights import expert_weights
from evenroute.dist.rank.agent import RankAgent, StepResult
from evenroute.dist.weights.weight_mover import WeightMover
from evenroute.eplb.placement.placement import Placement, PlacementRow
from evenroute.eplb.placement.shares import logical_to_physical
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

logger = logging.getLogger("vllm.evenroute")  # vLLM's own handlers show it


class VllmJob:
    """Placement, tables, routers, mover and agent of a model.

    The rows that a pass counts are vLLM's own tensor on the device, which it fills before each pass: 0 before a dummy
    one. So a captured graph counts what is real, without a flag or a further launch.
    """

    def __init__(
        self, settings: PluginSettings, config: Any, state: Any, model: Any, model_config: Any
    ) -> None:
        from vllm.distributed.parallel_state import get_ep_group, get_eplb_group, get_node_count

        self.shadow = settings.agent.mode == "shadow"
        ep = get_ep_group()
        self._state = state.model_states[model_config.compute_hash()]
        rows = self._state.physical_to_logical_map
        self.device = rows.device
        nodes = settings.num_nodes or get_node_count()
        placement = start_placement(ENGINE, rows, model.num_logical_experts, ep.world_size, nodes)
        layers = list(model.moe_layers)
        shared = self._check(layers, placement, ep.rank_in_group, config.parallel_config)
        tables = DispatchTables(placement, ep_rank=ep.rank_in_group, device=self.device)
        counters = ExpertCounters(len(layers), placement.num_logical_experts, device=self.device)
        self.routes = self._make_routes(settings, config, layers, tables, counters, shared)
        top_k = layers[0].router.top_k
        agent = settings.agent_config(
            model=str(model_config.model).rstrip("/").rpartition("/")[2], top_k=top_k, shared_counts=shared
        )
        torch_dist.barrier(group=ep.cpu_group)  # ranks load at their own pace; what follows has limits
        mover = None
        if not self.shadow:
            own = get_eplb_group()
            mover = WeightMover(
                expert_weights(layers, model.expert_weights, placement.num_local_slots),
                tables,
                group=own.cpu_group if self.device.type == "cpu" else own.device_group,
                resident=placement,
                config=settings.migration,
            )
        self.agent = RankAgent.start(
            agent,
            placement=placement,
            tables=tables,
            counters=counters,
            ep_group=ep.cpu_group,
            mover=mover,
            on_commit=None if self.shadow else self._write_maps,
        )
        for number, layer in enumerate(layers):
            layer.router._evenroute = EngineRoute(self.routes, number, top_k)
        self._passed_rows = 0  # of the pass under way
        self.agent.step()
        if ep.rank_in_group == 0:
            self._announce(settings, placement)

    def _check(self, layers: list[Any], placement: Placement, rank: int, parallel: Any) -> bool:
        """Refuse what can't be; whether all ranks route the same rows."""
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        problem = device_problem(self.device)
        if problem:
            refuse(ENGINE, problem)
        for number, layer in enumerate(layers):
            problem = layer_problem(layer, BaseRouter, rank, placement.num_local_slots)
            if problem:
                refuse(ENGINE, f"MoE layer {number} ({getattr(layer, 'layer_name', '?')}): {problem}")
        split = {bool(layer.moe_config.is_sequence_parallel) for layer in layers}
        if parallel.data_parallel_size > 1 and parallel.tensor_parallel_size > 1 and split != {True}:
            refuse(
                ENGINE,
                "tensor-parallel ranks of a data-parallel job share rows: choose another --all2all-backend",
            )
        if len({layer.router.top_k for layer in layers}) != 1:
            refuse(ENGINE, "MoE layers choose different numbers of experts a token")
        return bool(parallel.data_parallel_size == 1 and split == {False})

    def _make_routes(
        self,
        settings: PluginSettings,
        config: Any,
        layers: list[Any],
        tables: DispatchTables,
        counters: ExpertCounters,
        shared: bool,
    ) -> ModelRoutes:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        experts, top_k = tables.num_logical_experts, layers[0].router.top_k
        recording = bool(settings.agent.record_dir)
        emit: tuple[str, ...] = ("weights", "physical_ids")
        if recording or self.shadow or layers[0].router.capture_fn or _captures(config):
            emit = (*emit, "logical_ids")
        made: dict[RouterConfig, Router] = {}
        routes = []
        for layer in layers:
            if self.shadow or settings.choice == "engine":
                choice = given_choice(experts, top_k, "vLLM chooses")
            else:
                choice = choose(layer.router, experts, layer.moe_config.hidden_dim, self.device)
            if choice.config not in made:
                made[choice.config] = Router(
                    choice.config, tables, counters, tokens="shared" if shared else "own", emit=emit
                )
            routes.append(LayerRoute(made[choice.config], choice))
        kept = None
        if recording:
            most = config.scheduler_config.max_num_batched_tokens
            kept = torch.full((len(layers), most, top_k), -1, dtype=torch.int32, device=self.device)
        sequence = bool(layers[0].moe_config.is_sequence_parallel)
        return ModelRoutes(
            routes,
            valid=self._state.num_unpadded_tokens_tensors[0],
            chunk_rank=get_tensor_model_parallel_rank() if sequence else None,
            kept=kept,
        )

    def _announce(self, settings: PluginSettings, placement: Placement) -> None:
        own = [not route.choice.reason for route in self.routes.layers]
        reasons = sorted({route.choice.reason for route in self.routes.layers if route.choice.reason})
        decides = (
            "counts in shadow mode, vLLM's EPLB decides"
            if self.shadow
            else "decides, vLLM's EPLB does nothing"
        )
        logger.info(
            "EPLB: evenroute %s: rebalancer %s, run %x, %d MoE layers, %d experts in %d slots on %d ranks (%d nodes)",
            decides,
            settings.agent.rebalancer,
            self.agent.run,
            placement.num_layers,
            placement.num_logical_experts,
            placement.num_slots,
            placement.topology.ep_size,
            placement.topology.num_nodes,
        )
        if not all(own):
            logger.info(
                "EPLB: in %d of %d layers vLLM's router chooses the experts, evenroute their replicas: %s",
                len(own) - sum(own),
                len(own),
                "; ".join(reasons),
            )

    # ------------------------------------------------------------------------------------ passes

    def begin_pass(self, rows: int) -> None:
        """A pass of ``rows`` real rows begins; vLLM has written the number to the device."""
        self._passed_rows = rows
        if self.routes.chunk_rank is None:  # else each rank has a part that only the layers know
            self.agent.begin_pass(rows)

    def dummy_pass(self) -> None:
        """A pass of which nothing counts begins."""
        self._passed_rows = 0
        self.routes.valid.fill_(0)

    def end_pass(self) -> StepResult:
        """The boundary behind each pass, real or dummy, on every rank."""
        if self.routes.kept is not None and self._passed_rows:
            for layer, ids in enumerate(self.routes.kept):
                self.agent.record(layer, ids[: self._passed_rows])
        self._passed_rows = 0
        return self.agent.step()

    def _write_maps(self, layer: int, row: PlacementRow) -> None:
        """vLLM's own maps of a layer become those of `row`."""
        state = self._state
        experts, width = state.logical_to_physical_map.shape[1:]
        counts = np.bincount(row.slots, minlength=experts)
        (slots,) = logical_to_physical(row.slots[None], counts[None], width)
        maps = {
            "physical_to_logical_map": row.slots.astype(np.int64),
            "logical_to_physical_map": slots,
            "logical_replica_count": counts.astype(np.int64),
        }
        for name, values in maps.items():
            _copy_to(getattr(state, name)[layer], torch.from_numpy(values))


def _copy_to(target: Tensor, values: Tensor) -> None:
    """Onto the device in order with the forward stream, which is not waited for."""
    source = values.to(target.dtype)
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def _captures(config: Any) -> bool:
    """Whether vLLM returns the routed experts of requests, which are logical ids."""
    places = (config.model_config, getattr(config, "aux_output_config", None))
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)
