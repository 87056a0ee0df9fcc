"""Where SGLang is hooked: targets, what they must look like, and the entry point of `sglang.srt.plugins`.

Light until it is switched on: SGLang imports this in each of its processes.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from typing import Any, NamedTuple

ENGINE = "SGLang"
FIRST, LAST = "0.5.17", "0.5.23"
SCHEDULER = "sglang.srt.managers.scheduler"  # imported in the processes that have ranks or start them
RECORDER = "sglang.srt.eplb.expert_distribution.ExpertDistributionRecorder"
_RECORDER_OWN = ("init_new", "recording")  # made there; an attribute of ours
_HERE = "evenroute.dist.engines.sglang"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"


class HookPoint(NamedTuple):
    """A target of SGLang's HookRegistry.

    targets      dotted paths, the first that exists is hooked: names change between versions
    kind         BEFORE, AFTER, AROUND or REPLACE
    hook         `file:name` of what is put there
    parameters   what the target must take; for a class the methods that its replacement must have are looked up
    """

    targets: tuple[str, ...]
    kind: str
    hook: str
    parameters: tuple[str, ...] = ()


SEAMS = (
    HookPoint(("sglang.srt.eplb.eplb_manager.EPLBManager",), "REPLACE", "recorder:EvenrouteManager"),
    HookPoint(
        (f"{RECORDER}.init_new",),
        "AROUND",
        "recorder:init_recorder",
        ("expert_location_metadata", "rank"),
    ),
    HookPoint((f"{_RUNNER}.load_model",), "AFTER", "attach:after_load_model", ("self",)),
    HookPoint((f"{_RUNNER}.forward",), "BEFORE", "attach:before_forward", ("self", "forward_batch")),
    HookPoint(
        ("sglang.srt.layers.moe.topk.select_experts",),
        "AROUND",
        "topk:select_experts",
        (
            *("hidden_states", "router_logits", "topk_config", "layer_id", "num_token_non_padded"),
            "expert_location_dispatch_info",
        ),
    ),
    HookPoint((f"{_UPDATER}.update_weights_from_disk",), "AFTER", "attach:after_update", ("self",)),
    HookPoint((f"{_UPDATER}.update_weights_from_tensor",), "AFTER", "attach:after_update", ("self",)),
    HookPoint((f"{_UPDATER}.update_weights_from_ipc",), "AFTER", "attach:after_update", ("self",)),
    HookPoint(
        (f"{_UPDATER}.load_weights_from_distributed", f"{_UPDATER}.update_weights_from_distributed"),
        "AFTER",
        "attach:after_update",
        ("self",),
    ),
    HookPoint(
        ("sglang.srt.utils.common.kill_process_tree",), "BEFORE", "ending:before_kill", ("parent_pid",)
    ),
)


def register() -> None:
    """Called by SGLang's `load_plugins` in every process of a server; does nothing without our settings."""
    if not any(name.startswith("EVENROUTE_") for name in os.environ) or SCHEDULER not in sys.modules:
        return
    from evenroute.dist.engines.plugin import check_version, read_settings

    if read_settings(ENGINE) is None:
        return
    import sglang

    check_version(ENGINE, str(getattr(sglang, "__version__", "")), FIRST, LAST)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _require_methods(RECORDER, f"{_HERE}.recorder:EvenrouteRecorder")
    for seam in SEAMS:
        target, _ = find(seam)
        HookRegistry.register(target, hook_of(seam), HookType[seam.kind])


def hook_of(seam: HookPoint) -> Any:
    """What is put at the seam."""
    return pkgutil.resolve_name(f"{_HERE}.{seam.hook}")


def find(seam: HookPoint) -> tuple[str, Any]:
    """The target and what stands there; ends the process by name if it is gone or has another shape."""
    from evenroute.dist.engines.plugin import refuse

    problem = ""
    for target in seam.targets:
        try:
            found = pkgutil.resolve_name(target)
        except (ImportError, AttributeError) as error:
            problem = problem or f"{target} is not there ({error})"
            continue
        missing = _missing(seam, found)
        if missing:
            refuse(ENGINE, f"{target} has changed: {missing}; versions known: {FIRST} to {LAST}")
        return target, found
    return refuse(ENGINE, f"{problem}; versions known: {FIRST} to {LAST}")


def _missing(seam: HookPoint, found: Any) -> str:
    """What the target lacks, or (a class) what its replacement lacks; empty if it is as known."""
    if isinstance(found, type):
        return _unknown_methods(found, hook_of(seam))
    parameters = inspect.signature(found).parameters
    lacking = [name for name in seam.parameters if name not in parameters]
    return f"no parameter {', '.join(lacking)} among {', '.join(parameters)}" if lacking else ""


def _unknown_methods(theirs: type, ours: type, besides: tuple[str, ...] = ()) -> str:
    names = (name for name in vars(theirs) if not name.startswith("_") and name not in besides)
    unknown = [name for name in names if not hasattr(ours, name)]
    return f"methods {', '.join(unknown)} are not known" if unknown else ""


def _require_methods(target: str, ours: str) -> None:
    """End the process if SGLang's recorder does what the one in its place does not know of."""
    from evenroute.dist.engines.plugin import refuse

    try:
        problem = _unknown_methods(pkgutil.resolve_name(target), pkgutil.resolve_name(ours), _RECORDER_OWN)
    except (ImportError, AttributeError) as error:
        problem = f"it is not there ({error})"
    if problem:
        refuse(ENGINE, f"{target} has changed: {problem}; versions known: {FIRST} to {LAST}")


def require_hooks() -> None:
    """End the process unless every seam is hooked: SGLang logs a hook that can't be applied, and goes on without it."""
    from evenroute.dist.engines.plugin import refuse

    for seam in SEAMS:
        target, found = find(seam)
        # SGLang wraps functions and puts classes as they are.
        hooked = found is hook_of(seam) if isinstance(found, type) else hasattr(found, "__wrapped__")
        if not hooked:
            refuse(ENGINE, f"{target} could not be hooked (see SGLang's log)")
