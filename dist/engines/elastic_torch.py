"""Any PyTorch MoE in a job whose ranks come and go; started by `evenroute launch`, see `engines.torch` for the models.

adapted = adapt_elastic(model, config=ElasticConfig(AgentConfig(rebalancer="tcp://...")), slots_per_rank=8)
while work:
    with adapted.step(num_tokens) as step:         # on every rank equally often, idle ones too
        outputs[step.membership, step.step] = model(batch)
    for one in adapted.outcomes():                 # one.done: deliver; else compute those rows again
        ...
adapted.finish()
adapted.close()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from evenroute.dist.elastic.agent import ElasticAgent
from evenroute.dist.elastic.config import ElasticConfig
from evenroute.dist.elastic.source import ExpertSource
from evenroute.dist.elastic.state import ElasticSeat, ElasticStep, StepOutcome
from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts
from evenroute.dist.engines.gate_probe import WEIGHT_NAMES, MoeBlock, check_gate
from evenroute.dist.engines.torch import EpExperts, RoutedGate, find_blocks, router_config_of
from evenroute.dist.weights.expert_weights import LOADER_CALL, ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig
from evenroute.eplb._checks import require_callable, require_instance, require_int
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig


class HostExperts:
    """An `ExpertSource` of a model's own experts, kept in host memory: one copy of all of them a process."""

    def __init__(self, blocks: Sequence[MoeBlock]) -> None:
        self._layers = [
            {name: getattr(block.module.experts, name).detach().cpu() for name in WEIGHT_NAMES}
            for block in blocks
        ]

    def __call__(self, layer: int, expert: int) -> Mapping[str, Tensor]:
        """See `ExpertSource`."""
        return {name: tensor[expert] for name, tensor in self._layers[layer].items()}


class ElasticModel:
    """A model whose MoE blocks are routed by evenroute on the ranks there are; made by `adapt_elastic`."""

    agent: ElasticAgent

    def __init__(
        self, config: RouterConfig, blocks: Sequence[MoeBlock], slots_per_rank: int, dispatch: str
    ) -> None:
        self.blocks = list(blocks)
        self._config, self._dispatch = config, dispatch
        self.counters = ExpertCounters(
            len(self.blocks), config.num_experts, device=self._whole(0)[WEIGHT_NAMES[0]].device
        )
        self._local = [
            {
                name: torch.empty((slots_per_rank, *whole.shape[1:]), dtype=whole.dtype, device=whole.device)
                for name, whole in self._whole(layer).items()
            }
            for layer in range(len(self.blocks))
        ]
        self.weights = ExpertWeights(self._local, slots_per_rank)
        self._gates = [block.module.gate for block in self.blocks]

    def _whole(self, layer: int) -> dict[str, Tensor]:
        experts = self.blocks[layer].module.experts
        return {name: getattr(experts, name) for name in WEIGHT_NAMES}

    def rewire(self, seat: ElasticSeat) -> None:
        """Gates and experts of this membership."""
        router = Router(self._config, seat.tables, self.counters, dispatch=self._dispatch)
        for number, (block, local) in enumerate(zip(self.blocks, self._local, strict=True)):
            experts = SwiGluExperts(*(local[name] for name in WEIGHT_NAMES))
            block.module.experts = EpExperts(EpMoeLayer(experts, group=seat.group))
            block.module.gate = RoutedGate(self._gates[number], router, number)

    def step(
        self, num_tokens: int | None = None, *, count: bool = True
    ) -> AbstractContextManager[ElasticStep]:
        """See `ElasticAgent.step`."""
        return self.agent.step(num_tokens, count=count)

    def outcomes(self) -> list[StepOutcome]:
        """See `ElasticAgent.outcomes`."""
        return self.agent.outcomes()

    def finish(self) -> None:
        """See `ElasticAgent.finish`."""
        self.agent.finish()

    def close(self) -> None:
        """Hand in the last counts and end the threads."""
        self.agent.close()

    def __repr__(self) -> str:
        return f"<ElasticModel {len(self.blocks)} MoE blocks, {self.agent!r}>"


def adapt_elastic(
    model: nn.Module,
    *,
    config: ElasticConfig,
    slots_per_rank: int,
    source: ExpertSource | None = None,
    router: RouterConfig | None = None,
    dispatch: str = "auto",
    blocks: Sequence[MoeBlock] | None = None,
    migration: MigrationConfig | None = None,
) -> ElasticModel:
    """Replace gate and experts of every MoE block; every process of the job calls it, joining ones too.

    Args:
        model: with the same weights in all processes; changed in place, its experts' full tensors are let go.
        config: the rebalancer's address and the limits.
        slots_per_rank: slots of each process, at all times; processes x slots hold at least one of each expert.
        source: where experts come from that nobody holds; default: the model's own, kept in host memory.
        router: the routing form; default: what `router_config_of` reads from a transformers model.
        dispatch, blocks, migration: as of `adapt`.

    Raises:
        ValueError: no MoE block, one that can't be taken, a gate that answers otherwise than the router would; before
            anything is changed. As `ElasticAgent.start` besides.
    """
    require_instance("model", model, nn.Module)
    require_instance("config", config, ElasticConfig)
    require_int("slots_per_rank", slots_per_rank, 1, 1 << 20)
    if source is not None:
        require_callable("source", source, LOADER_CALL)
    if router is not None:
        require_instance("router", router, RouterConfig)
    blocks = find_blocks(model) if blocks is None else list(blocks)
    router = router_config_of(model) if router is None else router
    for block in blocks:
        check_gate(block, router)
    if slots_per_rank > router.num_experts:
        raise ValueError(
            f"slots_per_rank: {slots_per_rank} found, expected at most the {router.num_experts} experts"
        )
    made = ElasticModel(router, blocks, slots_per_rank, dispatch)
    made.agent = ElasticAgent.start(
        config,
        placement=None,
        top_k=router.top_k,
        weights=made.weights,
        counters=made.counters,
        source=HostExperts(blocks) if source is None else source,
        rewire=made.rewire,
        migration=migration,
    )
    return made
