"""evenroute: routes tokens to experts evenly across a cluster, without ever stopping to do it.

Every public name is imported from here and checks what it is handed; `docs/api.md` documents each. A name loads the
module that defines it on first use, so the names in the first part need no torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from evenroute.dist.client import ControlClient as ControlClient
    from evenroute.dist.config import AgentConfig as AgentConfig
    from evenroute.dist.config import RebalancerConfig as RebalancerConfig
    from evenroute.dist.elastic.agent import ElasticAgent as ElasticAgent
    from evenroute.dist.elastic.config import ElasticConfig as ElasticConfig
    from evenroute.dist.elastic.source import SafetensorsSource as SafetensorsSource
    from evenroute.dist.engines.ep_layer import EpMoeLayer as EpMoeLayer
    from evenroute.dist.engines.torch import adapt as adapt
    from evenroute.dist.rank.agent import RankAgent as RankAgent
    from evenroute.dist.rebalancer.process import run_rebalancer as run_rebalancer
    from evenroute.dist.weights.expert_weights import ExpertWeights as ExpertWeights
    from evenroute.dist.weights.migration_config import MigrationConfig as MigrationConfig
    from evenroute.dist.weights.mover import TablesOnly as TablesOnly
    from evenroute.dist.weights.weight_mover import WeightMover as WeightMover
    from evenroute.eplb.analysis.advice import advise as advise
    from evenroute.eplb.analysis.replay import Replay as Replay
    from evenroute.eplb.analysis.replay import replay as replay
    from evenroute.eplb.files.open import open_loads as open_loads
    from evenroute.eplb.loads.balance import balancedness as balancedness
    from evenroute.eplb.loads.source import LoadSource as LoadSource
    from evenroute.eplb.placement.placement import Placement as Placement
    from evenroute.eplb.placement.topology import Topology as Topology
    from evenroute.eplb.planner.cost import TimeCosts as TimeCosts
    from evenroute.eplb.planner.deepseek import rebalance_experts as rebalance_experts
    from evenroute.eplb.planner.plan import Plan as Plan
    from evenroute.eplb.planner.plan import plan_placement as plan_placement
    from evenroute.eplb.planner.policy import Decision as Decision
    from evenroute.eplb.planner.policy import PolicySettings as PolicySettings
    from evenroute.eplb.planner.policy import RebalancePolicy as RebalancePolicy
    from evenroute.routing.align.align import moe_align_block_size as moe_align_block_size
    from evenroute.routing.counters import ExpertCounters as ExpertCounters
    from evenroute.routing.gate import GateRouter as GateRouter
    from evenroute.routing.output import RoutingOutput as RoutingOutput
    from evenroute.routing.router import Router as Router
    from evenroute.routing.settings.config import RouterConfig as RouterConfig
    from evenroute.routing.tables.tables import DispatchTables as DispatchTables

    __version__: str

_HOMES = {
    "Placement": "eplb.placement.placement",
    "Topology": "eplb.placement.topology",
    "plan_placement": "eplb.planner.plan",
    "Plan": "eplb.planner.plan",
    "balancedness": "eplb.loads.balance",
    "RebalancePolicy": "eplb.planner.policy",
    "PolicySettings": "eplb.planner.policy",
    "TimeCosts": "eplb.planner.cost",
    "Decision": "eplb.planner.policy",
    "rebalance_experts": "eplb.planner.deepseek",
    "open_loads": "eplb.files.open",
    "LoadSource": "eplb.loads.source",
    "advise": "eplb.analysis.advice",
    "replay": "eplb.analysis.replay",
    "Replay": "eplb.analysis.replay",
    "RebalancerConfig": "dist.config",
    "run_rebalancer": "dist.rebalancer.process",
    "ControlClient": "dist.client",
    # From here on with torch.
    "Router": "routing.router",
    "RouterConfig": "routing.settings.config",
    "RoutingOutput": "routing.output",
    "DispatchTables": "routing.tables.tables",
    "ExpertCounters": "routing.counters",
    "moe_align_block_size": "routing.align.align",
    "GateRouter": "routing.gate",
    "RankAgent": "dist.rank.agent",
    "AgentConfig": "dist.config",
    "WeightMover": "dist.weights.weight_mover",
    "MigrationConfig": "dist.weights.migration_config",
    "ExpertWeights": "dist.weights.expert_weights",
    "TablesOnly": "dist.weights.mover",
    "EpMoeLayer": "dist.engines.ep_layer",
    "ElasticAgent": "dist.elastic.agent",
    "ElasticConfig": "dist.elastic.config",
    "SafetensorsSource": "dist.elastic.source",
    "adapt": "dist.engines.torch",
}
_WITH_TORCH = list(_HOMES)[list(_HOMES).index("Router") :]
__all__ = [*_HOMES, "__version__"]

# In a source tree the packages lie beside this folder, not in it: Python started there finds this file first.
if not (Path(__file__).parent / "eplb").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOMES:
        if name in _WITH_TORCH:
            importlib.import_module("evenroute.eplb._versions").check_versions()
        try:
            value = getattr(importlib.import_module(f"evenroute.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton"):
                raise
            missing = (
                f"evenroute.{name} needs {error.name}, which is not installed: pip install 'evenroute[rank]'"
            )
            raise ImportError(missing) from None
    else:
        raise AttributeError(f"module 'evenroute' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("evenroute")
    except metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that is not installed
