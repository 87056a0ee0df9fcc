"""MoE blocks of a PyTorch model: what they must hold, and whether their gate answers as the router will."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from evenroute.eplb.placement.placement import Placement
from evenroute.eplb.placement.topology import Topology
from evenroute.routing.router import Router
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.tables.tables import DispatchTables

WEIGHT_NAMES = ("gate_up_proj", "down_proj")
PROBE_ROWS = 32
REMEDY = "use the router directly as examples/minimal_engine.py does"


@dataclass(frozen=True)
class MoeBlock:
    """One block of the model: its dotted name and the module that has `gate` and `experts`."""

    name: str
    module: Any

    @property
    def where(self) -> str:
        """Name and class, for messages."""
        return f"{self.name} ({type(self.module).__name__})"


def block_problem(module: Any) -> str:
    """Why a block can't be taken; empty if it can."""
    experts = module.experts
    tensors = {}
    if isinstance(experts, nn.Module):
        tensors = {**dict(experts.named_parameters()), **dict(experts.named_buffers())}
    if not set(WEIGHT_NAMES) <= set(tensors):
        return f"has experts of class {type(experts).__name__} without stacked {' and '.join(WEIGHT_NAMES)}"
    extra = sorted(set(tensors) - set(WEIGHT_NAMES))
    if extra:
        return f"has experts with further tensors {extra}, which would stay behind when an expert moves"
    gate_up, down = (tensors[name] for name in WEIGHT_NAMES)
    if not gate_up.is_floating_point() or gate_up.element_size() < 2 or gate_up.dtype != down.dtype:
        return f"has experts of dtype {gate_up.dtype} and {down.dtype}, expected one of fp32, fp16, bf16"
    experts_, wide, hidden = gate_up.shape if gate_up.ndim == 3 else (0, 0, 0)
    if tuple(down.shape) != (experts_, hidden, wide // 2) or wide % 2:
        found = f"gate_up_proj {list(gate_up.shape)} and down_proj {list(down.shape)}"
        return f"has {found}, expected [E, 2 I, H] and [E, H, I]"
    activation = type(getattr(experts, "act_fn", nn.SiLU())).__name__
    if activation not in ("SiLU", "SiLUActivation"):
        return f"has experts with activation {activation}, expected SiLU"
    return ""


def selection_bias(block: Any) -> Tensor | None:
    """The bias ``[E]`` that takes part in the choice alone, where a block's gate, or the block itself, has one."""
    for owner in (block.gate, block):
        bias = getattr(owner, "e_score_correction_bias", None)
        if isinstance(bias, Tensor):
            return bias
    return None


def _extra_arguments(block: Any) -> tuple[Tensor, ...]:
    """What the block hands its gate beside hidden states: its own bias, where the gate has none."""
    bias = selection_bias(block)
    return () if bias is None or hasattr(block.gate, "e_score_correction_bias") else (bias,)


def check_gate(block: MoeBlock, config: RouterConfig) -> None:
    """Ask the model's gate and our router the same random question.

    Raises:
        ValueError: they choose or weigh differently; names the block, a row and both answers.
    """
    if not all(hasattr(block.module, name) for name in ("gate", "experts")):
        raise ValueError(f"{block.where}: found no `gate` and `experts`; {REMEDY}")
    problem = block_problem(block.module)
    if problem:
        raise ValueError(f"{block.where} {problem}; {REMEDY}")
    gate = block.module.gate
    gate_up = block.module.experts.gate_up_proj
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROBE_ROWS, gate_up.shape[2], generator=generator).to(gate_up.device, gate_up.dtype)
    try:
        with torch.no_grad():
            answer = gate(hidden, *_extra_arguments(block.module))
    except TypeError as error:
        raise ValueError(f"{block.where}: gate {type(gate).__name__}: {error}; {REMEDY}") from None
    if not (
        isinstance(answer, tuple) and len(answer) == 3 and all(isinstance(part, Tensor) for part in answer)
    ):
        raise ValueError(
            f"{block.where}: gate {type(gate).__name__} returned {type(answer).__name__}, expected "
            f"(logits, weights, ids); {REMEDY}"
        )
    logits, weights, ids = answer
    expected_shape = (PROBE_ROWS, config.num_experts)
    if tuple(logits.shape) != expected_shape or ids.shape != (PROBE_ROWS, config.top_k):
        raise ValueError(
            f"{block.where}: gate gave logits {list(logits.shape)} and ids {list(ids.shape)}, expected "
            f"{list(expected_shape)} and {[PROBE_ROWS, config.top_k]}"
        )
    placement = Placement.initial(1, config.num_experts, config.num_experts, Topology(1))
    tables = DispatchTables(placement, ep_rank=0, device="cpu")
    router = Router(config, tables, emit=("weights", "logical_ids"), backend="reference")
    bias = selection_bias(block.module)
    ours = router(
        logits.detach().float().cpu(), 0, bias=None if bias is None else bias.detach().float().cpu()
    )
    assert ours.logical_ids is not None
    theirs_dense = torch.zeros(expected_shape).scatter_(1, ids.cpu().long(), weights.detach().float().cpu())
    ours_dense = torch.zeros(expected_shape).scatter_(1, ours.logical_ids.long(), ours.weights)
    tolerance = 1e-5 if weights.dtype == torch.float32 and logits.dtype == torch.float32 else 2e-2
    difference = (theirs_dense - ours_dense).abs().amax(dim=1)
    worst = int(difference.argmax())
    if float(difference[worst]) > tolerance * max(1.0, float(theirs_dense.abs().max())):
        raise ValueError(
            f"{block.where}: gate {type(gate).__name__} and the router answer differently; row {worst}: gate "
            f"{_sparse(theirs_dense[worst])}, router {_sparse(ours_dense[worst])} ({config}); give the right config="
        )


def _sparse(row: Tensor) -> str:
    return " ".join(f"{int(i)}:{float(row[i]):.4f}" for i in row.nonzero().flatten())
