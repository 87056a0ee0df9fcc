"""vLLM: this project's planner behind its EPLB policy interface. `evenroute.dist.engines.vllm` does all of it instead.

vLLM counts, decides when, moves the weights and switches; only the plan is ours. It keeps its policies in the dict
`vllm.distributed.eplb.policy.EPLB_POLICIES`; `register()` puts ours there under the name that the engine is
configured with. Every worker process must call it before it builds its EPLB state, which vLLM's plugins are for:

    # pyproject.toml of your deployment
    [project.entry-points."vllm.general_plugins"]
    evenroute = "evenroute.dist.engines.vllm_policy:register"

    vllm serve MODEL --enable-expert-parallel --enable-eplb --eplb-config '{"num_redundant_experts": 32}'

The interface had three forms so far, distinguished by what the engine's own `AbstractEplbPolicy` declares:
"maps": a classmethod that returns (physical_to_logical, logical_to_physical, replica counts); "map": the same, but
returning physical_to_logical alone; "context": a method over one context object that returns a plan. Another form is
refused.

What it can't do: uneven shares (vLLM's router spreads an expert's tokens evenly over its replicas), a switch agreed
between ranks at one step with our protocol (vLLM has its own), our history store, alerts and dashboard (they belong to
the rebalancer, which is not running here).
"""

from __future__ import annotations

import inspect
import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evenroute.dist.engines.loads import host_loads, host_rows
from evenroute.eplb._checks import as_integer, describe, require_choice, require_text
from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.shares import count_replicas, logical_to_physical
from evenroute.eplb.placement.topology import Topology
from evenroute.eplb.planner.plan import plan_placement

FORMS = ("maps", "map", "context")
POLICIES = ("full", "incremental")  # those with even shares
logger = logging.getLogger(__name__)


class ExpertMaps(NamedTuple):
    """What the policy interface's first form returns: int64 tensors on the loads' device.

    ``physical_to_logical [L, P]``, ``logical_to_physical [L, E, P - E + 1]`` (-1 padded), ``replica_count [L, E]``.
    """

    physical_to_logical: Tensor
    logical_to_physical: Tensor
    replica_count: Tensor


def _current(
    old: Tensor | None, num_layers: int, num_experts: int, num_slots: int, topology: Topology
) -> Placement | None:
    """The placement in use; None (from scratch) if vLLM gave none or one that is not a placement by our rules."""
    if old is None:
        return None
    rows = host_rows("old_global_expert_indices", old, num_layers)
    if rows.shape[1] != num_slots:
        logger.info("EPLB: %d slots in use, %d planned: planning from scratch", rows.shape[1], num_slots)
        return None
    try:
        return Placement(rows, num_experts, topology)
    except ValueError as error:  # vLLM's own policy may put an expert twice on a rank
        logger.warning("EPLB: the placement in use is not taken as a start: %s", error)
        return None


def plan_maps(
    weight: Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_ranks: int,
    old_global_expert_indices: Tensor | None = None,
    *,
    policy: str = "full",
) -> ExpertMaps:
    """Plan with vLLM's arguments.

    Args:
        weight: ``[L, E]`` loads.
        num_replicas: physical experts P.
        num_groups, num_nodes, num_ranks: groups are kept on a node where both are above 1 and divide.
        old_global_expert_indices: ``[L, P]`` physical_to_logical in use; experts that stay keep rank and slot.
        policy: "full" plans anew (hierarchical or global), "incremental" moves few experts from what is in use.

    Raises:
        ValueError: numbers that do not divide (with the nearest valid ones), a NaN, infinite or negative load, an
            argument of another kind or shape.
    """
    num_replicas, num_groups = as_integer("num_replicas", num_replicas), as_integer("num_groups", num_groups)
    num_nodes, num_ranks = as_integer("num_nodes", num_nodes), as_integer("num_ranks", num_ranks)
    loads = host_loads("weight", weight)
    num_layers, num_experts = loads.shape
    hierarchical = num_groups > 1 and num_nodes > 1 and num_groups % num_nodes == 0
    topology = Topology(num_ranks, num_nodes)
    plan = plan_placement(
        loads,
        topology=topology,
        num_slots=num_replicas,
        num_groups=num_groups if hierarchical else 1,
        current=_current(old_global_expert_indices, num_layers, num_experts, num_replicas, topology),
        policy=policy if policy == "incremental" else "hierarchical" if hierarchical else "global",
    )
    assert plan.placement.shares is None, "vLLM spreads tokens evenly over replicas"
    logger.info("EPLB: %s; %d slots move", plan.reason, int(plan.moves.sum()))
    rows = plan.placement.physical_to_logical.astype(np.int64)
    counts = count_replicas(rows, num_experts).astype(np.int64)
    arrays = (rows, logical_to_physical(rows, counts, num_replicas - num_experts + 1), counts)
    return ExpertMaps(*(torch.from_numpy(array).to(weight.device) for array in arrays))


def interface_form(abstract: type) -> str:
    """Which form of the interface ("maps", "map" or "context") an engine's abstract policy class declares.

    Raises:
        ValueError: none of them; the message names the class and its methods.
    """
    method = getattr(abstract, "plan_rebalance", None) or getattr(abstract, "rebalance_experts", None)
    if callable(method):
        signature = inspect.signature(method)
        names = set(signature.parameters)
        if {"context", "policy_state"} <= names:
            return "context"
        if {"weight", "num_replicas", "num_groups", "num_nodes", "num_ranks"} <= names:
            return "maps" if "tuple" in str(signature.return_annotation).lower() else "map"
    methods = sorted(name for name in vars(abstract) if not name.startswith("_"))
    raise ValueError(
        f"{abstract.__module__}.{abstract.__qualname__}: found methods {methods}, expected rebalance_experts or "
        "plan_rebalance of a vLLM that evenroute knows; use vLLM's own policy, or report this version"
    )


def build_policy(abstract: type, *, plan_type: type | None = None, policy: str = "full") -> type:
    """A policy class for this engine: a subclass of its own ``abstract`` in the form that it declares.

    Args:
        abstract: the engine's `AbstractEplbPolicy`.
        plan_type: the engine's `EplbPlan`; needed for the "context" form.
        policy: see `plan_maps`.

    Raises:
        ValueError: an unknown form, or "context" without ``plan_type``.
    """
    form = interface_form(abstract)
    if form == "context":
        if plan_type is None:
            raise ValueError("plan_type: missing, expected the engine's EplbPlan for the form 'context'")
        return _context_policy(abstract, plan_type, policy)

    def rebalance_experts(
        cls: type,
        weight: Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: Tensor | None = None,
    ) -> ExpertMaps | Tensor:
        old = old_global_expert_indices
        maps = plan_maps(weight, num_replicas, num_groups, num_nodes, num_ranks, old, policy=policy)
        return maps if form == "maps" else maps.physical_to_logical

    return type("EvenrouteEplbPolicy", (abstract,), {"rebalance_experts": classmethod(rebalance_experts)})


def _context_policy(abstract: type, plan_type: type, policy: str) -> type:
    def plan(self: Any, context: Any, policy_state: Any) -> Any:
        """All samples of the window count alike; the plan starts from the placement in use."""
        try:
            window, slots, topology = context.load_window_cpu, context.num_replicas, context.topology
            numbers = (slots, topology.num_groups, topology.num_nodes, topology.num_ranks)
            old = context.physical_to_logical_map_cpu
        except AttributeError as error:
            raise ValueError(
                f"context {describe(context)} is not one of a vLLM known here: {error}"
            ) from None
        if not isinstance(window, Tensor) or window.ndim != 3:
            found = describe(window)
            raise ValueError(
                f"load_window_cpu must be a torch.Tensor [samples, layers, experts], found {found}"
            )
        maps = plan_maps(window.sum(dim=0), *numbers, old, policy=policy)
        return plan_type(physical_to_logical_map=maps.physical_to_logical)

    name = "plan_rebalance" if hasattr(abstract, "plan_rebalance") else "rebalance_experts"
    return type("EvenrouteEplbPolicy", (abstract,), {name: plan})


def register(name: str = "default", *, policy: str = "full") -> type:
    """Put our policy into vLLM's table under ``name``, the one that `--eplb-config` names ("default" unless set);
    ``policy`` as for `plan_maps`.

    Returns the class. Call it in every worker process before the engine starts.

    Raises:
        ImportError: vLLM is not installed, or has no EPLB policies yet.
        ValueError: its policy interface is of a form that is not known here; no such name or policy.
    """
    require_text("name", name)
    require_choice("policy", policy, POLICIES)
    from vllm.distributed.eplb import policy as vllm_policy  # type: ignore[import-not-found]

    abstract = vllm_policy.AbstractEplbPolicy
    module = inspect.getmodule(abstract)
    made = build_policy(abstract, plan_type=getattr(module, "EplbPlan", None), policy=policy)
    instances = any(not isinstance(entry, type) for entry in vllm_policy.EPLB_POLICIES.values())
    vllm_policy.EPLB_POLICIES[name] = made() if instances else made
    logger.info("EPLB policy %r is evenroute's planner (%s)", name, policy)
    return made
