"""The router: logits in, physical ids out, one launch a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from evenroute.eplb._checks import describe, require_bool, require_choice, require_instance, require_int
from evenroute.routing.batch.settings import BATCH_ROWS, make_batch
from evenroute.routing.call_checks import (
    check_call,
    checked_emit,
    num_rows,
    require_interpreter,
    require_logits,
)
from evenroute.routing.counters import ExpertCounters
from evenroute.routing.gradient import RoutedWeights, wants_gradient
from evenroute.routing.output import (
    DEFAULT_EMIT,
    OUTPUT_NAMES,
    RouteCall,
    RouterPlan,
    RoutingOutput,
    allocate_output,
)
from evenroute.routing.reference import route_reference
from evenroute.routing.settings.config import RouterConfig
from evenroute.routing.settings.modes import find_mode
from evenroute.routing.tables.tables import DispatchTables
from evenroute.routing.warm_up import WarmUp, warm_up
from evenroute.routing.waterfill import waterfill_columns

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from evenroute.routing.direct import DirectLaunch
    from evenroute.routing.launch import Launched

BACKENDS = ("auto", "reference", "triton", "interpret")

# (logits [T, E], top_k, renormalize) -> (weights [T, K], logical ids [T, K])
CustomRouting = Callable[[Tensor, int, bool], tuple[Tensor, Tensor]]


class Router:
    """Routes the tokens of all layers of one model on one rank.

    config, tables, counters   counters are made here if none are given
    dispatch    "auto" (weighted where a placement carries shares, else even), "static", "dynamic", "rank_invariant"
                or "weighted"
    deal        "exact" (tickets) or "hash", for dynamic and weighted with tokens="own"; "batch", for weighted: the
                planned shares corrected for each batch of `batch_rows` rows or more, in a second launch; smaller ones
                by tickets. Calls of one router must then follow each other on one stream
    deterministic   deal="batch" for every batch, so that ids are a function of the batch alone (and of the rank):
                what tokens="shared" needs
    node_group  deal="batch" with the summed counts of these ranks, each dealing its part: one all-gather a call, which
                all of them make equally often, empty batches too
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
        deterministic: bool = False,
        batch_rows: int = BATCH_ROWS,
        node_group: ProcessGroup | None = None,
        tokens: str = "own",
        backend: str = "auto",
        emit: tuple[str, ...] = DEFAULT_EMIT,
        custom_routing_function: CustomRouting | None = None,
        pdl: bool = False,
    ) -> None:
        require_instance("config", config, RouterConfig)
        require_instance("tables", tables, DispatchTables)
        if counters is not None:
            require_instance("counters", counters, ExpertCounters)
        require_choice("backend", backend, BACKENDS)
        require_bool("pdl", pdl)
        if custom_routing_function is not None and not callable(custom_routing_function):
            raise ValueError(
                f"custom_routing_function must be callable, found {describe(custom_routing_function)}"
            )
        emit = checked_emit(emit, config)
        mode = find_mode(dispatch, deal, tokens)
        if tables.num_logical_experts != config.num_experts:
            raise ValueError(
                f"config.num_experts={config.num_experts}, the tables hold {tables.num_logical_experts} experts"
            )
        if counters is None:
            counters = ExpertCounters(tables.num_layers, config.num_experts, device=tables.device)
        mine = (tables.num_layers, config.num_experts, tables.storage.device)
        found = (counters.num_layers, counters.num_logical_experts, counters.counts.device)
        if mine != found:
            raise ValueError(
                f"counters have (layers, experts, device) {_words(found)}, the tables {_words(mine)}"
            )
        per_rank = config.num_shared_experts > 0 and config.shared_mode != "global"
        if tokens == "shared" and per_rank:
            raise ValueError(
                f"shared_mode={config.shared_mode!r} with tokens='shared': every rank would add the shared experts; "
                "allowed: global"
            )
        if backend == "auto":
            backend = "triton" if tables.device.type == "cuda" else "reference"
        batch = make_batch(mode, tables, emit, backend, deterministic, batch_rows, node_group)
        if mode.pick == "ticket" or (batch is not None and batch.small is not None):
            counters.enable_tickets()
            if mode.weighted:
                tables.enable_sequences()
        if mode.weighted:
            tables.hold_classes(config.top_k, shared=tokens == "shared")
        if backend == "triton" and tables.device.type != "cuda":
            raise ValueError(f"backend='triton' needs CUDA tensors, the tables lie on {tables.device}")
        if backend == "interpret":
            require_interpreter(tables.device)
        with torch.inference_mode(False):  # made under it, the seed could not be set outside
            seed = torch.zeros(1, dtype=torch.int32, device=tables.device)
        counters.top_k = max(counters.top_k, config.top_k)
        self.config, self.tables, self.counters = config, tables, counters
        self.dispatch, self.tokens, self.backend, self.pdl = mode.dispatch, tokens, backend, pdl
        self.custom_routing_function = custom_routing_function
        self.plan = RouterPlan(config, tables, counters, mode, emit, seed, batch=batch)
        if "slot_histogram" in emit and backend != "reference":
            with torch.inference_mode(False):
                scratch = torch.zeros(1 + self.plan.num_buckets, dtype=torch.int32, device=tables.device)
            self.plan = replace(self.plan, scratch=scratch)
        if "packed_ids" in emit and self.plan.num_buckets > 1 << 15:
            raise ValueError(f"packed_ids hold 15 bits of slot, this placement has {self.plan.num_buckets}")
        self.direct = self._bind()

    def _bind(self) -> DirectLaunch | None:
        """What starts known launches without Triton's dispatch, where that can be."""
        rewrites = self.config.shared_mode == "waterfill" and self.config.num_shared_experts > 0
        if self.backend != "triton" or rewrites or self.custom_routing_function is not None:
            return None
        from evenroute.routing.direct import DirectLaunch

        direct = DirectLaunch(self.plan, self.pdl)
        return direct if direct.usable else None

    def set_seed(self, seed: int) -> None:
        """Seed of the hash deal, read on the device by every later launch (captured ones too)."""
        require_int("seed", seed, -(1 << 63), (1 << 63) - 1)
        self.plan.seed.fill_(seed & 0x7FFFFFFF)

    def warm_up(
        self,
        rows: int | Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        bias: Tensor | None = None,
        padding: bool = True,
    ) -> WarmUp:
        """Compile the launches of these batch sizes before a server needs them; nothing is routed or counted.

        rows     batch sizes; those of one class (1 to 256, to 4096, above) share a form, with and without counting
        dtype    of the logits; bias as in a call; padding: whether calls will give num_valid_tokens

        Returns (seconds, compiled): how long it took, and a line a form. Without a kernel (CPU) there is nothing to do.

        Raises:
            ValueError: no row number is given or one is below 1, or dtype or bias do not fit.
        """
        compiles = self.backend == "triton"
        return warm_up(self.plan, self.direct, rows, dtype, bias, padding, compiles=compiles, pdl=self.pdl)

    def allocate(self, num_tokens: int) -> RoutingOutput:
        """Output buffers to pass as ``out``: captured steps then allocate nothing."""
        require_int("num_tokens", num_tokens, 0)
        if self.plan.batch is not None and self.plan.batch.state is not None:
            self.plan.batch.state.hold(num_tokens)
        with torch.inference_mode(False):  # made under it, they could not be written outside
            return allocate_output(self.plan, num_tokens, self.tables.device)

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
        count: bool | Tensor = True,
        route_padding: bool = False,
        keep_weights: bool = False,
        waterfill_target: Tensor | None = None,
        out: RoutingOutput | None = None,
    ) -> RoutingOutput:
        """Route one batch of one layer.

        logits            [T, E] fp32, fp16 or bf16; None if ids are given
        num_valid_tokens  int32 tensor of one element on the device: rows from it on are padding, never counted
        route_padding     padding gets valid ids, like any row, instead of -1
        row_offset        global index of row 0 (rank-invariant and hash dispatch)
        bias              [E] or [T, E], any float dtype; marked_bias [E] instead of it where token_marker [T] is true
        logical_ids, weights       [T, K] given (simulated routing, precomputed top-k) instead of scores and choice
                          Ids int32 or int64; one outside [0, E) is no choice: id -1, weight 0, not counted. Weights are
                          renormalised and scaled like scores; NaN and negative ones (-1 as filler) count as 0.
                          [T, K+S]: with the shared columns (ids E.. to E+S-1), which then are as given too
        keep_weights      given weights stay as they are, neither renormalised nor scaled
        expert_ids_by_token, token_ids   [vocab, K], [T]: ids by token, weights from their scores
        count             False leaves the counts alone (warm-up, dummy and draft passes); tickets go on. A tensor of
                          one bool or integer on the device decides there, in a captured graph too: 0 is False
        waterfill_target  [R] slots that each rank should have; default: the mean, shared columns included
        out               buffers from `allocate`

        Where logits or given weights require a gradient, `weights` of the returned output carry it (read those, not
        `out`'s): that of the scores, renormalised and scaled; ids and bias have none. Checks look at attributes alone.

        Raises:
            ValueError: types, shapes, dtypes or devices do not fit, or arguments contradict each other.
        """
        if (
            self.direct is not None
            and self.custom_routing_function is None
            and marked_bias is None
            and token_marker is None
            and logical_ids is None
            and weights is None
            and expert_ids_by_token is None
            and token_ids is None
            and keep_weights is False
            and waterfill_target is None
            and not is_compiling()
        ):
            known = self.direct.launch(
                logits, layer, bias, num_valid_tokens, row_offset, count, route_padding, out
            )
            if known is not None:
                return known
        if self.custom_routing_function is not None and logical_ids is None:
            weights, logical_ids = self._custom_choice(logits, weights, expert_ids_by_token)
        # Positional: this call is the host's part of a launch, in microseconds.
        call = RouteCall(
            num_rows(logits, logical_ids),
            layer,
            logits if logical_ids is None else None,
            bias,
            marked_bias,
            token_marker,
            logical_ids,
            weights,
            expert_ids_by_token,
            token_ids,
            num_valid_tokens,
            row_offset,
            count,
            route_padding,
            keep_weights,
        )
        return self.run(call, waterfill_target, out)

    def run(
        self, call: RouteCall, waterfill_target: Tensor | None, out: RoutingOutput | None
    ) -> RoutingOutput:
        """`__call__` with its arguments put together."""
        check_call(self.plan, call, waterfill_target, out)
        if wants_gradient(call.logits, call.given_weights) and "weights" in self.plan.emit:
            return self._with_gradient(call, waterfill_target, out)
        if out is None:
            out = allocate_output(self.plan, call.num_tokens, self.tables.device)
        launched = launch(self.plan, call, out, backend=self.backend, pdl=self.pdl)
        if self.direct is not None:
            self.direct.learn(call, out, launched)
        waterfill_columns(self.plan, call, out, waterfill_target)
        return out

    def _with_gradient(
        self, call: RouteCall, waterfill_target: Tensor | None, out: RoutingOutput | None
    ) -> RoutingOutput:
        """The same launch, which also writes the logical ids that a backward pass needs."""
        emit, device = self.plan.emit, self.tables.device
        names = tuple(name for name in OUTPUT_NAMES if name in emit or name == "logical_ids")
        plan = replace(self.plan, emit=names)
        buffers = allocate_output(plan, call.num_tokens, device)
        if out is not None:
            ids = buffers.logical_ids if out.logical_ids is None else out.logical_ids
            buffers = replace(out, logical_ids=ids, emitted=names)
        launch(plan, call, buffers, backend=self.backend, pdl=self.pdl)
        waterfill_columns(plan, call, buffers, waterfill_target)
        assert buffers.logical_ids is not None
        source = call.logits if call.given_weights is None else call.given_weights
        width = self.config.top_k if call.given_ids is None else call.given_ids.shape[1]
        chosen, config = buffers.logical_ids[:, :width].clone(), self.config
        if call.keep_weights:
            config = replace(config, renormalize=False, apply_routed_scaling_factor=False)
        weights = RoutedWeights.apply(  # type: ignore[no-untyped-call]
            source, buffers.weights, chosen, call.given_ids, config
        )
        kept = buffers.logical_ids if "logical_ids" in emit else None
        return replace(buffers, weights=weights, logical_ids=kept, emitted=emit)

    def _custom_choice(self, logits: Any, weights: Any, table: Any) -> tuple[Tensor, Tensor]:
        assert self.custom_routing_function is not None
        for name, value in (("weights", weights), ("expert_ids_by_token", table)):
            if value is not None:
                raise ValueError(f"{name}: the custom_routing_function chooses and weighs; expected None")
        if logits is None:
            raise ValueError("logits=None: custom_routing_function needs them")
        require_logits(self.plan, logits)
        found = self.custom_routing_function(logits, self.config.top_k, self.config.renormalize)
        pair = isinstance(found, tuple | list) and len(found) == 2
        if not pair or not all(isinstance(part, Tensor) for part in found):
            parts = f"({describe(found[0])}, {describe(found[1])})" if pair else describe(found)
            raise ValueError(f"custom_routing_function must return (weights, logical_ids), found {parts}")
        return found[0], found[1]


def launch(
    plan: RouterPlan, call: RouteCall, out: RoutingOutput, *, backend: str, pdl: bool
) -> Launched | None:
    """Route one checked batch into `out`, by the kernel (which is returned) or in plain torch."""
    if backend == "reference":
        route_reference(plan, call, out)
        return None
    from evenroute.routing.launch import route_kernel

    return route_kernel(plan, call, out, pdl=pdl)


def _words(found: tuple[int, int, torch.device]) -> str:
    return f"({found[0]}, {found[1]}, {found[2]})"
