"""Every tensor that belongs to an expert of a layer, by name; and what follows when SGLang loads new weights.

A tensor that is left behind when an expert moves gives wrong answers without a word. So what SGLang's own EPLB would
move is compared with all that the layer's experts hold by slot, and what is unaccounted for is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from evenroute.dist.engines.plugin import refuse, refusing
from evenroute.dist.engines.sglang.seams import ENGINE
from evenroute.dist.weights.expert_weights import ExpertWeights

_REMEDY = "take another --moe-runner-backend or quantisation, or serve without evenroute"


def find_experts(model: Any) -> dict[int, Any]:
    """Modules that hold a layer's experts, by SGLang's number of the layer."""
    found = {}
    for module in model.modules():
        held = next(module.parameters(), None)
        if held is not None and hasattr(module, "num_local_experts") and hasattr(module, "layer_id"):
            found[int(module.layer_id)] = module
    return found


def listed_tensors(model: Any) -> dict[int, list[Tensor]]:
    """What SGLang's own EPLB moves, by layer; ends the process for a model that lists none."""
    found = getattr(model, "routed_experts_weights_of_layer", None)
    if found is None:
        layers = (m for m in model.modules() if hasattr(m, "get_moe_weights") and hasattr(m, "layer_id"))
        found = {m.layer_id: m.get_moe_weights() for m in layers}
    if not found:
        refuse(
            ENGINE,
            f"{type(model).__name__} lists no expert weights (routed_experts_weights_of_layer), so that none can move; "
            "SGLang's own EPLB can't serve it either",
        )
    return {int(layer): list(tensors) for layer, tensors in sorted(found.items())}


def expert_tensors(model: Any, num_local_slots: int) -> dict[int, dict[str, Tensor]]:
    """``{layer: {name: [local slots, ...]}}``: what SGLang lists, and what else its experts hold by slot.

    Ends the process by name for a tensor by slot that is no parameter (made by a kernel's preparation: it would have to
    be made again), and for one by global slot whose rows differ (per-expert scales that every rank holds).
    """
    modules, layers = find_experts(model), {}
    for at, listed in listed_tensors(model).items():
        module = modules.get(at)
        names = {} if module is None else {p.data_ptr(): name for name, p in module.named_parameters()}
        tensors = {
            names.get(t.data_ptr(), f"tensor {number}"): t for number, t in enumerate(listed) if t.numel()
        }
        if not tensors:
            refuse(ENGINE, f"layer {at} of {type(model).__name__} lists no expert weights")
        if module is not None:
            _complete(at, module, tensors, num_local_slots)
        layers[at] = tensors
    return layers


def _complete(at: int, module: Any, tensors: dict[str, Tensor], num_local_slots: int) -> None:
    """Add the parameters by slot that are not listed; refuse whatever else is held by slot."""
    known = {t.data_ptr() for t in tensors.values()}
    local = int(module.num_local_experts)
    for name, parameter in module.named_parameters():
        data = parameter.data
        if data.ndim == 0 or not data.numel() or data.data_ptr() in known:
            continue
        if data.shape[0] == local and not getattr(parameter, "_sglang_require_global_experts", False):
            tensors[name] = data[:num_local_slots]
            known.add(data.data_ptr())
        elif data.shape[0] == getattr(module, "num_experts", None) != local and not _rows_equal(data):
            refuse(
                ENGINE,
                f"layer {at} tensor {name!r} {list(data.shape)} holds a row for each slot of all ranks, and rows "
                f"differ: it can't move with its expert; {_REMEDY}",
            )
    for name, tensor in _plain_tensors(module):
        by_slot = tensor.ndim > 0 and tensor.numel() and tensor.shape[0] == local and local > 1
        if by_slot and tensor.data_ptr() not in known and not _rows_equal(tensor):
            refuse(
                ENGINE,
                f"layer {at} tensor {name!r} {list(tensor.shape)} is by slot and no parameter: it can't be kept "
                f"equal when experts move; {_REMEDY}",
            )


def _rows_equal(tensor: Tensor) -> bool:
    return bool((tensor == tensor[:1]).all())


def _plain_tensors(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors in attributes of the module and one level below (its method, runner, scheme, ...)."""
    yield from module.named_buffers()
    for name, value in vars(module).items():
        if name.startswith("_") and name in ("_parameters", "_buffers", "_modules"):
            continue
        yield from _held(name, value)
        if not isinstance(value, torch.nn.Module | type | Tensor | Mapping) and hasattr(value, "__dict__"):
            for inner, held in vars(value).items():
                yield from _held(f"{name}.{inner}", held)


def _held(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    values = value.items() if isinstance(value, Mapping) else ((None, value),)
    for key, one in values:
        if isinstance(one, Tensor) and not isinstance(one, torch.nn.Parameter):
            yield (name if key is None else f"{name}[{key}]"), one


def register(layers: dict[int, dict[str, Tensor]], num_local_slots: int) -> ExpertWeights:
    """The tensors as `ExpertWeights`, in the order of the layers; ends the process for what can't move."""
    with refusing(ENGINE):
        return ExpertWeights(list(layers.values()), num_local_slots)


def require_same(before: dict[int, dict[str, Tensor]], after: dict[int, dict[str, Tensor]]) -> None:
    """End the process if an update made new tensors: those that move are not read any more."""
    for at, tensors in before.items():
        found = after.get(at, {})
        for name, tensor in tensors.items():
            other = found.get(name)
            same = other is not None and other.data_ptr() == tensor.data_ptr() and other.shape == tensor.shape
            if not same:
                refuse(
                    ENGINE,
                    f"layer {at} tensor {name!r} was replaced by an online update of weights; restart the server "
                    "with the new weights",
                )
