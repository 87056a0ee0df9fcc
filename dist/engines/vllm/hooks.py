"""Wraps vLLM's methods, on their classes, so that it does not matter who imported what before.

| method | with evenroute |
|---|---|
| `EplbState.add_model` | behind it: placement, tables, mover, agent of the model |
| `EplbState.prepare_forward` | a pass begins; in dummy passes no row counts |
| `EplbState.step` | the boundary of a step; vLLM's own does not run (in shadow mode it does) |
| `EplbState.rearrange`, `.start_async_loop` | nothing (in shadow mode: as ever) |
| `BaseRouter._select_experts` | routed by evenroute (in shadow mode `_apply_eplb_mapping` counts) |
| `GPUModelRunner._dummy_run`, of both runners | marks dummy passes |
| `GPUModelRunner.reload_weights`, of both runners | refused |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from evenroute.dist.engines.plugin import PluginSettings, refuse, refusing
from evenroute.dist.engines.vllm.job import VllmJob
from evenroute.dist.engines.vllm.seams import ENGINE

RELOAD = "evenroute in vLLM: weights can't be reloaded, experts lie where evenroute moved them: start the server anew"


class Hooks:
    """What the wrappers share: the settings, and whether a dummy pass runs just now."""

    def __init__(self, settings: PluginSettings, config: Any) -> None:
        self.settings, self.config = settings, config
        self.shadow = settings.agent.mode == "shadow"
        self.in_dummy = 0

    def install(self) -> None:
        """Wrap the methods; once a process, in the one that runs the model."""
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner as FirstRunner

        self._wrap(EplbState, "add_model", self._add_model)
        self._wrap(EplbState, "prepare_forward", self._prepare_forward)
        self._wrap(EplbState, "step", self._step)
        if self.shadow:
            self._wrap(BaseRouter, "_apply_eplb_mapping", _count)
        else:
            self._wrap(EplbState, "rearrange", _nothing)
            self._wrap(EplbState, "start_async_loop", _nothing)
            self._wrap(BaseRouter, "_select_experts", _select)
        for runner in (FirstRunner, SecondRunner):
            self._wrap(runner, "_dummy_run", self._dummy_run)
            self._wrap(runner, "reload_weights", _refuse_reload)

    @staticmethod
    def _wrap(owner: type, name: str, new: Callable[..., Any]) -> None:
        """``owner.name(self, ...)`` becomes ``new(original, self, ...)``."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            return new(original, self, *args, **kwargs)

        setattr(owner, name, wrapper)

    def _add_model(
        self,
        original: Callable[..., Any],
        state: Any,
        model: Any,
        model_config: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if getattr(state, "_evenroute_job", None) is not None:
            refuse(
                ENGINE, "a draft model with experts of its own is not supported: use one without, or no draft"
            )
        original(state, model, model_config, *args, **kwargs)
        try:
            with refusing(ENGINE):
                state._evenroute_job = VllmJob(self.settings, self.config, state, model, model_config)
        except AttributeError as error:  # of a layer or a model that is not like those of the known versions
            refuse(ENGINE, f"{error}: this model's layers are not like those that evenroute knows")

    def _prepare_forward(
        self,
        original: Callable[..., Any],
        state: Any,
        model_config: Any,
        num_unpadded_tokens: int,
        ubatch_slices: Any = None,
    ) -> None:
        job = getattr(state, "_evenroute_job", None)
        rows = 0 if self.in_dummy else int(num_unpadded_tokens)
        original(state, model_config, rows, ubatch_slices)
        if job is not None and not self.in_dummy:
            job.begin_pass(rows)

    def _step(
        self,
        original: Callable[..., Any],
        state: Any,
        is_dummy: bool = False,
        is_profile: bool = False,
        log_stats: bool = False,
    ) -> None:
        if self.shadow:
            original(state, is_dummy, is_profile, log_stats)
        job = getattr(state, "_evenroute_job", None)
        if job is not None and not is_profile:
            job.end_pass()

    def _dummy_run(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        job = getattr(getattr(runner, "eplb_state", None), "_evenroute_job", None)
        if job is not None:
            job.dummy_pass()
        self.in_dummy += 1
        try:
            return original(runner, *args, **kwargs)
        finally:
            self.in_dummy -= 1


def _nothing(original: Callable[..., Any], state: Any, *args: Any, **kwargs: Any) -> None:
    """evenroute plans and moves."""


def _select(
    original: Callable[..., Any],
    router: Any,
    hidden_states: Any,
    router_logits: Any,
    topk_indices_dtype: Any = None,
    *,
    input_ids: Any = None,
) -> Any:
    route = getattr(router, "_evenroute", None)
    if route is None:
        return original(router, hidden_states, router_logits, topk_indices_dtype, input_ids=input_ids)
    return route.select(router, hidden_states, router_logits, topk_indices_dtype, input_ids)


def _count(original: Callable[..., Any], router: Any, topk_ids: Any) -> Any:
    route = getattr(router, "_evenroute", None)
    return original(router, topk_ids if route is None else route.count(topk_ids))


def _refuse_reload(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(RELOAD)
