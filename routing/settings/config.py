"""What a model's router computes: scoring, choice, weights and shared columns."""

from __future__ import annotations

from dataclasses import dataclass

from evenroute.eplb._checks import (
    describe,
    require_bool,
    require_choice,
    require_int,
    require_number,
)
from evenroute.eplb.placement.models import ModelShape

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
TOPK_METHODS = ("greedy", "noaux_tc")
BIAS_DOMAINS = ("logit", "score")
SHARED_MODES = ("global", "per_rank", "waterfill")
COLUMN_ORDERS = ("key", "expert_id")
MAX_EXPERTS = 2048
MAX_TOP_K = 32


@dataclass(frozen=True)
class RouterConfig:
    """Routing form of one model.

    num_experts, top_k      E <= 2048 logical experts, K <= 32 of them a token
    scoring                 "softmax", "sigmoid" or "sqrtsoftplus"
    num_groups, topk_group  G groups of consecutive experts, TG of them kept; 1, 1 = no groups
    topk_method             score of a group: "noaux_tc" = sum of its true top-2 keys, "greedy" = its largest key
    renormalize             divide the K routed weights by their sum (by 1 where it is 0) ...
    renormalize_epsilon     ... or, if > 0, by sum + epsilon
    routed_scaling_factor   factor of the routed experts' output
    apply_routed_scaling_factor  True: the weights carry the factor; False: the consumer that combines multiplies by it
    softcap                 c > 0: logits become c * tanh(x / c) (softmax only)
    bias_domain             softmax: add the bias to the logit or ("score") to the probability
    num_shared_experts      S columns after the K routed ones, coefficient exactly 1
    shared_mode             "global": ids after the last slot; "per_rank": ids among this rank's slots;
                            "waterfill": the column goes to the rank with the largest deficit
    column_order            "key" (descending) or "expert_id" (ascending)

    Scores are fp32 without subnormal numbers: one below 2**-126 is 0 and weighs nothing. So experts whose logits are
    below -87.3 (sigmoid), below -174.7 (sqrtsoftplus) or 87.3 below the largest (softmax) have equal keys, but for
    the bias, under sigmoid, sqrtsoftplus and bias_domain="score", and the lowest ids of them are chosen.

    Raises:
        ValueError: a field is out of range, or the group numbers do not fit together.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    topk_group: int = 1
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    topk_method: str = "noaux_tc"
    renormalize_epsilon: float = 0.0
    apply_routed_scaling_factor: bool = True
    softcap: float | None = None
    bias_domain: str = "logit"
    num_shared_experts: int = 0
    shared_mode: str = "global"
    column_order: str = "key"

    def __post_init__(self) -> None:
        require_int("num_experts", self.num_experts, 1, MAX_EXPERTS)
        require_int("top_k", self.top_k, 1)
        require_int("num_shared_experts", self.num_shared_experts, 0)
        require_choice("scoring", self.scoring, SCORINGS)
        require_choice("topk_method", self.topk_method, TOPK_METHODS)
        require_choice("bias_domain", self.bias_domain, BIAS_DOMAINS)
        require_choice("shared_mode", self.shared_mode, SHARED_MODES)
        require_choice("column_order", self.column_order, COLUMN_ORDERS)
        require_bool("renormalize", self.renormalize)
        require_bool("apply_routed_scaling_factor", self.apply_routed_scaling_factor)
        self._check_groups()
        if self.top_k > MAX_TOP_K:
            raise ValueError(f"top_k must be in [1, {MAX_TOP_K}], found {self.top_k}")
        if self.top_k + self.num_shared_experts > 64:
            raise ValueError(f"num_shared_experts={self.num_shared_experts}: top_k + shared must be <= 64")
        self._check_numbers()
        if self.scoring != "softmax" and (self.softcap is not None or self.bias_domain != "logit"):
            raise ValueError(f"softcap and bias_domain need scoring='softmax', found {self.scoring!r}")

    def _check_numbers(self) -> None:
        require_number("routed_scaling_factor", self.routed_scaling_factor)
        require_number("renormalize_epsilon", self.renormalize_epsilon)
        if self.routed_scaling_factor <= 0:
            raise ValueError(f"routed_scaling_factor must be > 0, found {self.routed_scaling_factor}")
        if self.renormalize_epsilon < 0:
            raise ValueError(f"renormalize_epsilon must be >= 0, found {self.renormalize_epsilon}")
        if self.softcap is not None:
            require_number("softcap", self.softcap)
            if self.softcap <= 0:
                raise ValueError(f"softcap must be > 0, found {self.softcap}")
        self._check_fp32()

    def _check_fp32(self) -> None:
        """The arithmetic is fp32: a setting that is 0 or Inf there (or whose inverse is) would make NaN weights."""
        for name, least in (
            ("routed_scaling_factor", 1e-30),
            ("softcap", 1e-30),
            ("renormalize_epsilon", 1e-37),
        ):
            value = getattr(self, name)
            if value and not least <= value <= 1e30:
                raise ValueError(f"{name} must lie in [{least}, 1e30], found {value}")

    def _check_groups(self) -> None:
        experts, groups, kept, top_k = self.num_experts, self.num_groups, self.topk_group, self.top_k
        for name in ("num_groups", "topk_group"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, found {describe(value)}")
        rule = ""
        if groups < 1:
            rule = "num_groups must be >= 1"
        elif experts % groups:
            rule = "num_groups must divide num_experts"
        elif groups > 1 and self.topk_method == "noaux_tc" and experts // groups < 2:
            rule = "a group needs at least 2 experts for its top-2 sum"
        elif not 1 <= kept <= groups:
            rule = "topk_group must lie in [1, num_groups]"
        elif top_k > kept * (experts // groups):
            rule = f"top_k must be <= topk_group * num_experts / num_groups = {kept * (experts // groups)}"
        if rule:
            found = f"num_experts={experts}, num_groups={groups}, topk_group={kept}, top_k={top_k}"
            raise ValueError(f"{found}: {rule}")

    @classmethod
    def of_model(cls, shape: ModelShape) -> RouterConfig:
        """The routing form of a model that the commands know, its routed experts alone."""
        return cls(
            shape.num_logical_experts,
            shape.top_k,
            shape.scoring,
            shape.num_groups,
            shape.topk_group,
            shape.renormalize,
            shape.routed_scaling_factor,
        )

    @property
    def grouped(self) -> bool:
        """True if groups can exclude an expert."""
        return self.num_groups > 1 and self.topk_group < self.num_groups

    @property
    def num_columns(self) -> int:
        """K + S, the width of the outputs."""
        return self.top_k + self.num_shared_experts

    @property
    def shared_weight(self) -> float:
        """Weight of a shared column: its final coefficient is 1, wherever the factor is applied."""
        return 1.0 if self.apply_routed_scaling_factor else 1.0 / self.routed_scaling_factor
