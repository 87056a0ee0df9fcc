"""Sizes and gating of the mixture-of-experts models that the commands know by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from evenroute.eplb._checks import require_bool, require_choice, require_int, require_number, require_text

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]
_SIZES = ("hidden_size", "moe_intermediate_size")


@dataclass(frozen=True)
class ModelShape:
    """What routing and planning need to know of a model.

    Attributes:
        num_layers: mixture-of-experts layers only (DeepSeek-V3: 61 layers, 3 dense, so 58).
        num_groups: expert groups of the gate; 1 = no groups.
        topk_group: groups kept per token.
        use_bias: a per-expert correction bias takes part in the choice.
        num_redundant_experts: the redundancy this model is usually served with.

    Raises:
        ValueError: names the field, what was found and what is allowed.
    """

    name: str
    num_layers: int
    num_logical_experts: int
    top_k: int
    num_groups: int
    topk_group: int
    scoring: Scoring
    use_bias: bool
    renormalize: bool
    routed_scaling_factor: float
    num_shared_experts: int
    hidden_size: int
    moe_intermediate_size: int
    num_redundant_experts: int

    def __post_init__(self) -> None:
        require_text("name", self.name)
        for name in ("num_shared_experts", "num_redundant_experts"):
            require_int(name, getattr(self, name), 0)
        for name in ("num_layers", "num_logical_experts", "top_k", "num_groups", "topk_group", *_SIZES):
            require_int(name, getattr(self, name), 1)
        require_choice("scoring", self.scoring, get_args(Scoring))
        require_bool("use_bias", self.use_bias)
        require_bool("renormalize", self.renormalize)
        require_number("routed_scaling_factor", self.routed_scaling_factor)

    @property
    def num_slots(self) -> int:
        return self.num_logical_experts + self.num_redundant_experts


# In the order of the fields: name, layers, experts, top_k, groups, topk_group, scoring, use_bias, renormalize,
# routed_scaling_factor, shared experts, hidden size, experts' intermediate size, redundant experts.
_MODELS: tuple[tuple[Any, ...], ...] = (
    ("dsv3", 58, 256, 8, 8, 4, "sigmoid", True, True, 2.5, 1, 7168, 2048, 32),
    ("qwen3", 94, 128, 8, 1, 1, "softmax", False, True, 1.0, 0, 4096, 1536, 32),
    ("kimi-k2", 60, 384, 8, 1, 1, "sigmoid", True, True, 2.827, 1, 7168, 2048, 64),
    ("kimi-k3", 92, 896, 16, 1, 1, "sigmoid", True, True, 1.0, 1, 7168, 2048, 128),
)
MODEL_SHAPES = {row[0]: ModelShape(*row) for row in _MODELS}
