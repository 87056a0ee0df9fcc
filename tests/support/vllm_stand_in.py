"""Stand-ins of vLLM's EPLB policy interface in its three forms, written from its documented behaviour."""

from __future__ import annotations

import sys
import types
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class MapsPolicy(ABC):
    """First form: three maps."""

    @classmethod
    @abstractmethod
    def rebalance_experts(
        cls,
        weight: Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class MapPolicy(ABC):
    """Second form: the physical-to-logical map alone."""

    @classmethod
    @abstractmethod
    def rebalance_experts(
        cls,
        weight: Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class EplbTopology:
    num_groups: int
    num_nodes: int
    num_ranks: int


@dataclass(frozen=True)
class EplbRebalanceContext:
    load_window_cpu: Tensor
    physical_to_logical_map_cpu: Tensor
    topology: EplbTopology
    num_replicas: int
    cpu_group: Any = None


@dataclass(frozen=True)
class EplbPlan:
    physical_to_logical_map: Tensor


class ContextPolicy(ABC):
    """Third form: one context in, one plan out."""

    def create_state(self, num_moe_layers: int) -> object:
        return object()

    @abstractmethod
    def plan_rebalance(self, context: EplbRebalanceContext, policy_state: object) -> EplbPlan:
        raise NotImplementedError


class UnknownPolicy(ABC):
    @abstractmethod
    def rearrange(self, loads: Tensor) -> Tensor:
        raise NotImplementedError


def install(abstract: type, registered: Any) -> dict[str, Any]:
    """Puts a `vllm.distributed.eplb.policy` with this interface into sys.modules; returns its table of policies."""
    names = ("vllm", "vllm.distributed", "vllm.distributed.eplb", "vllm.distributed.eplb.policy")
    modules = {name: types.ModuleType(name) for name in names}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
        sys.modules[name] = module
    policy: Any = modules[names[-1]]
    policy.AbstractEplbPolicy = abstract
    policy.EPLB_POLICIES = {"default": registered}
    table: dict[str, Any] = policy.EPLB_POLICIES
    return table


def uninstall() -> None:
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        del sys.modules[name]


def engine_rearranges(
    policy: Any, loads: Tensor, old: Tensor, num_groups: int, num_nodes: int, num_ranks: int
) -> Tensor:
    """What the engine does with a policy of the first two forms: calls it, checks shapes, takes the map."""
    result = policy.rebalance_experts(loads, old.shape[1], num_groups, num_nodes, num_ranks, old)
    if isinstance(result, tuple):
        physical_to_logical, logical_to_physical, replica_count = result
        layers, experts = loads.shape
        assert logical_to_physical.shape[:2] == (layers, experts)
        assert torch.equal((logical_to_physical >= 0).sum(-1), replica_count)
        result = physical_to_logical
    assert isinstance(result, Tensor)
    assert result.shape == old.shape
    assert result.dtype == torch.int64
    assert result.device == loads.device
    return result
