"""Sizes and gating of the mixture-of-experts models that the commands know by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from evenroute.eplb._checks import require_bool, require_int, require_number, require_one_of, require_text

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
        require_one_of("scoring", self.scoring, get_args(Scoring))
        require_bool("use_bias", self.use_bias)
        require_bool("renormalize", self.renormalize)
        require_number("routed_scaling_factor", self.routed_scaling_factor)

    @property
    def num_slots(self) -> int:
        return self.num_logical_experts + self.num_redundant_experts


MODEL_SHAPES: dict[str, ModelShape] = {
    "dsv3": ModelShape(
        name="dsv3",
        num_layers=58,
        num_logical_experts=256,
        top_k=8,
        num_groups=8,
        topk_group=4,
        scoring="sigmoid",
        use_bias=True,
        renormalize=True,
        routed_scaling_factor=2.5,
        num_shared_experts=1,
        hidden_size=7168,
        moe_intermediate_size=2048,
        num_redundant_experts=32,
    ),
    "qwen3": ModelShape(
        name="qwen3",
        num_layers=94,
        num_logical_experts=128,
        top_k=8,
        num_groups=1,
        topk_group=1,
        scoring="softmax",
        use_bias=False,
        renormalize=True,
        routed_scaling_factor=1.0,
        num_shared_experts=0,
        hidden_size=4096,
        moe_intermediate_size=1536,
        num_redundant_experts=32,
    ),
    "kimi-k2": ModelShape(
        name="kimi-k2",
        num_layers=60,
        num_logical_experts=384,
        top_k=8,
        num_groups=1,
        topk_group=1,
        scoring="sigmoid",
        use_bias=True,
        renormalize=True,
        routed_scaling_factor=2.827,
        num_shared_experts=1,
        hidden_size=7168,
        moe_intermediate_size=2048,
        num_redundant_experts=64,
    ),
    "kimi-k3": ModelShape(
        name="kimi-k3",
        num_layers=92,
        num_logical_experts=896,
        top_k=16,
        num_groups=1,
        topk_group=1,
        scoring="sigmoid",
        use_bias=True,
        renormalize=True,
        routed_scaling_factor=1.0,
        num_shared_experts=1,
        hidden_size=7168,
        moe_intermediate_size=2048,
        num_redundant_experts=128,
    ),
}
