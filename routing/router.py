"""The router: logits in, physical ids out, one launch a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from evenroute.routing.config import RouterConfig, require_choice
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.dispatch import resolve_dispatch, waterfill_columns
from evenroute.routing.output import (
    DEFAULT_EMIT,
    OUTPUT_NAMES,
    RouteCall,
    RouteForm,
    RoutingOutput,
    allocate_output,
)
from evenroute.routing.route_reference import route_reference
from evenroute.routing.tables import DispatchTables

BACKENDS = ("auto", "reference", "triton", "interpret")
LOGIT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# (logits [T, E], top_k, renormalize) -> (weights [T, K], logical ids [T, K])
CustomRouting = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]


class Router:
    """Routes the tokens of all layers of one model on one rank.

    config, tables, counters   counters are made here if none are given
    dispatch    "auto" (weighted where a placement carries shares, else even), "static", "dynamic", "rank_invariant"
                or "weighted"
    deal        "exact" (tickets) or "hash", for dynamic and weighted with tokens="own"
    tokens      "own" or "shared"
    backend     "auto": the Triton kernel on CUDA, plain torch on CPU; "reference", "triton"; "interpret": the kernel on
                CPU tensors under TRITON_INTERPRET=1, for tests
    emit        outputs wanted, of `OUTPUT_NAMES`
    custom_routing_function    replaces scores and choice; what it returns is taken as given logical_ids and weights
    pdl         programmatic dependent launch: this launch may start while its predecessor drains (Hopper and later)

    Raises:
        ValueError: the parts do not fit each other, or a mode is refused (`tokens="shared"` with a rank's own choice).
    """

    def __init__(
        self,
        config: RouterConfig,
        tables: DispatchTables,
        counters: ExpertCounters | None = None,
        *,
        dispatch: str = "auto",
        deal: str = "exact",
        tokens: str = "own",
        backend: str = "auto",
        emit: tuple[str, ...] = DEFAULT_EMIT,
        custom_routing_function: CustomRouting | None = None,
        pdl: bool = False,
    ) -> None:
        require_choice("backend", backend, BACKENDS)
        for name in emit:
            require_choice("emit", name, OUTPUT_NAMES)
        self.dispatch, form = resolve_dispatch(dispatch, deal, tokens)
        if tables.num_logical_experts != config.num_experts:
            raise ValueError(
                f"config.num_experts={config.num_experts}, the tables hold {tables.num_logical_experts} experts"
            )
        if counters is None:
            counters = ExpertCounters(tables.num_layers, config.num_experts, device=tables.device)
        mine = (tables.num_layers, config.num_experts, tables.device.type)
        found = (counters.num_layers, counters.num_logical_experts, counters.device.type)
        if mine != found:
            raise ValueError(f"counters have (layers, experts, device) {found}, the tables {mine}")
        per_rank = config.num_shared_experts > 0 and config.shared_mode != "global"
        if tokens == "shared" and per_rank:
            raise ValueError(
                f"shared_mode={config.shared_mode!r} with tokens='shared': every rank would add the shared experts; "
                "allowed: global"
            )
        if form == "exact":
            counters.enable_tickets()
            if self.dispatch == "weighted":
                tables.enable_sequences()
        if backend == "auto":
            backend = "triton" if tables.device.type == "cuda" else "reference"
        if backend == "triton" and tables.device.type != "cuda":
            raise ValueError(f"backend='triton' needs CUDA tensors, the tables lie on {tables.device}")
        seed = torch.zeros(1, dtype=torch.int32, device=tables.device)
        self.config, self.tables, self.counters = config, tables, counters
        self.tokens, self.backend, self.pdl = tokens, backend, pdl
        self.custom_routing_function = custom_routing_function
        self.form = RouteForm(config, tables, counters, form, self.dispatch == "weighted", tuple(emit), seed)
        if "slot_histogram" in emit and backend != "reference":
            scratch = torch.zeros(1 + self.form.num_buckets, dtype=torch.int32, device=tables.device)
            self.form = replace(self.form, scratch=scratch)
        if "packed_ids" in emit and self.form.num_buckets > 1 << 15:
            raise ValueError(f"packed_ids hold 15 bits of slot, this placement has {self.form.num_buckets}")

    def set_seed(self, seed: int) -> None:
        """Seed of the hash deal, read on the device by every later launch (captured ones too)."""
        self.form.seed.fill_(seed & 0x7FFFFFFF)

    def allocate(self, num_tokens: int) -> RoutingOutput:
        """Output buffers to pass as ``out``: captured steps then allocate nothing."""
        return allocate_output(self.form, num_tokens, self.tables.device)

    def __call__(
        self,
        logits: Tensor | None,
        layer: int,
        *,
        num_valid_tokens: Tensor | None = None,
        row_offset: int = 0,
        bias: Tensor | None = None,
        marked_bias: Tensor | None = None,
        token_marker: Tensor | None = None,
        logical_ids: Tensor | None = None,
        weights: Tensor | None = None,
        expert_ids_by_token: Tensor | None = None,
        token_ids: Tensor | None = None,
        count: bool = True,
        waterfill_target: Tensor | None = None,
        out: RoutingOutput | None = None,
    ) -> RoutingOutput:
        """Route one batch of one layer.

        logits            [T, E] fp32, fp16 or bf16; None if ids are given
        num_valid_tokens  int32 tensor of one element on the device: rows from it on are padding
        row_offset        global index of row 0 (rank-invariant and hash dispatch)
        bias              [E] or [T, E], any float dtype; marked_bias [E] instead of it where token_marker [T] is true
        logical_ids, weights       [T, K] given (simulated routing, precomputed top-k) instead of scores and choice
                          Ids int32 or int64; one outside [0, E) is no choice: id -1, weight 0, not counted. Weights are
                          renormalised and scaled like scores; NaN and negative ones (-1 as filler) count as 0
        expert_ids_by_token, token_ids   [vocab, K], [T]: ids by token, weights from their scores
        count             False leaves the counts alone (warm-up, dummy and draft passes); tickets go on
        waterfill_target  [R] slots that each rank should have; default: the mean, shared columns included
        out               buffers from `allocate`

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        if self.custom_routing_function is not None and logical_ids is None:
            if logits is None:
                raise ValueError("logits=None: custom_routing_function needs them")
            weights, logical_ids = self.custom_routing_function(
                logits, self.config.top_k, self.config.renormalize
            )
        call = RouteCall(
            num_tokens=0,
            layer=layer,
            logits=logits if logical_ids is None else None,
            bias=bias,
            marked_bias=marked_bias,
            token_marker=token_marker,
            given_ids=logical_ids,
            given_weights=weights,
            expert_ids_by_token=expert_ids_by_token,
            token_ids=token_ids,
            num_valid_tokens=num_valid_tokens,
            row_offset=row_offset,
            count=count,
        )
        call = replace(call, num_tokens=check_call(self.form, call))
        if out is None:
            out = self.allocate(call.num_tokens)
        if self.backend == "reference":
            route_reference(self.form, call, out)
        else:
            from evenroute.routing.route_kernel import route_kernel

            route_kernel(self.form, call, out, pdl=self.pdl)
        if self.config.shared_mode == "waterfill" and self.config.num_shared_experts:
            waterfill_columns(self.form, call, out, waterfill_target)
        return out


def _require_shape(name: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    if tuple(tensor.shape) not in allowed:
        wanted = " or ".join(str(list(shape)) for shape in allowed)
        raise ValueError(f"{name} must have shape {wanted}, found {list(tensor.shape)}")


def check_call(form: RouteForm, call: RouteCall) -> int:
    """Number of rows; ValueError where an input does not fit the router."""
    experts, top_k = form.config.num_experts, form.config.top_k
    if not 0 <= call.layer < form.tables.num_layers:
        raise ValueError(f"layer={call.layer} is outside [0, num_layers={form.tables.num_layers})")
    if call.given_ids is not None:
        rows = call.given_ids.shape[0]
        if call.given_ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"logical_ids must be int32 or int64, found {call.given_ids.dtype}")
        _require_shape("logical_ids", call.given_ids, (rows, top_k))
        if call.given_weights is None:
            raise ValueError("weights=None: given logical_ids need them")
        _require_shape("weights", call.given_weights, (rows, top_k))
    elif call.logits is None:
        raise ValueError("logits=None: give logits or logical_ids")
    else:
        rows = call.logits.shape[0]
        _require_shape("logits", call.logits, (rows, experts))
        if call.logits.dtype not in LOGIT_DTYPES:
            raise ValueError(f"logits must be float32, float16 or bfloat16, found {call.logits.dtype}")
    if call.bias is not None:
        _require_shape("bias", call.bias, (experts,), (rows, experts))
    if (call.marked_bias is None) != (call.token_marker is None):
        raise ValueError("marked_bias and token_marker come together, found one of them")
    if call.marked_bias is not None and call.token_marker is not None:
        _require_shape("marked_bias", call.marked_bias, (experts,))
        _require_shape("token_marker", call.token_marker, (rows,))
    if (call.expert_ids_by_token is None) != (call.token_ids is None):
        raise ValueError("expert_ids_by_token and token_ids come together, found one of them")
    if call.expert_ids_by_token is not None and call.token_ids is not None:
        _require_shape(
            "expert_ids_by_token", call.expert_ids_by_token, (call.expert_ids_by_token.shape[0], top_k)
        )
        _require_shape("token_ids", call.token_ids, (rows,))
    _check_devices(form, call)
    return rows


def _check_devices(form: RouteForm, call: RouteCall) -> None:
    device = form.tables.device.type
    for name, value in vars(call).items():
        if isinstance(value, Tensor) and value.device.type != device:
            raise ValueError(f"{name} lies on {value.device}, the tables on {form.tables.device}")
    valid = call.num_valid_tokens
    if valid is not None and (valid.dtype != torch.int32 or valid.numel() != 1):
        raise ValueError(f"num_valid_tokens must be one int32, found {valid.dtype} {list(valid.shape)}")
    for name in ("bias", "marked_bias", "given_weights"):
        value = getattr(call, name)
        if value is not None and not value.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating point, found {value.dtype}")
