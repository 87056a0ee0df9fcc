"""Any PyTorch MoE: its gate and its experts replaced by routed, expert-parallel ones; one call per step.

    adapted = adapt(model, group=group, agent=AgentConfig(rebalancer="tcp://..."), num_redundant_experts=4)
    for batch in batches:                  # on every rank of the group, idle ones too (with an empty batch)
        adapted.step(num_tokens)
        model(**batch)
    adapted.close()

A block is a module with two children: `gate`, which is called with hidden states and returns (logits [T, E],
weights [T, K], ids [T, K]), and `experts`, which is called with (hidden [T, H], ids, weights) and holds
`gate_up_proj [E, 2 I, H]` and `down_proj [E, H, I]` (SwiGLU). That is how transformers 5 writes its MoE models, and
what an engine of one's own can follow. Whatever else is in the block (shared experts, their gate) is not touched.

Before anything is replaced, every gate is asked the same random question as the router that will replace it; another
answer is refused, with the layer and the difference: a wrong scoring, renormalisation or scaling can't go unnoticed.

What it can't do: experts that are quantised, have biases or another activation (refused, with what was found;
register such tensors with `evenroute.dist.weights.expert_weights.ExpertWeights` and bring an `ExpertCompute`); gates
inside the block's own forward (call `Router` there, as examples/minimal_engine.py does); padding inside a batch (only
rows after the last token can be left out, see `Router`); training (no gradient flows through the exchange); models of
which one rank can't hold one layer's experts at load time (load your own shards and use the parts directly).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from evenroute.dist.config import AgentConfig
from evenroute.dist.engines.ep_layer import EpMoeLayer
from evenroute.dist.engines.experts import SwiGluExperts
from evenroute.dist.engines.gate_probe import (
    REMEDY,
    WEIGHT_NAMES,
    MoeBlock,
    block_problem,
    check_gate,
    selection_bias,
)
from evenroute.dist.rank.agent import RankAgent, StepResult
from evenroute.dist.weights.expert_weights import ExpertWeights
from evenroute.dist.weights.weight_mover import MigrationConfig, WeightMover
from evenroute.eplb._checks import (
    as_integer,
    describe,
    is_number,
    require_choice,
    require_instance,
    require_text,
)
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

__all__ = ["AdaptedModel", "MoeBlock", "adapt", "check_gate", "find_blocks", "router_config_of"]

_EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass
class _Routed:
    """What `EpMoeLayer` reads of a routing output."""

    weights: Tensor
    physical_ids: Tensor
    routed_scaling_factor: float = 1.0
    scaling_applied: bool = True  # a gate's weights are what the experts' outputs are multiplied by


def find_blocks(model: nn.Module) -> list[MoeBlock]:
    """The MoE blocks of a model in the order of its modules.

    Raises:
        ValueError: no block, or one that is not supported; names the class found, what is wrong, and the remedy.
    """
    blocks, near, other = [], [], ""
    for name, module in model.named_modules():
        if not hasattr(module, "experts"):
            continue
        block = MoeBlock(name or type(model).__name__, module)
        if not hasattr(module, "gate"):
            children = ", ".join(child for child, _ in module.named_children())
            other = other or f"; nearest: {block.where} with {children}"
            continue
        problem = block_problem(block.module)
        if problem:
            near.append(f"{block.where} {problem}")
        blocks.append(block)
    if near:
        raise ValueError(f"model {type(model).__name__}: {near[0]}; {REMEDY}")
    if not blocks:
        raise ValueError(
            f"model {type(model).__name__}: found no MoE block, expected a module with `gate` and `experts` "
            f"(stacked {' and '.join(WEIGHT_NAMES)}){other}; {REMEDY}"
        )
    return blocks


def router_config_of(model: Any) -> RouterConfig:
    """The routing form of a transformers model, from its `config` and its first gate.

    Raises:
        ValueError: the configuration lacks a field; names the class and the fields looked for.
    """
    config = getattr(model, "config", None)
    where = f"{type(model).__name__}.config ({type(config).__name__})"
    experts = next((getattr(config, name) for name in _EXPERT_FIELDS if getattr(config, name, None)), None)
    top_k = getattr(config, "num_experts_per_tok", None)
    if experts is None or top_k is None:
        raise ValueError(
            f"{where}: found no {' or '.join(_EXPERT_FIELDS)} with num_experts_per_tok; give config="
        )
    has_bias = selection_bias(find_blocks(model)[0].module) is not None
    scoring = getattr(config, "scoring_func", None) or ("sigmoid" if has_bias else "softmax")
    groups = getattr(config, "n_group", None) or 1
    kept_groups = getattr(config, "topk_group", None) or 1
    method = getattr(config, "topk_method", None)
    factor = getattr(config, "routed_scaling_factor", None) or 1.0
    if not is_number(factor):
        raise ValueError(f"{where}: routed_scaling_factor must be a finite number, found {describe(factor)}")
    return RouterConfig(
        num_experts=as_integer(f"{where}: number of experts", experts),
        top_k=as_integer(f"{where}: num_experts_per_tok", top_k),
        scoring=scoring,
        num_groups=as_integer(f"{where}: n_group", groups),
        topk_group=as_integer(f"{where}: topk_group", kept_groups),
        renormalize=bool(getattr(config, "norm_topk_prob", True)),
        routed_scaling_factor=float(factor),
        topk_method="greedy" if method == "group_limited_greedy" else "noaux_tc",
    )


class RoutedGate(nn.Module):
    """Stands for a block's gate: the same logits, routed to physical experts and counted in one launch."""

    def __init__(self, gate: nn.Module, router: Router, layer: int) -> None:
        super().__init__()
        self.gate, self.router, self.layer = gate, router, layer
        self.agent: RankAgent | None = None  # records what was routed, once it has started

    def forward(self, hidden: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """``hidden [..., H]`` -> logits ``[T, E]``, weights ``[T, K]`` fp32, physical ids ``[T, K]`` int32."""
        logits = self.gate(hidden)[0] if bias is None else self.gate(hidden, bias)[0]
        own = getattr(self.gate, "e_score_correction_bias", None) if bias is None else bias
        routed = self.router(logits, self.layer, bias=own)
        if self.agent is not None:
            self.agent.record(self.layer, routed)
        return logits, routed.weights, routed.physical_ids


class EpExperts(nn.Module):
    """Stands for a block's experts: this rank's slots, the others behind an exchange."""

    def __init__(self, layer: EpMoeLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, physical_ids: Tensor, weights: Tensor) -> Tensor:
        """``hidden [T, H]``, ids and weights ``[T, K]`` -> ``[T, H]``; all ranks of the group call it together."""
        return self.layer(hidden, _Routed(weights, physical_ids))


class AdaptedModel:
    """A model whose MoE blocks are routed by evenroute; made by `adapt`."""

    def __init__(
        self, agent: RankAgent, router: Router, mover: WeightMover, blocks: Sequence[MoeBlock]
    ) -> None:
        self.agent, self.router, self.mover, self.blocks = agent, router, mover, list(blocks)

    def step(self, num_tokens: int | None = None, *, count: bool = True) -> StepResult:
        """A boundary, on every rank equally often; with ``num_tokens`` also a pass: `RankAgent.step`."""
        return self.agent.step(num_tokens, count=count)

    def begin_pass(self, num_tokens: int, *, count: bool = True) -> None:
        """A pass of ``num_tokens`` rows, where they are known only after the boundary. See `RankAgent.begin_pass`."""
        self.agent.begin_pass(num_tokens, count=count)

    def record_inputs(self, token_ids: Tensor | None = None, positions: Tensor | None = None) -> None:
        """Vocabulary ids and positions of this pass's rows, for recordings of tokens. See `RankAgent.record_inputs`."""
        self.agent.record_inputs(token_ids, positions)

    def close(self) -> None:
        """Hand in the last counts and end the threads."""
        self.agent.close()
        self.mover.close()

    def __repr__(self) -> str:
        return f"<AdaptedModel {len(self.blocks)} MoE blocks, {self.agent!r}>"

    def __enter__(self) -> AdaptedModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _take_local_slots(block: MoeBlock, placement: Placement, layer: int, rank: int) -> dict[str, Tensor]:
    """This rank's slots of the layer as new tensors; the block's own are freed."""
    first = rank * placement.num_local_slots
    wanted = placement.physical_to_logical[layer, first : first + placement.num_local_slots]
    local: dict[str, Tensor] = {}
    for name in WEIGHT_NAMES:
        whole = getattr(block.module.experts, name)
        index = torch.from_numpy(wanted.copy()).long().to(whole.device)
        local[name] = whole.detach().index_select(0, index)
    return local


def _sub_group(group: ProcessGroup, backend: str | None = None) -> ProcessGroup:
    created = torch_dist.new_group(ranks=torch_dist.get_process_group_ranks(group), backend=backend)
    assert isinstance(created, ProcessGroup)
    return created


def _require_or_none(name: str, value: Any, kind: type[Any]) -> None:
    """As `require_instance`; None leaves the argument out."""
    if value is not None:
        require_instance(name, value, kind)


def adapt(
    model: nn.Module,
    *,
    group: ProcessGroup,
    agent: AgentConfig,
    config: RouterConfig | None = None,
    num_redundant_experts: int = 0,
    num_nodes: int = 1,
    placement: Placement | None = None,
    tokens: str = "own",
    dispatch: str = "auto",
    blocks: Sequence[MoeBlock] | None = None,
    migration: MigrationConfig | None = None,
) -> AdaptedModel:
    """Replace gate and experts of every MoE block; every rank of ``group`` calls it with the same model and arguments.

    Args:
        model: with the same weights on all ranks; changed in place, its experts' full tensors are freed.
        group: the EP ranks, in EP rank order; NCCL for a model on CUDA, gloo for one on the CPU.
        agent: the rebalancer's address and the agent's settings; ``top_k`` is set from ``config``.
        config: the routing form; default: what `router_config_of` reads from a transformers model.
        num_redundant_experts: slots beyond one an expert (``--ep-num-redundant-experts``).
        placement: start placement (``--init-expert-location``); default: identity with round-robin redundancy.
        tokens: "own" (each rank has its own rows) or "shared" (all ranks have the same rows, outputs are summed).
        dispatch: see `Router`.
        blocks: default: `find_blocks`.
        migration: limits of the weights' transfer.

    Raises:
        ValueError: no MoE block, one that can't be taken, a gate that answers otherwise than the router would, numbers
            that do not divide; before anything is changed.
    """
    require_instance("model", model, nn.Module)
    require_instance("group", group, ProcessGroup)
    require_instance("agent", agent, AgentConfig)
    _require_or_none("config", config, RouterConfig)
    _require_or_none("placement", placement, Placement)
    _require_or_none("migration", migration, MigrationConfig)
    _require_or_none("blocks", blocks, Sequence)
    num_redundant_experts = as_integer("num_redundant_experts", num_redundant_experts, 0)
    num_nodes = as_integer("num_nodes", num_nodes, 1)
    require_choice("tokens", tokens, ("own", "shared"))
    require_text("dispatch", dispatch)
    blocks = find_blocks(model) if blocks is None else list(blocks)
    if not blocks:
        raise ValueError("blocks must hold at least one MoeBlock, found none")
    for number, block in enumerate(blocks):
        require_instance(f"blocks: {number}", block, MoeBlock)
    config = router_config_of(model) if config is None else config
    for block in blocks:
        check_gate(block, config)
    topology = Topology(torch_dist.get_world_size(group), num_nodes)
    slots = config.num_experts + num_redundant_experts
    if placement is None:
        placement = Placement.initial(len(blocks), config.num_experts, slots, topology)
    found = (placement.num_layers, placement.num_logical_experts, placement.topology.ep_size)
    if found != (len(blocks), config.num_experts, topology.ep_size):
        raise ValueError(
            f"placement: found (layers, experts, ranks) {found}, the model has "
            f"{(len(blocks), config.num_experts, topology.ep_size)}"
        )
    rank = torch_dist.get_rank(group)
    device = blocks[0].module.experts.gate_up_proj.device
    tables = DispatchTables(placement, ep_rank=rank, device=device)
    counters = ExpertCounters(len(blocks), config.num_experts, device=device)
    router = Router(config, tables, counters, tokens=tokens, dispatch=dispatch)
    layers = []
    for number, block in enumerate(blocks):
        local = _take_local_slots(block, placement, number, rank)
        layers.append(local)
        experts = SwiGluExperts(local["gate_up_proj"], local["down_proj"])
        block.module.experts = EpExperts(EpMoeLayer(experts, group=group, tokens=tokens))
        block.module.gate = RoutedGate(block.module.gate, router, number)
    weights = ExpertWeights(layers, placement.num_local_slots)
    mover = WeightMover(weights, tables, group=_sub_group(group), resident=placement, config=migration)
    settings = {**vars(agent), "top_k": config.top_k, "shared_counts": tokens == "shared"}
    started = RankAgent.start(
        AgentConfig(**settings),
        placement=placement,
        tables=tables,
        counters=counters,
        ep_group=_sub_group(group, "gloo"),
        mover=mover,
    )
    for block in blocks:
        block.module.gate.agent = started
    return AdaptedModel(started, router, mover, blocks)
