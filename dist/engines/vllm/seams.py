"""What of vLLM the plug-in hooks, wraps or replaces, in all versions that are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from evenroute.dist.engines.plugin import refuse
from evenroute.dist.engines.seams import Seam, find_seams, seam_problem

ENGINE = "vLLM"
FIRST, LAST = "0.26", "0.33"

_STATE = "distributed/eplb/eplb_state.py"
_ROUTER = "model_executor/layers/fused_moe/router/base_router.py"
_SELECT = ("self", "hidden_states", "router_logits", "topk_indices_dtype", "*", "input_ids")
_COMPUTE = ("self", "hidden_states", "router_logits", "indices_type", "*", "input_ids")

# Replaced functions have the digests of their texts too; `make check-vllm-seams` prints those of every version.
SEAMS = (
    Seam(
        _STATE,
        "EplbState.add_model",
        (("self", "model", "model_config"), ("self", "model", "model_config", "model_name")),
    ),
    Seam(
        _STATE,
        "EplbState.prepare_forward",
        (("self", "model_config", "num_unpadded_tokens", "ubatch_slices"),),
    ),
    Seam(
        _STATE,
        "EplbState.step",
        (("self", "is_dummy", "is_profile", "log_stats"),),
        texts=(
            "b2735b649af3",
            "bce00e70000b",
            "cba871a7865c",
            "a2138ec44494",
        ),
    ),
    Seam(
        _STATE,
        "EplbState.rearrange",
        (
            ("self", "is_profile", "rank_mapping"),
            ("self", "is_profile", "rank_mapping", "use_last_expert_load"),
        ),
        texts=(
            "1dee78fc4c9d",
            "44e74e51b651",
            "533a9e441176",
            "400f72b1c222",
            "c5291ff8f35c",
        ),
    ),
    Seam(
        _STATE,
        "EplbState.start_async_loop",
        (("self", "rank_mapping", "is_profile"),),
        texts=("81b524759e73",),
    ),
    Seam(
        _STATE,
        "EplbModelState",
        needs=(
            "physical_to_logical_map",
            "logical_to_physical_map",
            "logical_replica_count",
            "num_unpadded_tokens_tensors",
        ),
    ),
    Seam(
        _ROUTER,
        "BaseRouter._select_experts",
        (_SELECT,),
        texts=(
            "4861561f8747",
            "78401fa111d1",
        ),
    ),
    Seam(_ROUTER, "BaseRouter._compute_routing", (_COMPUTE,)),
    Seam(_ROUTER, "BaseRouter._apply_eplb_mapping", (("self", "topk_ids"),)),
    Seam("v1/worker/gpu_model_runner.py", "GPUModelRunner._dummy_run", needs=("self", "num_tokens")),
    Seam("v1/worker/gpu_model_runner.py", "GPUModelRunner.reload_weights", needs=("self",)),
    Seam("v1/worker/gpu/model_runner.py", "GPUModelRunner._dummy_run", needs=("self", "num_tokens")),
    Seam("v1/worker/gpu/model_runner.py", "GPUModelRunner.reload_weights", needs=("self",)),
    Seam("distributed/parallel_state.py", "get_ep_group", ((),)),
    Seam("distributed/parallel_state.py", "get_eplb_group", ((),)),
    Seam("distributed/parallel_state.py", "get_node_count", ((),)),
    Seam("distributed/parallel_state.py", "get_tensor_model_parallel_rank", ((),)),
)

# Where a process learns of its settings; looked at before anything else, also where the plug-in turns out to be off.
DOORS = (
    Seam("engine/arg_utils.py", "EngineArgs.create_engine_config", needs=("self",)),
    Seam("v1/worker/worker_base.py", "WorkerBase.__init__", needs=("self", "vllm_config")),
)


def installed_source(file: str) -> str | None:
    """The source of a file of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        path = Path(folder, file)
        if path.is_file():
            return path.read_text()
    return None


def check_seams(version: str) -> None:
    """End the process, with the name of the seam, where the installed vLLM differs from what is known."""
    for seam, found in find_seams(SEAMS + DOORS, installed_source).items():
        problem = seam_problem(seam, found)
        if problem:
            refuse(
                ENGINE, f"{version}: {problem}; evenroute knows {FIRST} to {LAST}: use one of them, unchanged"
            )
