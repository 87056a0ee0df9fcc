"""vLLM has no EPLB and no whole expert parallelism on CPUs; these five shims, for tests only, lend it both.

A plug-in of vLLM's like ours (`support.vllm_engine.serve` puts it on the path): the configuration's check of the
platform, the runner that never registers EPLB, the kernel that ignores the map of local experts, two collectives.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
import torch.distributed as torch_dist


def register() -> None:
    """Called by vLLM in each of its processes."""
    import vllm.config.parallel as parallel
    import vllm.v1.worker.worker_base as worker_base

    real = parallel.current_platform
    if not isinstance(real, _Platform):
        parallel.current_platform = _Platform(real)
        _expert_map()
        _collectives()
        _wrap(worker_base, "resolve_obj_by_qualname", _worker_class)


class _Platform:
    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def is_cuda_alike(self) -> bool:
        return True


def _wrap(owner: Any, name: str, new: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return new(original, *args, **kwargs)

    wrapper._shim = True  # type: ignore[attr-defined]
    if not hasattr(original, "_shim"):
        setattr(owner, name, wrapper)


def _worker_class(original: Any, name: str) -> Any:
    # Only where workers are made is the runner imported.
    found = original(name)
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    _wrap(CPUModelRunner, "load_model", _load_model)
    return found


def _load_model(original: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    original(runner, *args, **kwargs)
    if runner.parallel_config.enable_eplb:
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.model_executor.models.interfaces import get_mixture_of_experts_model

        runner._moe_model = get_mixture_of_experts_model(runner.model)
        runner.eplb_state = EplbState(runner.parallel_config, runner.device)
        runner.eplb_state.add_model(runner._moe_model, runner.model_config)


def _expert_map() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    signature = inspect.signature(CPUUnquantizedExperts.apply)

    def apply(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if given["expert_map"] is not None:
            local = given["expert_map"][given["topk_ids"].long()]
            given["topk_weights"] = torch.where(local >= 0, given["topk_weights"], 0.0).contiguous()
            given["topk_ids"] = local.clamp(min=0).to(torch.int32).contiguous()
        return original(*bound.args, **bound.kwargs)

    _wrap(CPUUnquantizedExperts, "apply", apply)


def _collectives() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def gather(self: Any, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        most = max(sizes)
        mine = torch.cat([part, part.new_zeros((most - part.shape[0], *part.shape[1:]))]).contiguous()
        parts = [torch.empty_like(mine) for _ in sizes]
        torch_dist.all_gather(parts, mine, group=self.device_group)
        return torch.cat([one[:count] for one, count in zip(parts, sizes, strict=True)])

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0
        parts = input_ if isinstance(input_, list | tuple) else [input_]
        found = [gather(self, part, sizes or [part.shape[0]] * self.world_size) for part in parts]
        return found if isinstance(input_, list | tuple) else found[0]

    def reduce_scatterv(
        self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        assert dim == 0
        whole = input_.clone()
        torch_dist.all_reduce(whole, group=self.device_group)
        sizes = sizes or [whole.shape[0] // self.world_size] * self.world_size
        start = sum(sizes[: self.rank_in_group])
        return whole[start : start + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
