"""Gate GEMM and routing together: hidden states in, physical ids out, one launch for decode batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from evenroute.eplb._checks import require_bool, require_choice, require_instance, require_int
from evenroute.routing.call_checks import check_call, require_interpreter
from evenroute.routing.gradient import wants_gradient
from evenroute.routing.kernels.plan import supports_groups
from evenroute.routing.output import RouteCall, RoutingOutput, allocate_output
from evenroute.routing.router import BACKENDS, Router, launch
from evenroute.routing.settings.checks import fits, require_tensor
from evenroute.routing.waterfill import waterfill_columns

MAX_FUSED_TOKENS = 128  # the crossover: see `GateRouter`
MAX_HIDDEN_SIZE = 1 << 20
GATE_DTYPES = (torch.bfloat16, torch.float16)

_COLUMNS = 32  # of a tile
_DEPTH = 64  # of one multiply-accumulate step
_MAX_PARTS = 32
_MAX_ROWS = 16  # of a program; small gates with small grids are not fused beyond
_STAGES = 5  # of the software pipeline over _DEPTH steps


@dataclass(frozen=True)
class GatePlan:
    """Grid of the fused launch: column tiles x slices of the hidden dimension (`slice_length` each)."""

    tiles: int
    parts: int
    slice_length: int
    block_rows: int
    rows: int

    @property
    def programs(self) -> int:
        return self.tiles * self.parts


@lru_cache(maxsize=256)
def plan_gate(num_experts: int, hidden_size: int, num_tokens: int, num_processors: int) -> GatePlan:
    """Plan for T <= 128 rows: at most one program per processor, so that all are resident at the grid barrier."""
    tiles = -(-num_experts // _COLUMNS)
    parts = max(1, min(num_processors // tiles, _MAX_PARTS, -(-hidden_size // _DEPTH)))
    slice_length = -(-hidden_size // (parts * _DEPTH)) * _DEPTH
    parts = -(-hidden_size // slice_length)
    rows = 1 << max(0, -(-num_tokens // (tiles * parts)) - 1).bit_length()
    block_rows = max(16, 1 << max(0, num_tokens - 1).bit_length())
    return GatePlan(tiles, parts, slice_length, block_rows, rows)


class GateRouter:
    """A router with its gate's matrix product: `hidden [T, H]` and `gate_weight [E, H]` instead of logits.

    On CUDA, batches of up to `max_fused_tokens` rows (`fuses`) take one cooperative launch in which the logits never
    leave the chip's cache; larger ones take a GEMM with fp32 output and the router's launch. On CPU: plain torch.

    Why 128: one H200, E=256, H=7168, exact deal, microseconds fused (from 129 rows in blocks of 128, a trial) against
    GEMM and router: T=64 6.3 / 9.2, 128 7.0 / 9.4, 192 10.3 / 9.7, 256 10.5 / 10.8, 384 13.5 / 10.8, 512 16.0 / 11.9,
    1024 29.5 / 14.5. A second block of rows costs 3.3: every column tile reads all hidden states again.

    router            its tables, counters, outputs and dispatch are used
    hidden_size       H
    max_fused_tokens  0 to 128; 0 never fuses
    backend           default: the router's; "interpret" runs the two phases of the kernel on CPU tensors, for tests
    pdl               programmatic dependent launch (Hopper and later)

    The fp32 logits are sums in an order that depends on the batch size's power of two. A fused logit of n products in s
    slices is off by at most (17 n / (16 s) + s) * 2^-23 * sum |x_i w_i|.

    Raises:
        ValueError: the router has a custom routing function, or a number is out of range.
    """

    def __init__(
        self,
        router: Router,
        hidden_size: int,
        *,
        max_fused_tokens: int = MAX_FUSED_TOKENS,
        backend: str | None = None,
        pdl: bool = False,
    ) -> None:
        require_instance("router", router, Router)
        if router.custom_routing_function is not None:
            raise ValueError(
                "custom_routing_function: needs logits, the gate's stay on the chip; call the router"
            )
        require_int("hidden_size", hidden_size, 1, MAX_HIDDEN_SIZE)
        require_int("max_fused_tokens", max_fused_tokens, 0, MAX_FUSED_TOKENS)
        require_bool("pdl", pdl)
        if backend is not None:
            require_choice("backend", backend, BACKENDS)
        cuda = router.tables.device.type == "cuda"
        if backend == "triton" and not cuda:
            raise ValueError(f"backend='triton' needs CUDA tensors, the tables lie on {router.tables.device}")
        if backend == "interpret":
            require_interpreter(router.tables.device)
        if backend in ("triton", "interpret") and router.backend == "reference":
            raise ValueError(f"backend={backend!r} needs a router with a kernel, found backend='reference'")
        self.router = router
        self.hidden_size = hidden_size
        self.backend = router.backend if backend in (None, "auto") else backend
        self.pdl = pdl
        fused = self.backend in ("triton", "interpret") and supports_groups(router.config)
        self.max_fused_tokens = max_fused_tokens if fused else 0
        device = router.tables.device
        self.num_processors = 132  # where the interpreter plays an H200
        if device.type == "cuda":
            self.num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        experts = router.config.num_experts
        plan = plan_gate(experts, hidden_size, MAX_FUSED_TOKENS, self.num_processors)
        rows = MAX_FUSED_TOKENS if self.max_fused_tokens else 0
        with torch.inference_mode(False):
            self._partials = torch.empty((plan.parts, rows, experts), dtype=torch.float32, device=device)
            self._logits = torch.empty((rows, experts), dtype=torch.float32, device=device)
            self._barrier = torch.zeros(1, dtype=torch.int64, device=device)

    def __call__(
        self,
        hidden: Tensor,
        gate_weight: Tensor,
        layer: int,
        *,
        num_valid_tokens: Tensor | None = None,
        row_offset: int = 0,
        bias: Tensor | None = None,
        marked_bias: Tensor | None = None,
        token_marker: Tensor | None = None,
        expert_ids_by_token: Tensor | None = None,
        token_ids: Tensor | None = None,
        count: bool | Tensor = True,
        route_padding: bool = False,
        waterfill_target: Tensor | None = None,
        out: RoutingOutput | None = None,
    ) -> RoutingOutput:
        """Route `hidden [T, H]` (bf16 or fp16) by `gate_weight [E, H]` (same dtype); the rest is `Router.__call__`'s.

        Raises:
            ValueError: shapes, dtypes or devices do not fit.
        """
        router = self.router
        self._check(hidden, gate_weight)
        tokens, gradient = hidden.shape[0], wants_gradient(hidden, gate_weight)
        fused = not gradient and self.fuses(tokens)
        if gradient:  # a backward pass needs the logits; the fused launch keeps none
            logits = torch.nn.functional.linear(hidden.float(), gate_weight.float())
        else:
            logits = self._logits[:tokens] if fused else gate_logits(hidden, gate_weight)
        call = RouteCall(
            num_tokens=tokens,
            layer=layer,
            logits=logits,
            bias=bias,
            marked_bias=marked_bias,
            token_marker=token_marker,
            expert_ids_by_token=expert_ids_by_token,
            token_ids=token_ids,
            num_valid_tokens=num_valid_tokens,
            row_offset=row_offset,
            count=count,
            route_padding=route_padding,
        )
        if gradient:
            return router.run(call, waterfill_target, out)
        check_call(router.plan, call, waterfill_target, out)
        if out is None:
            out = allocate_output(router.plan, tokens, router.tables.device)
        if fused:
            phases = ("both",) if self.backend == "triton" else ("gemm", "route")
            for phase in phases:
                self.launch(phase, hidden, gate_weight, call, out)
        else:
            launch(router.plan, call, out, backend=self.backend, pdl=self.pdl)
        waterfill_columns(router.plan, call, out, waterfill_target)
        return out

    def fuses(self, num_tokens: int) -> bool:
        """Whether a batch of T rows takes the one launch."""
        require_int("num_tokens", num_tokens, 0)
        if not 0 < num_tokens <= self.max_fused_tokens:
            return False
        plan = plan_gate(self.router.config.num_experts, self.hidden_size, num_tokens, self.num_processors)
        return plan.rows <= _MAX_ROWS

    def launch(
        self, phase: str, hidden: Tensor, gate_weight: Tensor, call: RouteCall, out: RoutingOutput
    ) -> None:
        """Enqueue "both" phases as one launch, or "gemm" or "route" alone (tests, benchmarks, the interpreter)."""
        from evenroute.routing.kernels.gate import gate_route
        from evenroute.routing.launch import launch_arguments, launch_deal, with_rows

        experts = self.router.config.num_experts
        plan = plan_gate(experts, self.hidden_size, call.num_tokens, self.num_processors)
        _, arguments, constants, _ = launch_arguments(self.router.plan, call, out)
        pointers = tuple(a for a in arguments if isinstance(a, Tensor))
        num_tokens, _, bias_stride, vocab, row_offset, rank_salt, ep_rank, chunks = arguments[len(pointers) :]
        options: dict[str, Any] = {}
        if self.backend == "triton":
            options = {"num_warps": 4, "num_stages": _STAGES}
            if phase == "both":
                options["launch_cooperative_grid"] = True
            if self.pdl:
                options["launch_pdl"] = True
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        gate_route[(plan.programs,)](
            hidden,
            gate_weight,
            self._partials,
            self._logits,
            self._barrier,
            pointers,
            num_tokens,
            hidden.stride(0),
            gate_weight.stride(0),
            bias_stride,
            vocab,
            row_offset,
            rank_salt,
            ep_rank,
            chunks,
            with_rows(constants, plan.rows),
            self._constants(phase, plan),
            **options,
        )
        if phase != "gemm" and constants.mode.pick == "batch":
            launch_deal(self.router.plan, call, out)

    def _constants(self, phase: str, plan: GatePlan) -> Any:
        from evenroute.routing.kernels.gate import GateConstants

        experts = self.router.config.num_experts
        return GateConstants(
            phase=phase,
            experts=experts,
            hidden_size=self.hidden_size,
            block_rows=plan.block_rows,
            columns=_COLUMNS,
            depth=_DEPTH,
            tiles=plan.tiles,
            slice_length=plan.slice_length,
            parts=plan.parts,
            experts_pad=1 << max(0, experts - 1).bit_length(),
            rows=plan.rows,
            widen=self.backend == "interpret",
            # The slot histogram counts finished programs, so there all take part.
            all_route="slot_histogram" in self.router.plan.emit,
            pdl=self.pdl,
        )

    def _check(self, hidden: Tensor, gate_weight: Tensor) -> None:
        experts, device = self.router.config.num_experts, self.router.plan.seed.device
        if not fits(gate_weight, (experts, self.hidden_size), GATE_DTYPES, device):
            shape = (experts, self.hidden_size)
            require_tensor("gate_weight", gate_weight, shape, dtypes=GATE_DTYPES, device=device)
        require_tensor("hidden", hidden, ("T", self.hidden_size), dtypes=(gate_weight.dtype,), device=device)
        if gate_weight.stride(1) != 1:
            raise ValueError(f"gate_weight: expected contiguous rows, found strides {gate_weight.stride()}")


@torch.no_grad()
def gate_logits(hidden: Tensor, gate_weight: Tensor) -> Tensor:
    """`hidden [T, H] @ gate_weight [E, H].T` in fp32, [T, E]."""
    if hidden.is_cuda:
        return torch.mm(hidden, gate_weight.t(), out_dtype=torch.float32)
    return hidden.float() @ gate_weight.float().t()
